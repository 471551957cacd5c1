/* kernels: the kernels of the CUDA backend. nvcc and NVRTC compile them as CUDA C, and a C compiler
 * for the fake driver, which defines the macros below in its own way: then a kernel is a function
 * that is called once for each thread.
 *
 * Results are bitwise those of the CPU: the same left fold for each element, the same roundings
 * (array/lowp.h), no contraction (-fmad=false), no flushing, no atomics except for counting. One
 * thread reads an element from all sources before it writes it, so the result may overlap a source
 * exactly.
 *
 * Title: Two ways. Gap-free sources of one dtype have a fold kernel for each kind of number, 16
 * bytes at a time, and one that does many such sums. Anything else goes through fan_any: a number
 * of any dtype is converted to one of four wide forms that hold it exactly, as in array/convert.c,
 * and each dtype converts from them with one rounding.
 *
 * NVRTC or nvcc compiles it when a device is first used (fanin._kernels), or nvcc at build. NVRTC
 * has no C library: a name of it that is used here for the first time is added to HEADERS there. */
#include "array/dtype.h"
#include "array/lowp.h"
#include "array/device_stats.h"
#include "device/kernels/args.h"

#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void __launch_bounds__(FAN_K_BLOCK)
#define ARGS(T, a) const __grid_constant__ T a
#define DEVICE static __device__
#define NOINLINE_DEVICE static __device__ __noinline__
#define THREAD ((int64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((int64_t)gridDim.x * blockDim.x)
#define AT(T, address) ((T *)(uintptr_t)(address))
#define UNROLL_(text) _Pragma(#text)
#define UNROLL(n) UNROLL_(unroll n)
#define SHARED __shared__
#define LANE ((int)threadIdx.x)
#define BLOCK ((int64_t)blockIdx.x)
#define SYNC_BLOCK __syncthreads()
#define EACH_LANE(i, n) for (int i = LANE; i < (n); i += FAN_K_BLOCK)
#define IS_FIRST_LANE (LANE == 0)
#define COUNT_ONE(n) (void)atomicAdd(&(n), 1u)
#define SYNC_WARP __syncwarp()
#define SAME_IN_WARP(x) __match_any_sync(0xffffffffu, (x))
#define BITS_IN(mask) __popc(mask)
typedef uint4 sixteen;
#endif
#define ITEM(T, address, i) (*AT(T, (address) + sizeof(T) * (uint64_t)(i)))

/* ---- Folds of gap-free numbers ---- */

/* X(name, in memory, as a number, in, a plus b, a times b, out, the neutral element of +, whether
 * four are converted at once) */
#define NUMBER_LIST(X)                                                                           \
    X(truth, uint8_t, uint8_t, x != 0, a | b, a & b, x, 0, each)                                 \
    X(bits8, uint8_t, uint8_t, x, (uint8_t)(a + b), (uint8_t)(a * b), x, 0, each)                \
    X(bits16, uint16_t, uint16_t, x, (uint16_t)(a + b), (uint16_t)((uint32_t)a * b), x, 0, each) \
    X(bits32, uint32_t, uint32_t, x, a + b, a * b, x, 0, each)                                   \
    X(bits64, uint64_t, uint64_t, x, a + b, a * b, x, 0, each)                                   \
    X(single, float, float, x, a + b, a * b, x, -0.0f, each)                                     \
    X(twice, double, double, x, a + b, a * b, x, -0.0, each)                                     \
    X(doubled, float, double, (double)x, a + b, a * b, (float)x, -0.0, each)                     \
    FAN_LOW_LIST(LOW_NUMBER, X)
#define AT_ONCE_16 each
#define AT_ONCE_8 four
#define LOW_NUMBER(X, NAME, c, bits, ...) LOW_NUMBER_OF(X, c, uint##bits##_t, AT_ONCE_##bits)
#define LOW_NUMBER_OF(X, c, MEM, AT_ONCE) \
    X(c, MEM, float, fan_float_of_##c(x), a + b, a * b, fan_##c##_of(x), -0.0f, AT_ONCE)

#define AHEAD 4 /* loads of 16 bytes in flight per thread */

/* sixteen_of: returns the v-th 16 bytes from an address that is a multiple of 16. */
DEVICE inline sixteen sixteen_of(uint64_t p, int64_t v)
{
#ifdef __CUDA_ARCH__
    sixteen x; /* volatile: loads now, not at the first use */
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p + 16 * (uint64_t)v));
    return x;
#else
    return *AT(const sixteen, p + 16 * (uint64_t)v);
#endif
}

/* sixteen_at: the same for an address that is a multiple of a number's size; unless RAGGED, of
 * 16. */
DEVICE inline sixteen sixteen_at(uint64_t p, int64_t v, int number, bool ragged)
{
    union {
        sixteen all;
        uint64_t eights[2];
        uint32_t fours[4];
        uint16_t twos[8];
        uint8_t ones[16];
    } x;
    if (!ragged || (p & 15) == 0)
        return sixteen_of(p, v);
    if (number >= 8 || (p & 7) == 0) {
        for (int i = 0; i < 2; i++)
            x.eights[i] = ITEM(const uint64_t, p, v * 2 + i);
    } else if (number >= 4 || (p & 3) == 0) {
        for (int i = 0; i < 4; i++)
            x.fours[i] = ITEM(const uint32_t, p, v * 4 + i);
    } else if (number >= 2 || (p & 1) == 0) {
        for (int i = 0; i < 8; i++)
            x.twos[i] = ITEM(const uint16_t, p, v * 8 + i);
    } else {
        for (int i = 0; i < 16; i++)
            x.ones[i] = ITEM(const uint8_t, p, v * 16 + i);
    }
    return x.all;
}

#define ADD_PIECE_each(K)             \
    for (int i = 0; i < PER_##K; i++) \
        sum->each[i] = plus_##K(sum->each[i], up_##K(x->each[i]));
#define ADD_PIECE_four(K)                                           \
    for (int i = 0; i < PER_##K; i += 4) {                          \
        float four[4];                                              \
        fan_floats_of_four_##K(x->words[i / 4], four);              \
        for (int j = 0; j < 4; j++)                                 \
            sum->each[i + j] = plus_##K(sum->each[i + j], four[j]); \
    }

/* A PIECE is 16 bytes of a source, a SUM its numbers in the accumulation type. FIRST_WIDE: the
 * first source has those, as a running sum; OUT_WIDE: the result has. All loads of a group precede
 * the first use. */
#define PIECES(K, MEM, T, UP, PLUS, TIMES, DOWN, NOTHING, BY)                                     \
    enum {                                                                                        \
        PER_##K = 16 / sizeof(MEM),                                                               \
        SIXTEENS_##K = sizeof(T) / sizeof(MEM)                                                    \
    };                                                                                            \
    typedef union piece_##K {                                                                     \
        sixteen all;                                                                              \
        uint32_t words[4];                                                                        \
        MEM each[PER_##K];                                                                        \
    } piece_##K;                                                                                  \
    typedef union sum_##K {                                                                       \
        sixteen all[SIXTEENS_##K];                                                                \
        T each[PER_##K];                                                                          \
    } sum_##K;                                                                                    \
    DEVICE inline T up_##K(MEM x)                                                                 \
    {                                                                                             \
        return UP;                                                                                \
    }                                                                                             \
    DEVICE inline T plus_##K(T a, T b)                                                            \
    {                                                                                             \
        return PLUS;                                                                              \
    }                                                                                             \
    DEVICE inline T times_##K(T a, T b)                                                           \
    {                                                                                             \
        return TIMES;                                                                             \
    }                                                                                             \
    DEVICE inline MEM down_##K(T x)                                                               \
    {                                                                                             \
        return DOWN;                                                                              \
    }                                                                                             \
    DEVICE inline double wide_value_##K(uint64_t p, int64_t i)                                    \
    {                                                                                             \
        return (double)ITEM(const T, p, i);                                                       \
    }                                                                                             \
    DEVICE inline void add_piece_##K(sum_##K *sum, const piece_##K *x){ADD_PIECE_##BY(K)}         \
    /* fold_pieces: sums the v-th piece of all sources; `m` of them, `pitch` from each other. */  \
    DEVICE inline void fold_pieces_##K(sum_##K *sum, const uint64_t *in, int n, int64_t v, int m, \
                                       int64_t pitch, int flags, bool ragged)                     \
    {                                                                                             \
        piece_##K ahead[AHEAD][2];                                                                \
        int k = 0;                                                                                \
        for (int j = 0; j < m; j++)                                                               \
            if (SIXTEENS_##K > 1 && (flags & FAN_K_FIRST_WIDE)) {                                 \
                for (int i = 0; i < SIXTEENS_##K; i++)                                            \
                    sum[j].all[i] =                                                               \
                        sixteen_at(in[0], (v + j * pitch) * SIXTEENS_##K + i, sizeof(T), ragged); \
                k = 1;                                                                            \
            } else {                                                                              \
                for (int i = 0; i < PER_##K; i++)                                                 \
                    sum[j].each[i] = NOTHING;                                                     \
            }                                                                                     \
        UNROLL(1)                                                                                 \
        for (; k + AHEAD <= n; k += AHEAD) {                                                      \
            for (int i = 0; i < AHEAD; i++)                                                       \
                for (int j = 0; j < m; j++)                                                       \
                    ahead[i][j].all = sixteen_at(in[k + i], v + j * pitch, sizeof(MEM), ragged);  \
            for (int i = 0; i < AHEAD; i++)                                                       \
                for (int j = 0; j < m; j++)                                                       \
                    add_piece_##K(&sum[j], &ahead[i][j]);                                         \
        }                                                                                         \
        for (int i = 0; i < AHEAD - 1; i++)                                                       \
            for (int j = 0; j < m; j++)                                                           \
                if (k + i < n)                                                                    \
                    ahead[i][j].all = sixteen_at(in[k + i], v + j * pitch, sizeof(MEM), ragged);  \
        for (int i = 0; i < AHEAD - 1; i++)                                                       \
            for (int j = 0; j < m; j++)                                                           \
                if (k + i < n)                                                                    \
                    add_piece_##K(&sum[j], &ahead[i][j]);                                         \
    }                                                                                             \
    DEVICE inline T fold_one_##K(const uint64_t *in, int n, int64_t i, int flags)                 \
    {                                                                                             \
        bool wide = SIXTEENS_##K > 1 && (flags & FAN_K_FIRST_WIDE);                               \
        T one = wide ? ITEM(const T, in[0], i) : up_##K(ITEM(const MEM, in[0], i));               \
        UNROLL(AHEAD)                                                                             \
        for (int k = 1; k < n; k++)                                                               \
            one = plus_##K(one, up_##K(ITEM(const MEM, in[k], i)));                               \
        return one;                                                                               \
    }                                                                                             \
    /* round_piece: rounds the sum for memory, unless OUT_WIDE. */                                \
    DEVICE inline void round_piece_##K(piece_##K *x, const sum_##K *sum)                          \
    {                                                                                             \
        for (int i = 0; i < PER_##K; i++)                                                         \
            x->each[i] = down_##K(sum->each[i]);                                                  \
    }                                                                                             \
    DEVICE inline void write_piece_##K(uint64_t out, const sum_##K *sum, int64_t v, int flags,    \
                                       bool ragged)                                               \
    {                                                                                             \
        piece_##K x;                                                                              \
        if (SIXTEENS_##K > 1 && (flags & FAN_K_OUT_WIDE)) {                                       \
            if (!ragged || (out & 15) == 0)                                                       \
                for (int i = 0; i < SIXTEENS_##K; i++)                                            \
                    ITEM(sixteen, out, v * SIXTEENS_##K + i) = sum->all[i];                       \
            else                                                                                  \
                for (int i = 0; i < PER_##K; i++)                                                 \
                    ITEM(T, out, v * PER_##K + i) = sum->each[i];                                 \
            return;                                                                               \
        }                                                                                         \
        round_piece_##K(&x, sum);                                                                 \
        if (!ragged || (out & 15) == 0)                                                           \
            ITEM(sixteen, out, v) = x.all;                                                        \
        else                                                                                      \
            for (int i = 0; i < PER_##K; i++)                                                     \
                ITEM(MEM, out, v * PER_##K + i) = x.each[i];                                      \
    }                                                                                             \
    DEVICE inline void write_one_##K(uint64_t out, T one, int64_t i, int flags)                   \
    {                                                                                             \
        if (SIXTEENS_##K > 1 && (flags & FAN_K_OUT_WIDE))                                         \
            ITEM(T, out, i) = one;                                                                \
        else                                                                                      \
            ITEM(MEM, out, i) = down_##K(one);                                                    \
    }                                                                                             \
    DEVICE inline void scale_piece_##K(sum_##K *sum, T factor)                                    \
    {                                                                                             \
        for (int i = 0; i < PER_##K; i++)                                                         \
            sum->each[i] = times_##K(sum->each[i], factor);                                       \
    }
NUMBER_LIST(PIECES)

/* PIECES_OF: M pieces, `pitch` from each other, for each v from `from` to `to`. */
#define PIECES_OF(K, out, in, n, from, to, step, M, pitch, flags, RAGGED)  \
    for (int64_t v = from; v < to; v += step) {                            \
        sum_##K sum[M];                                                    \
        fold_pieces_##K(sum, in, n, v, M, pitch, flags, RAGGED);           \
        UNROLL(2)                                                          \
        for (int j = 0; j < M; j++) {                                      \
            if (a.scaled)                                                  \
                scale_piece_##K(&sum[j], factor);                          \
            write_piece_##K(out, &sum[j], v + j * (pitch), flags, RAGGED); \
        }                                                                  \
    }
#define ONES_OF(K, T, out, in, n, from, to, step, flags)                       \
    for (int64_t i = from; i < to; i += step) {                                \
        T one = fold_one_##K(in, n, i, flags);                                 \
        write_one_##K(out, a.scaled ? times_##K(one, factor) : one, i, flags); \
    }

/* Two pieces per thread if numbers are widened: their addresses cost as much as one. */
#define FOLD(K, MEM, T, UP, PLUS, TIMES, DOWN, NOTHING, BY)                                        \
    KERNEL fan_fold_##K(ARGS(fan_k_fold, a))                                                       \
    {                                                                                              \
        enum {                                                                                     \
            M = SIXTEENS_##K > 1 ? 2 : 1                                                           \
        };                                                                                         \
        const int64_t whole = a.count / PER_##K,                                                   \
                      pairs = M == 1 ? 0 : whole - whole % (M * FAN_K_BLOCK);                      \
        T factor;                                                                                  \
        memcpy(&factor, &a.factor, sizeof factor);                                                 \
        if (a.flags & FAN_K_ALIGNED) {                                                             \
            if (M > 1)                                                                             \
                PIECES_OF(K, a.out, a.in, a.n, BLOCK * M * FAN_K_BLOCK + LANE, pairs, THREADS * M, \
                          M, FAN_K_BLOCK, a.flags, false)                                          \
            PIECES_OF(K, a.out, a.in, a.n, pairs + THREAD, whole, THREADS, 1, 0, a.flags, false)   \
        } else {                                                                                   \
            PIECES_OF(K, a.out, a.in, a.n, THREAD, whole, THREADS, 1, 0, a.flags, true)            \
        }                                                                                          \
        ONES_OF(K, T, a.out, a.in, a.n, whole * PER_##K + THREAD, a.count, THREADS, a.flags)       \
    }
NUMBER_LIST(FOLD)

/* Many folds: each warp processes tile after tile. */
#define MANY(K, MEM, T, UP, PLUS, TIMES, DOWN, NOTHING, BY)                                     \
    KERNEL fan_many_##K(ARGS(fan_k_many, a))                                                    \
    {                                                                                           \
        enum {                                                                                  \
            TILE = FAN_K_TILE / sizeof(MEM)                                                     \
        };                                                                                      \
        T factor;                                                                               \
        const uint64_t sources = a.table + (uint64_t)a.rows * sizeof(fan_k_row),                \
                       tiles = sources + (uint64_t)a.sources * 8;                               \
        const int64_t lane = THREAD % FAN_K_WARP;                                               \
        memcpy(&factor, &a.factor, sizeof factor);                                              \
        for (int64_t t = THREAD / FAN_K_WARP; t < a.tiles; t += THREADS / FAN_K_WARP) {         \
            const fan_k_row r = ITEM(const fan_k_row, a.table, ITEM(const uint32_t, tiles, t)); \
            const uint64_t *in = AT(const uint64_t, sources) + r.first;                         \
            const int64_t begin = (t - r.tile) * TILE,                                          \
                          end = r.count - begin < TILE ? r.count : begin + TILE,                \
                          whole = end / PER_##K;                                                \
            if (r.flags & FAN_K_ALIGNED)                                                        \
                PIECES_OF(K, r.out, in, r.n, begin / PER_##K + lane, whole, FAN_K_WARP, 1, 0,   \
                          r.flags, false)                                                       \
            else                                                                                \
                PIECES_OF(K, r.out, in, r.n, begin / PER_##K + lane, whole, FAN_K_WARP, 1, 0,   \
                          r.flags, true)                                                        \
            ONES_OF(K, T, r.out, in, r.n, whole * PER_##K + lane, end, FAN_K_WARP, r.flags)     \
        }                                                                                       \
    }
NUMBER_LIST(MANY)

/* ---- Statistics (array/device_stats.h) ----
 *
 * A thread counts the numbers that it writes, in order; the threads of a block are combined as a
 * tree, the blocks by fan_fold_stats_end. Only if an element is not finite are its sources read
 * again, before it overwrites them. */

DEVICE inline fan_stats_partial row_of_nothing(void)
{
    fan_stats_partial r = {0, 0, 0, 0, 0, UINT64_MAX};
    return r;
}

DEVICE inline bool is_finite(double x)
{
    return x - x == 0;
}

/* row_square: adds the square of a finite number at the three scales (array/stats.h, The scale of
 * squares); `far`: whether the dtype has numbers that need one. A sum that does not hold its
 * squares is never read. */
DEVICE inline void row_square(fan_stats_partial *r, double x, bool far)
{
    r->squares += x * x;
    if (!far)
        return;
    double large = x * FAN_STATS_SHRINK;
    double small = x * FAN_STATS_GROW;
    r->large_squares += large * large;
    r->small_squares += small * small;
}

/* row_real, row_complex: count one more element; return whether it is finite. */
DEVICE inline bool row_real(fan_stats_partial *r, double x, bool far)
{
    double size = fabs(x);
    bool whole = is_finite(x);
    r->nonfinite += !whole;
    row_square(r, whole ? x : 0, far);
    r->absmax = whole && size > r->absmax ? size : r->absmax;
    return whole;
}

DEVICE inline bool row_complex(fan_stats_partial *r, double re, double im, bool far)
{
    if (!is_finite(re) || !is_finite(im)) {
        r->nonfinite++;
        return false;
    }
    row_square(r, re, far);
    row_square(r, im, far);
    if (fabs(re) + fabs(im) >= r->absmax) { /* else |z| cannot be the largest */
        double size = fan_complex_abs(re, im);
        r->absmax = size > r->absmax ? size : r->absmax;
    }
    return true;
}

DEVICE inline void row_merge(fan_stats_partial *into, const fan_stats_partial *next)
{
    into->squares += next->squares;
    into->large_squares += next->large_squares;
    into->small_squares += next->small_squares;
    into->absmax = next->absmax > into->absmax ? next->absmax : into->absmax;
    into->nonfinite += next->nonfinite;
    into->bad = next->bad < into->bad ? next->bad : into->bad;
}

/* rows_meet: combines the rows of a block's threads; returns true in the thread that has the
 * result. */
DEVICE bool rows_meet(fan_stats_partial *mine)
{
    SHARED fan_stats_partial all[FAN_K_BLOCK];
    all[LANE] = *mine;
    for (int half = FAN_K_BLOCK / 2; half; half /= 2) {
        SYNC_BLOCK;
        EACH_LANE (i, half)
            row_merge(&all[i], &all[i + half]);
    }
    if (!IS_FIRST_LANE)
        return false;
    *mine = all[0];
    return true;
}

DEVICE void row_put(fan_stats_partial *mine, uint64_t rows)
{
    if (rows_meet(mine))
        ITEM(fan_stats_partial, rows, BLOCK) = *mine;
}

/* X(name, in memory, as a signed number, as an unsigned number, whether an element may be two) */
#define VALUE_LIST(X)                     \
    X(truth, uint8_t, x != 0, x != 0, 0)  \
    X(bits8, uint8_t, (int8_t)x, x, 0)    \
    X(bits16, uint16_t, (int16_t)x, x, 0) \
    X(bits32, uint32_t, (int32_t)x, x, 0) \
    X(bits64, uint64_t, (int64_t)x, x, 0) \
    X(single, float, x, x, 1)             \
    X(twice, double, x, x, 1)             \
    X(doubled, float, x, x, 1)            \
    FAN_LOW_LIST(LOW_COUNT, X)
#define LOW_COUNT(X, NAME, c, bits, ...) X(c, uint##bits##_t, up_##c(x), up_##c(x), 0)

/* count_NAME: counts one more element, of one number or two. first_nonfinite_NAME: returns the
 * first source with an inf or a NaN in the element that begins with number `at`. */
#define COUNT(K, MEM, SIGNED, UNSIGNED, TWO)                                                 \
    DEVICE inline int parts_##K(const fan_k_fold *a)                                         \
    {                                                                                        \
        return (TWO) ? a->parts : 1;                                                         \
    }                                                                                        \
    DEVICE inline double value_##K(MEM x, int negative)                                      \
    {                                                                                        \
        return negative ? (double)(SIGNED) : (double)(UNSIGNED);                             \
    }                                                                                        \
    DEVICE inline bool count_##K(const fan_k_fold *a, fan_stats_partial *mine, MEM x, MEM y) \
    {                                                                                        \
        double re = value_##K(x, a->negative);                                               \
        const bool far = (TWO) && sizeof(MEM) == sizeof(double);                             \
        if (parts_##K(a) == 2)                                                               \
            return row_complex(mine, re, value_##K(y, 0), far);                              \
        return row_real(mine, re, far);                                                      \
    }                                                                                        \
    DEVICE inline void first_nonfinite_##K(const fan_k_fold *a, fan_stats_partial *mine,     \
                                           int64_t at)                                       \
    {                                                                                        \
        for (int k = a->first_suspect; k < a->n && (uint64_t)k < mine->bad; k++)             \
            for (int part = 0; part < parts_##K(a); part++)                                  \
                if (!is_finite(k == 0 && (a->flags & FAN_K_FIRST_WIDE)                       \
                                   ? wide_value_##K(a->in[0], at + part)                     \
                                   : value_##K(ITEM(const MEM, a->in[k], at + part), 0)))    \
                    mine->bad = (uint64_t)k;                                                 \
    }
VALUE_LIST(COUNT)

#define FOLD_STATS(K, MEM, T, UP, PLUS, TIMES, DOWN, NOTHING, BY)                                \
    DEVICE inline void stats_piece_##K(const fan_k_fold *a, fan_stats_partial *mine,             \
                                       const sum_##K *sum, int64_t v)                            \
    {                                                                                            \
        piece_##K x;                                                                             \
        unsigned nonfinite = 0;                                                                  \
        round_piece_##K(&x, sum);                                                                \
        for (int i = 0; i < PER_##K; i++)                                                        \
            if (parts_##K(a) == 1 || i % 2 == 0)                                                 \
                nonfinite |= (unsigned)!count_##K(a, mine, x.each[i], x.each[i | 1]) << i;       \
        UNROLL(1)                                                                                \
        for (int i = 0; nonfinite >> i; i++)                                                     \
            if (nonfinite >> i & 1)                                                              \
                first_nonfinite_##K(a, mine, v * PER_##K + i);                                   \
    }                                                                                            \
    KERNEL fan_fold_stats_##K(ARGS(fan_k_fold, a))                                               \
    {                                                                                            \
        T factor;                                                                                \
        fan_stats_partial mine = row_of_nothing();                                               \
        int64_t whole = a.count / PER_##K, v = THREAD;                                           \
        memcpy(&factor, &a.factor, sizeof factor);                                               \
        for (; v < whole; v += THREADS) {                                                        \
            sum_##K sum;                                                                         \
            if (a.flags & FAN_K_ALIGNED)                                                         \
                fold_pieces_##K(&sum, a.in, a.n, v, 1, 0, a.flags, false);                       \
            else                                                                                 \
                fold_pieces_##K(&sum, a.in, a.n, v, 1, 0, a.flags, true);                        \
            if (a.scaled)                                                                        \
                scale_piece_##K(&sum, factor);                                                   \
            stats_piece_##K(&a, &mine, &sum, v);                                                 \
            if (a.out)                                                                           \
                write_piece_##K(a.out, &sum, v, 0, !(a.flags & FAN_K_ALIGNED));                  \
        }                                                                                        \
        for (; v * PER_##K < a.count; v += THREADS) { /* the last numbers, fewer than a piece */ \
            UNROLL(1)                                                                            \
            for (int64_t i = v * PER_##K; i < a.count && i < (v + 1) * PER_##K;                  \
                 i += parts_##K(&a)) {                                                           \
                MEM pair[2];                                                                     \
                for (int j = 0; j < 2; j++) {                                                    \
                    T one = fold_one_##K(a.in, a.n, i + (j && parts_##K(&a) == 2), a.flags);     \
                    pair[j] = down_##K(a.scaled ? times_##K(one, factor) : one);                 \
                }                                                                                \
                if (!count_##K(&a, &mine, pair[0], pair[1]))                                     \
                    first_nonfinite_##K(&a, &mine, i);                                           \
                if (a.out)                                                                       \
                    ITEM(MEM, a.out, i) = pair[0];                                               \
                if (a.out && parts_##K(&a) == 2)                                                 \
                    ITEM(MEM, a.out, i + 1) = pair[1];                                           \
            }                                                                                    \
        }                                                                                        \
        row_put(&mine, a.rows);                                                                  \
    }
NUMBER_LIST(FOLD_STATS)

KERNEL fan_fold_stats_end(ARGS(fan_k_stats_end, a))
{
    fan_stats_partial mine = row_of_nothing();
    for (int64_t i = THREAD; i < a.nrows; i += THREADS)
        row_merge(&mine, &ITEM(const fan_stats_partial, a.rows, i));
    if (!rows_meet(&mine))
        return;
    fan_device_stats *words = AT(fan_device_stats, a.stats);
    bool here = mine.bad != UINT64_MAX,
         there = a.before && AT(const fan_device_stats, a.before)->bad;
    words->key = there ? AT(const fan_device_stats, a.before)->key : here ? a.keys[mine.bad] : -1;
    words->bad = here || there;
    words->count = (uint64_t)a.count;
    words->scale = fan_stats_scale_of(mine.absmax);
    words->squares = mine.squares;
    if (words->scale > 0)
        words->squares = mine.large_squares;
    else if (words->scale < 0)
        words->squares = mine.small_squares;
    words->absmax = mine.absmax;
    words->nonfinite = mine.nonfinite;
}

/* ---- A number of any dtype ---- */

enum {
    WIDE_I64,
    WIDE_U64,
    WIDE_F64,
    WIDE_C128
};

/* i: of integers (unsigned ones by their bits); re, im: of floats. */
typedef struct wide {
    int64_t i;
    double re, im;
} wide;

#define LOW_CASE(X, NAME, ...) case FAN_DT_##NAME:

DEVICE int form_of(int dtype)
{
    switch (dtype) {
    case FAN_DT_UINT64:
        return WIDE_U64;
    case FAN_DT_COMPLEX64:
    case FAN_DT_COMPLEX128:
        return WIDE_C128;
        FAN_LOW_LIST(LOW_CASE, )
    case FAN_DT_FLOAT32:
    case FAN_DT_FLOAT64:
        return WIDE_F64;
    default:
        return WIDE_I64;
    }
}

DEVICE int number_size(int dtype) /* of a part of a complex number */
{
#define LOW_SIZE(X, NAME, c, bits, ...) \
    case FAN_DT_##NAME:                 \
        return bits / 8;
    switch (dtype) {
        FAN_LOW_LIST(LOW_SIZE, )
    case FAN_DT_BOOL:
    case FAN_DT_INT8:
    case FAN_DT_UINT8:
        return 1;
    case FAN_DT_INT16:
    case FAN_DT_UINT16:
        return 2;
    case FAN_DT_INT32:
    case FAN_DT_UINT32:
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64:
        return 4;
    default:
        return 8;
    }
}

DEVICE uint64_t get(uint64_t p, int size, int anywhere)
{
    if (anywhere) {
        uint64_t bits = 0;
        for (int i = 0; i < size; i++)
            bits |= (uint64_t)ITEM(const uint8_t, p, i) << (8 * i);
        return bits;
    }
    return size == 1   ? *AT(const uint8_t, p)
           : size == 2 ? *AT(const uint16_t, p)
           : size == 4 ? *AT(const uint32_t, p)
                       : *AT(const uint64_t, p);
}

DEVICE void put_bits(uint64_t p, int size, int anywhere, uint64_t bits)
{
    if (anywhere)
        for (int i = 0; i < size; i++)
            ITEM(uint8_t, p, i) = (uint8_t)(bits >> (8 * i));
    else if (size == 1)
        *AT(uint8_t, p) = (uint8_t)bits;
    else if (size == 2)
        *AT(uint16_t, p) = (uint16_t)bits;
    else if (size == 4)
        *AT(uint32_t, p) = (uint32_t)bits;
    else
        *AT(uint64_t, p) = bits;
}

DEVICE double double_of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

DEVICE uint64_t bits_of_double(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* understand: converts the bits of an element (of its parts) to a wide number. */
NOINLINE_DEVICE wide understand(int dtype, uint64_t lo, uint64_t hi)
{
    wide w = {0, 0, 0};
    switch (dtype) {
    case FAN_DT_BOOL:
        w.i = lo != 0;
        break;
    case FAN_DT_INT8:
        w.i = (int8_t)lo;
        break;
    case FAN_DT_INT16:
        w.i = (int16_t)lo;
        break;
    case FAN_DT_INT32:
        w.i = (int32_t)lo;
        break;
#define LOW_READ(X, NAME, c, bits, ...)                      \
    case FAN_DT_##NAME:                                      \
        w.re = (double)fan_float_of_##c((uint##bits##_t)lo); \
        break;
        FAN_LOW_LIST(LOW_READ, )
    case FAN_DT_COMPLEX64:
        w.im = (double)fan_float_of_bits((uint32_t)hi);
        w.re = (double)fan_float_of_bits((uint32_t)lo);
        break;
    case FAN_DT_FLOAT32:
        w.re = (double)fan_float_of_bits((uint32_t)lo);
        break;
    case FAN_DT_COMPLEX128:
        w.im = double_of_bits(hi);
        w.re = double_of_bits(lo);
        break;
    case FAN_DT_FLOAT64:
        w.re = double_of_bits(lo);
        break;
    default: /* unsigned ones are zero-extended */
        w.i = (int64_t)lo;
        break;
    }
    return w;
}

DEVICE wide load(int dtype, uint64_t p, int anywhere)
{
    int size = number_size(dtype);
    return understand(dtype, get(p, size, anywhere),
                      form_of(dtype) == WIDE_C128 ? get(p + (uint64_t)size, size, anywhere) : 0);
}

DEVICE int64_t integer_of(double x)
{
    return x >= 9223372036854775808.0    ? INT64_MAX
           : x >= -9223372036854775808.0 ? (int64_t)x
           : x < 0                       ? INT64_MIN
                                         : 0;
}

DEVICE uint64_t unsigned_of(double x)
{
    return x >= 18446744073709551616.0  ? UINT64_MAX
           : x >= 9223372036854775808.0 ? (uint64_t)x
                                        : (uint64_t)integer_of(x);
}

DEVICE float single_of(wide w, int form)
{
    return form == WIDE_I64 ? (float)w.i : form == WIDE_U64 ? (float)(uint64_t)w.i : (float)w.re;
}

DEVICE double double_of(wide w, int form)
{
    return form == WIDE_I64 ? (double)w.i : form == WIDE_U64 ? (double)(uint64_t)w.i : w.re;
}

DEVICE float odd_of(wide w, int form)
{
    return form == WIDE_I64   ? fan_odd_of_i64(w.i)
           : form == WIDE_U64 ? fan_odd_of_u64((uint64_t)w.i)
                              : fan_odd_of_double(w.re);
}

/* convert_to_integer, convert_to_float: the two halves of convert. */
DEVICE int64_t convert_to_integer(wide w, int form, int dtype)
{
    bool real = form == WIDE_F64 || form == WIDE_C128;
    int64_t i = real && dtype != FAN_DT_BOOL && dtype != FAN_DT_UINT64 ? integer_of(w.re) : w.i;
    switch (dtype) {
    case FAN_DT_BOOL:
        return real ? w.re != 0 : w.i != 0;
    case FAN_DT_INT8:
        return (int8_t)i;
    case FAN_DT_INT16:
        return (int16_t)i;
    case FAN_DT_INT32:
        return (int32_t)i;
    case FAN_DT_INT64:
        return i;
    case FAN_DT_UINT8:
        return (uint8_t)i;
    case FAN_DT_UINT16:
        return (uint16_t)i;
    case FAN_DT_UINT32:
        return (uint32_t)i;
    default:
        return real ? (int64_t)unsigned_of(w.re) : w.i;
    }
}

DEVICE double convert_to_float(wide w, int form, int dtype)
{
    switch (dtype) {
#define LOW_CONVERT(X, NAME, c, ...) \
    case FAN_DT_##NAME:              \
        return (double)fan_float_of_##c(fan_##c##_of(odd_of(w, form)));
        FAN_LOW_LIST(LOW_CONVERT, )
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64:
        return (double)single_of(w, form);
    default:
        return double_of(w, form);
    }
}

/* convert: rounds a wide number to a dtype, in that dtype's form. */
NOINLINE_DEVICE wide convert(wide w, int form, int dtype)
{
    wide r = {0, 0, 0};
    int to = form_of(dtype);
    if (to == WIDE_I64 || to == WIDE_U64)
        r.i = convert_to_integer(w, form, dtype);
    else
        r.re = convert_to_float(w, form, dtype);
    if (to == WIDE_C128 && form == WIDE_C128)
        r.im = dtype == FAN_DT_COMPLEX64 ? (double)(float)w.im : w.im;
    return r;
}

DEVICE uint64_t low_bits(int dtype, double x)
{
    switch (dtype) {
#define LOW_WRITE(X, NAME, c, ...) \
    case FAN_DT_##NAME:            \
        return fan_##c##_of((float)x);
        FAN_LOW_LIST(LOW_WRITE, )
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64:
        return fan_bits_of_float((float)x);
    default:
        return bits_of_double(x);
    }
}

/* store: writes a wide number that the dtype holds exactly. */
DEVICE void store(int dtype, uint64_t p, int anywhere, wide w)
{
    int size = number_size(dtype);
    int form = form_of(dtype);
    put_bits(p, size, anywhere,
             form == WIDE_I64 || form == WIDE_U64 ? (uint64_t)w.i : low_bits(dtype, w.re));
    if (form == WIDE_C128)
        put_bits(p + (uint64_t)size, size, anywhere, low_bits(dtype, w.im));
}

/* add: adds in dtype acc. */
NOINLINE_DEVICE wide add(int acc, wide a, wide b)
{
    wide r = {0, 0, 0};
    int form = form_of(acc);
    if (acc == FAN_DT_BOOL) {
        r.i = a.i | b.i;
    } else if (form == WIDE_I64 || form == WIDE_U64) {
        r.i = (int64_t)((uint64_t)a.i + (uint64_t)b.i);
        r = convert(r, form, acc);
    } else if (number_size(acc) == 8) {
        r.re = a.re + b.re;
        r.im = a.im + b.im;
    } else {
        r.re = (double)((float)a.re + (float)b.re);
        r.im = (double)((float)a.im + (float)b.im);
        if (number_size(acc) < 4)
            r = convert(r, form, acc);
    }
    return r;
}

NOINLINE_DEVICE wide times(int acc, wide a, wide f)
{
    wide r = {0, 0, 0};
    int form = form_of(acc);
    if (acc == FAN_DT_BOOL) {
        r.i = a.i & f.i;
    } else if (form == WIDE_I64 || form == WIDE_U64) {
        r.i = (int64_t)((uint64_t)a.i * (uint64_t)f.i);
        r = convert(r, form, acc);
    } else if (acc == FAN_DT_COMPLEX128) {
        r.re = a.re * f.re - a.im * f.im;
        r.im = a.re * f.im + a.im * f.re;
    } else if (acc == FAN_DT_COMPLEX64) {
        float re = (float)a.re;
        float im = (float)a.im;
        float fr = (float)f.re;
        float fi = (float)f.im;
        r.re = (double)(re * fr - im * fi);
        r.im = (double)(re * fi + im * fr);
    } else if (acc == FAN_DT_FLOAT64) {
        r.re = a.re * f.re;
    } else {
        r.re = (double)((float)a.re * (float)f.re);
        if (number_size(acc) < 4)
            r = convert(r, form, acc);
    }
    return r;
}

/* weigh: a term times its weight, which is the bits of two float64: a real one multiplies the parts
 * of a complex term. */
NOINLINE_DEVICE wide weigh(int acc, wide x, uint64_t re, uint64_t im)
{
    wide by = {0, 0, 0};
    double real = double_of_bits(re);
    double imaginary = double_of_bits(im);
    by.re = real;
    if (acc == FAN_DT_COMPLEX128 && imaginary == 0) {
        x.re *= real;
        x.im *= real;
        return x;
    }
    if (acc == FAN_DT_COMPLEX64 && imaginary == 0) {
        x.re = (double)((float)x.re * (float)real);
        x.im = (double)((float)x.im * (float)real);
        return x;
    }
    if (form_of(acc) == WIDE_C128) {
        by.im = imaginary;
        return times(acc, x, convert(by, WIDE_C128, acc));
    }
    return times(acc, x, convert(by, WIDE_F64, acc));
}

/* over: a sum over its divisor, which is the bits of a number of its parts. */
NOINLINE_DEVICE wide over(int acc, wide a, uint64_t divisor)
{
    wide r = {0, 0, 0};
    if (number_size(acc) == 8) {
        double by = double_of_bits(divisor);
        r.re = a.re / by;
        if (acc == FAN_DT_COMPLEX128)
            r.im = a.im / by;
        return r;
    }
    float by = (float)understand(acc, divisor, 0).re;
    r.re = (double)((float)a.re / by);
    if (acc == FAN_DT_COMPLEX64)
        r.im = (double)((float)a.im / by);
    if (number_size(acc) < 4)
        r = convert(r, form_of(acc), acc);
    return r;
}

/* ---- Sums, copies, casts and fills of anything ---- */

/* No variable here may be in local memory, which a driver reserves for all threads that a GPU could
 * run, at the first launch: the last FEW indices of a place are registers, and indices of axes
 * before them are divided out again for each address. */
#define FEW 4

typedef struct place {
    int64_t index[FEW]; /* of the last axis, of the one before it, .. */
    int64_t rest;       /* the linear index along the axes before those */
} place;

/* divided: sets at to at / by; returns the remainder. */
DEVICE inline int64_t divided(int64_t *at, int64_t by)
{
    uint64_t all = (uint64_t)*at;
    if (((all | (uint64_t)by) >> 32) == 0) { /* three times as fast */
        *at = (uint32_t)all / (uint32_t)by;
        return (uint32_t)all % (uint32_t)by;
    }
    *at = (int64_t)(all / (uint64_t)by);
    return (int64_t)(all % (uint64_t)by);
}

/* place_of: returns the place of the `at`-th element, last axis fastest. */
DEVICE inline place place_of(int64_t at, int ndim, const int64_t *extent)
{
    place p;
    UNROLL(4)
    for (int j = 0; j < FEW; j++)
        p.index[j] = ndim > j ? divided(&at, extent[ndim - 1 - j]) : 0;
    p.rest = at;
    return p;
}

DEVICE inline uint64_t address(int64_t base, int ndim, const int64_t *extent, const int64_t *stride,
                               const place *at)
{
    uint64_t p = (uint64_t)base;
    int64_t rest = at->rest;
    UNROLL(4)
    for (int j = 0; j < FEW; j++)
        if (ndim > j)
            p += (uint64_t)(at->index[j] * stride[ndim - 1 - j]);
    UNROLL(1)
    for (int i = ndim - 1 - FEW; i >= 0; i--)
        p += (uint64_t)(divided(&rest, extent[i]) * stride[i]);
    return p;
}

/* sum_at: returns the sum at a place, in dtype out. */
DEVICE inline wide sum_at(const fan_k_any *a, const place *at)
{
    int acc = a->out;
    wide sum = {0, 0, 0};
    const int64_t *source = a->words + 2 * a->ndim + 1;
    const int64_t *weight = source + a->n * (2 + a->ndim);
    for (int k = 0; k < a->n; k++, source += 2 + a->ndim) {
        int from = (int)(source[1] & 0xff);
        int now = (int)(source[1] >> 8);
        wide x =
            convert(load(from, address(source[0], a->ndim, a->words, source + 2, at), a->anywhere),
                    form_of(from), now);
        if (a->weighted)
            x = weigh(now, x, (uint64_t)weight[2 * k], (uint64_t)weight[2 * k + 1]);
        if (k == 0)
            sum = x;
        else
            sum = add(now, now == acc ? sum : convert(sum, form_of(acc), now), x);
        acc = now;
    }
    if (a->divided)
        sum = over(acc, sum, a->divisor);
    if (a->scaled)
        sum = times(acc, sum, understand(acc, a->factor[0], a->factor[1]));
    return a->out == acc ? sum : convert(sum, form_of(acc), a->out);
}

KERNEL fan_any(ARGS(fan_k_any, a))
{
    const int64_t *extent = a.words;
    const int64_t *out = extent + a.ndim;
    for (int64_t at = THREAD; at < a.size; at += THREADS) {
        place here = place_of(at, a.ndim, extent);
        store(a.out, address(out[0], a.ndim, extent, out + 1, &here), a.anywhere,
              sum_at(&a, &here));
    }
}

/* has_nonfinite: returns whether source k is not finite at a place. */
DEVICE bool has_nonfinite(const fan_k_any *a, int k, const place *at)
{
    const int64_t *source = a->words + 2 * a->ndim + 1 + k * (2 + a->ndim);
    int from = (int)(source[1] & 0xff);
    wide x = load(from, address(source[0], a->ndim, a->words, source + 2, at), a->anywhere);
    if (a->weighted) {
        int acc = (int)(source[1] >> 8);
        const int64_t *weight = a->words + 2 * a->ndim + 1 + a->n * (2 + a->ndim) + 2 * k;
        x = weigh(acc, convert(x, form_of(from), acc), (uint64_t)weight[0], (uint64_t)weight[1]);
    }
    return !is_finite(x.re) || !is_finite(x.im);
}

KERNEL fan_fold_stats_any(ARGS(fan_k_any, a))
{
    const int64_t *extent = a.words;
    const int64_t *out = extent + a.ndim;
    fan_stats_partial mine = row_of_nothing();
    int form = form_of(a.out);
    for (int64_t at = THREAD; at < a.size; at += THREADS) {
        place here = place_of(at, a.ndim, extent);
        wide sum = sum_at(&a, &here);
        bool whole = form == WIDE_C128 ? row_complex(&mine, sum.re, sum.im, true)
                                       : row_real(&mine, double_of(sum, form), true);
        if (!whole)
            for (int k = a.first_suspect; k < a.n && (uint64_t)k < mine.bad; k++)
                if (has_nonfinite(&a, k, &here))
                    mine.bad = (uint64_t)k;
        if (out[0])
            store(a.out, address(out[0], a.ndim, extent, out + 1, &here), a.anywhere, sum);
    }
    row_put(&mine, a.rows);
}

KERNEL fan_nonfinite_any(ARGS(fan_k_any, a))
{
    fan_device_stats *words = AT(fan_device_stats, a.rows);
    if (words->nonfinite == 0 || words->bad)
        return;
    for (int64_t at = THREAD; at < a.size; at += THREADS) {
        place here = place_of(at, a.ndim, a.words);
        if (has_nonfinite(&a, 0, &here)) { /* every thread that finds one writes the same */
            words->key = (int64_t)a.factor[0];
            words->bad = 1;
        }
    }
}

/* ---- Sums over axes ---- */

/* X(name, in memory, as it is summed, the type that sums those): decision D7. */
#define TERM_LIST(X)                      \
    X(truth, uint8_t, uint8_t, truth)     \
    X(bits8, uint8_t, uint8_t, bits8)     \
    X(bits16, uint16_t, uint16_t, bits16) \
    X(bits32, uint32_t, uint32_t, bits32) \
    X(bits64, uint64_t, uint64_t, bits64) \
    X(single, float, double, twice)       \
    X(twice, double, double, twice)       \
    FAN_LOW_LIST(LOW_GONE, X)
#define LOW_GONE(X, NAME, c, bits, ...) X(c, uint##bits##_t, double, twice)

/* gone_at: returns the offset of term k from the first; *more: how many terms of its lane follow
 * along the last reduced axis. */
DEVICE inline uint64_t gone_at(const fan_k_reduce *a, int64_t k, int64_t *more)
{
    const int64_t *extent = a->words + 3 * a->stay;
    const int64_t *step = extent + a->go;
    place at = place_of(k, a->go, extent);
    *more = a->go ? (extent[a->go - 1] - 1 - at.index[0]) >> a->lanes : 0;
    return address(0, a->go, extent, step, &at);
}

DEVICE inline void reduce_put(const fan_k_reduce *a, uint64_t out, uint64_t bits)
{
    store(a->to, out, a->anywhere, convert(understand(a->acc, bits, 0), form_of(a->acc), a->to));
}

/* terms_NAME: adds the terms k, k + lanes, .. before `end`, one after the other. */
#define REDUCE(K, MEM, S, BY)                                                                     \
    DEVICE inline S term_##K(uint64_t p, int anywhere)                                            \
    {                                                                                             \
        MEM x;                                                                                    \
        uint64_t bits;                                                                            \
        if (!anywhere)                                                                            \
            return (S)up_##K(*AT(const MEM, p));                                                  \
        bits = get(p, sizeof x, 1);                                                               \
        memcpy(&x, &bits, sizeof x);                                                              \
        return (S)up_##K(x);                                                                      \
    }                                                                                             \
    DEVICE inline S terms_##K(const fan_k_reduce *a, uint64_t in, int64_t k, int64_t end)         \
    {                                                                                             \
        const int64_t step = a->go ? a->words[3 * a->stay + 2 * a->go - 1] << a->lanes : 0;       \
        S sum = 0;                                                                                \
        for (bool first = true; k < end; first = false) {                                         \
            int64_t more;                                                                         \
            uint64_t p = in + gone_at(a, k, &more);                                               \
            int64_t left = (end - 1 - k) >> a->lanes;                                             \
            left = 1 + (left < more ? left : more);                                               \
            k += left << a->lanes;                                                                \
            if (first || a->anywhere) {                                                           \
                S one = term_##K(p, a->anywhere);                                                 \
                sum = first ? one : plus_##BY(sum, one);                                          \
                k -= a->anywhere ? (left - 1) << a->lanes : 0; /* one by one */                   \
                left = a->anywhere ? 0 : left - 1;                                                \
                p += (uint64_t)step;                                                              \
            }                                                                                     \
            UNROLL(8)                                                                             \
            for (; left > 0; left--, p += (uint64_t)step)                                         \
                sum = plus_##BY(sum, term_##K(p, 0));                                             \
        }                                                                                         \
        return sum;                                                                               \
    }                                                                                             \
    KERNEL fan_reduce_##K(ARGS(fan_k_reduce, a))                                                  \
    {                                                                                             \
        const int64_t *extent = a.words, *out = extent + a.stay, *in = out + a.stay;              \
        for (int64_t t = THREAD; t < a.numbers * a.runs; t += THREADS) {                          \
            int64_t over = t, left = divided(&over, a.across ? a.numbers : a.runs);               \
            const int64_t number = a.across ? left : over, run = a.across ? over : left,          \
                          element = a.parts == 1 ? number : number >> 1,                          \
                          part = number - element * a.parts,                                      \
                          group = a.whole ? run : run >> a.lanes, begin = group * a.group,        \
                          end = a.terms - begin < a.group ? a.terms : begin + a.group,            \
                          lane = a.whole ? 0 : run - (group << a.lanes),                          \
                          lanes = a.whole ? (int64_t)1 << a.lanes : lane + 1;                     \
            const place here = place_of(element, a.stay, extent);                                 \
            const uint64_t from =                                                                 \
                address((int64_t)a.in, a.stay, extent, in, &here) + (uint64_t)(part * a.in_part); \
            S sum = 0;                                                                            \
            UNROLL(1)                                                                             \
            for (int64_t j = lane; j < lanes && begin + j < end; j++) {                           \
                S one = terms_##K(&a, from, begin + j, end);                                      \
                sum = j == lane ? one : plus_##BY(sum, one);                                      \
            }                                                                                     \
            uint64_t bits = 0;                                                                    \
            memcpy(&bits, &sum, sizeof sum);                                                      \
            if (a.last)                                                                           \
                reduce_put(&a,                                                                    \
                           address((int64_t)a.out, a.stay, extent, out, &here) +                  \
                               (uint64_t)(part * a.out_part),                                     \
                           bits);                                                                 \
            else                                                                                  \
                ITEM(S, a.out, t) = sum;                                                          \
        }                                                                                         \
    }
TERM_LIST(REDUCE)

/* ---- Sparse into dense ----
 *
 * Title: COO. Entries with the same index are added in their order, so one worker must handle them
 * all. A list whose rows never fall has them side by side. Any other is sorted first, by counting,
 * a digit of the row at a time from the lowest: each pass is stable, so the result depends on the
 * list alone. The device decides whether it must be sorted, so the host does not wait. */

DEVICE int64_t whole_number(uint64_t p, int size)
{
    return size == 4 ? *AT(const int32_t, p) : *AT(const int64_t, p);
}

/* coo_row: returns the row of entry `e`; nrows: it is outside. */
DEVICE uint32_t coo_row(const fan_k_coo *a, const int64_t *extent, int64_t e)
{
    uint64_t p = a->indices + (uint64_t)(e * a->index_step);
    uint64_t row = 0;
    UNROLL(1)
    for (int i = 0; i < a->sparse; i++, p += (uint64_t)a->index_row) {
        int64_t index = whole_number(p, a->index_size);
        if (index < 0 || index >= extent[i])
            return a->nrows;
        row = row * (uint64_t)extent[i] + (uint64_t)index;
    }
    row -= a->first_row;
    return row < a->nrows ? (uint32_t)row : a->nrows;
}

DEVICE uint32_t four_at(uint64_t p, int64_t i)
{
    return *AT(const uint32_t, p + 4 * (uint64_t)i);
}
DEVICE void put_four(uint64_t p, int64_t i, uint32_t x)
{
    *AT(uint32_t, p + 4 * (uint64_t)i) = x;
}

/* few_at, put_few: read and write a number of 1, 2 or 4 bytes. */
DEVICE uint32_t few_at(uint64_t p, int64_t i, int size)
{
    return size == 1   ? ITEM(const uint8_t, p, i)
           : size == 2 ? ITEM(const uint16_t, p, i)
                       : four_at(p, i);
}

DEVICE void put_few(uint64_t p, int64_t i, int size, uint32_t x)
{
    if (size == 1)
        ITEM(uint8_t, p, i) = (uint8_t)x;
    else if (size == 2)
        ITEM(uint16_t, p, i) = (uint16_t)x;
    else
        put_four(p, i, x);
}

DEVICE uint32_t list_row(const fan_k_entry *form, const fan_k_list *list, int64_t i)
{
    uint32_t low = few_at(list->low, i, form->low_size);
    return form->high_size ? low | few_at(list->high, i, form->high_size) << form->low_bits : low;
}

DEVICE uint32_t sort_row(const fan_k_sort *a, int64_t e)
{
    return a->coo.indices ? coo_row(&a->coo, a->words, e) : list_row(&a->entry, &a->list, e);
}

/* sort_digit: returns the digit of an entry that an earlier pass has written. */
DEVICE uint32_t sort_digit(const fan_k_sort *a, int64_t e)
{
    uint32_t x = a->entry.high_size
                     ? few_at(a->list.high, e, a->entry.high_size) >> (a->shift - a->entry.low_bits)
                     : few_at(a->list.low, e, a->entry.low_size) >> a->shift;
    return x & ((1u << a->bits) - 1);
}

/* sort_came: returns the payload of an entry. */
DEVICE uint32_t sort_came(const fan_k_sort *a, int64_t e)
{
    if (!a->coo.indices)
        return few_at(a->list.came, e, a->entry.came_size);
    return a->entry.values ? few_at(a->entry.values + (uint64_t)(e * a->entry.value_step), 0,
                                    a->entry.came_size)
                           : (uint32_t)e;
}

/* sort_begins: returns whether the first count found that a sort is needed. */
DEVICE bool sort_begins(const fan_k_sort *a)
{
    return four_at(a->unsorted, 0) != 0;
}

/* before_lane: returns the sum of the values of all lower lanes; *all: of all lanes. All lanes of a
 * block must call it. */
DEVICE uint32_t before_lane(uint32_t mine, uint32_t *all)
{
    SHARED uint32_t sums[FAN_K_BLOCK], groups[FAN_K_BLOCK / 16];
    uint32_t before = 0;
    uint32_t sum = 0;
    sums[LANE] = mine;
    SYNC_BLOCK;
    for (int i = LANE & ~15; i < LANE; i++)
        before += sums[i];
    if ((LANE & 15) == 15)
        groups[LANE / 16] = before + mine;
    SYNC_BLOCK;
    for (int i = 0; i < FAN_K_BLOCK / 16; i++) {
        before += i < LANE / 16 ? groups[i] : 0;
        sum += groups[i];
    }
    SYNC_BLOCK;
    *all = sum;
    return before;
}

KERNEL fan_sort_count(ARGS(fan_k_sort, a))
{
    SHARED uint32_t count[1 << FAN_K_DIGIT];
    const int64_t begin = BLOCK * FAN_K_ENTRIES;
    const int64_t rest = a.entries - begin;
    const int64_t end = begin + (rest < FAN_K_ENTRIES ? rest : FAN_K_ENTRIES);
    bool falls = false;
    if (!a.coo.indices && !sort_begins(&a))
        return;
    EACH_LANE (d, 1 << a.bits)
        count[d] = 0;
    SYNC_BLOCK;
    UNROLL(4)
    for (int64_t e = begin + LANE; e < end; e += FAN_K_BLOCK) {
        if (!a.coo.indices) {
            COUNT_ONE(count[sort_digit(&a, e)]);
            continue;
        }
        uint32_t row = coo_row(&a.coo, a.words, e);
        COUNT_ONE(count[row & ((1u << a.bits) - 1)]);
        falls |= e + 1 < a.entries && coo_row(&a.coo, a.words, e + 1) < row;
    }
    if (falls) /* all that find it write the same value */
        put_four(a.unsorted, 0, 1);
    SYNC_BLOCK;
    EACH_LANE (d, 1 << a.bits)
        put_four(a.counts, d * a.tiles + BLOCK, count[d]);
}

/* fan_sort_scan: a block for each digit. */
KERNEL fan_sort_scan(ARGS(fan_k_sort, a))
{
    if (!sort_begins(&a))
        return;
    const uint64_t counts = a.counts + 4 * (uint64_t)(BLOCK * a.tiles);
    const int64_t share = (a.tiles + FAN_K_BLOCK - 1) / FAN_K_BLOCK;
    const int64_t begin = LANE * share;
    const int64_t end = begin + share < a.tiles ? begin + share : a.tiles;
    uint32_t sum = 0, all;
    for (int64_t i = begin; i < end; i++)
        sum += four_at(counts, i);
    uint32_t before = before_lane(sum, &all);
    for (int64_t i = begin; i < end; i++) {
        uint32_t here = four_at(counts, i);
        put_four(counts, i, before);
        before += here;
    }
    if (IS_FIRST_LANE)
        put_four(a.totals, BLOCK, all);
}

#define WARPS (FAN_K_BLOCK / FAN_K_WARP)
#define DIGITS (1 << FAN_K_DIGIT)

/* sort_starts: turns the numbers of entries of each digit in each warp into those in the warps
 * before it; start: the first index of a digit in the tile; shift: the difference from an index in
 * the tile to that in the result. */
DEVICE void sort_starts(const fan_k_sort *a, uint16_t counts[WARPS][DIGITS], uint32_t *start,
                        uint32_t *shift)
{
    uint32_t here[2] = {0, 0}, total[2] = {0, 0}, all;
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        int digit = 2 * LANE + i;
        if (digit >= 1 << a->bits)
            continue;
        UNROLL(8)
        for (int w = 0; w < WARPS; w++) {
            uint32_t n = counts[w][digit];
            counts[w][digit] = (uint16_t)here[i];
            here[i] += n;
        }
        total[i] = a->tiles == 1 ? here[i] : four_at(a->totals, digit);
    }
    uint32_t before = before_lane(here[0] + here[1], &all),
             below = before_lane(total[0] + total[1], &all);
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        int digit = 2 * LANE + i;
        if (digit >= 1 << a->bits)
            continue;
        start[digit] = before;
        shift[digit] =
            below + (a->tiles == 1 ? 0 : four_at(a->counts, digit * a->tiles + BLOCK)) - before;
        before += here[i];
        below += total[i];
    }
}

KERNEL fan_sort_move(ARGS(fan_k_sort, a))
{
    SHARED uint16_t counts[WARPS][DIGITS];
    SHARED uint32_t start[DIGITS], shift[DIGITS], rows[FAN_K_ENTRIES], places[FAN_K_ENTRIES];
    uint32_t row[FAN_K_PER_LANE], came[FAN_K_PER_LANE], rank[FAN_K_PER_LANE];
    if (!sort_begins(&a))
        return;
    const int64_t begin = BLOCK * FAN_K_ENTRIES;
    const int64_t rest = a.entries - begin;
    const int n = (int)(rest < FAN_K_ENTRIES ? rest : FAN_K_ENTRIES),
              each = (n + FAN_K_BLOCK - 1) / FAN_K_BLOCK, warp = LANE / FAN_K_WARP,
              from = warp * each * FAN_K_WARP + LANE % FAN_K_WARP;
    const uint32_t mask = (1u << a.bits) - 1;
    EACH_LANE (i, WARPS * DIGITS)
        counts[i / DIGITS][i % DIGITS] = 0;
    SYNC_BLOCK;
    UNROLL(16)
    /* the entries of a warp are neighbours: its ranks keep their order */
    for (int j = 0; j < FAN_K_PER_LANE; j++) {
        row[j] = came[j] = rank[j] = 0;
        if (j >= each)
            continue;
        int at = from + j * FAN_K_WARP;
        uint32_t digit = DIGITS;
        if (at < n) {
            row[j] = sort_row(&a, begin + at);
            came[j] = sort_came(&a, begin + at);
            digit = row[j] >> a.shift & mask;
        }
        uint32_t same = SAME_IN_WARP(digit);
        uint32_t before = same & ((1u << LANE % FAN_K_WARP) - 1);
        uint32_t old = at < n ? counts[warp][digit] : 0;
        rank[j] = old + (uint32_t)BITS_IN(before);
        SYNC_WARP;
        if (at < n && before == 0)
            counts[warp][digit] = (uint16_t)(old + (uint32_t)BITS_IN(same));
        SYNC_WARP;
    }
    SYNC_BLOCK;
    sort_starts(&a, counts, start, shift);
    SYNC_BLOCK;
    UNROLL(16)
    for (int j = 0; j < FAN_K_PER_LANE; j++)
        if (j < each && from + j * FAN_K_WARP < n) {
            uint32_t digit = row[j] >> a.shift & mask,
                     at = start[digit] + counts[warp][digit] + rank[j];
            rows[at] = row[j];
            places[at] = came[j];
        }
    SYNC_BLOCK;
    EACH_LANE (i, n) {
        uint32_t to = shift[rows[i] >> a.shift & mask] + (uint32_t)i;
        if (to < a.entries) { /* false only if other code writes the indices meanwhile */
            put_few(a.out.low, to, a.entry.low_size,
                    a.entry.high_size ? rows[i] & ((1u << a.entry.low_bits) - 1) : rows[i]);
            if (a.entry.high_size)
                put_few(a.out.high, to, a.entry.high_size, rows[i] >> a.entry.low_bits);
            put_few(a.out.came, to, a.entry.came_size, places[i]);
        }
    }
}

/* scatter_sorted: returns whether the entries were already in the order of their rows. */
DEVICE bool scatter_sorted(const fan_k_scatter *a)
{
    return !a->unsorted || four_at(a->unsorted, 0) == 0;
}

DEVICE uint32_t scatter_row(const fan_k_scatter *a, bool sorted, int64_t i)
{
    return sorted ? coo_row(&a->coo, a->words, i) : list_row(&a->entry, &a->list, i);
}

/* scatter_value: returns the address of entry `i`'s value, in the order of rows; `from`: that of
 * the original first one, or a piece of it. */
DEVICE uint64_t scatter_value(const fan_k_scatter *a, bool sorted, int64_t i, uint64_t from)
{
    if (!sorted && a->entry.values)
        return a->list.came + (uint64_t)(i * a->entry.came_size);
    int64_t e = sorted ? i : four_at(a->list.came, i);
    return e < a->entries ? from + (uint64_t)(e * a->value_step) : 0;
}

/* scatter_begins: returns whether entry `i`, in the order of rows, is the first of its row. */
DEVICE bool scatter_begins(const fan_k_scatter *a, bool sorted, int64_t i, uint32_t *row)
{
    *row = scatter_row(a, sorted, i);
    return *row < a->coo.nrows && (i == 0 || scatter_row(a, sorted, i - 1) != *row);
}

DEVICE uint64_t scatter_to(const fan_k_scatter *a, uint32_t row)
{
    const int64_t *extent = a->words;
    const int64_t *stride = extent + a->coo.sparse;
    int64_t rest = (int64_t)(a->coo.first_row + row);
    uint64_t p = a->into;
    UNROLL(1)
    for (int i = a->coo.sparse - 1; i > 0; i--)
        p += (uint64_t)(divided(&rest, extent[i]) * stride[i]);
    return p + (a->coo.sparse ? (uint64_t)(rest * stride[0]) : 0);
}

/* scatter_compressed: computes the target of entry `e` of compressed data, whose worker has the
 * row; false beyond the shape. */
DEVICE bool scatter_compressed(const fan_k_scatter *a, int64_t row, int64_t e, uint64_t *to)
{
    int64_t index = whole_number(a->indices + (uint64_t)(e * a->index_step), a->index_size);
    if (index < 0 || index >= a->words[0])
        return false;
    *to = a->into + (uint64_t)(row * a->words[1] + index * a->words[2]);
    return true;
}

DEVICE void scatter_one(const fan_k_scatter *a, uint64_t to, uint64_t from)
{
    wide x =
        convert(load(a->value_dtype, from, a->anywhere), form_of(a->value_dtype), a->into_dtype);
    store(a->into_dtype, to, a->anywhere,
          add(a->into_dtype, load(a->into_dtype, to, a->anywhere), x));
}

KERNEL fan_scatter_any(ARGS(fan_k_scatter, a))
{
    const int64_t *extent = a.words + (a.pointers ? 3 : 2 * a.coo.sparse);
    const int64_t *into = extent + a.inner;
    const int64_t *values = into + a.inner;
    const bool sorted = !a.pointers && scatter_sorted(&a);
    for (int64_t t = THREAD; t < a.lanes * a.inside; t += THREADS) {
        int64_t worker = t;
        int64_t begin;
        int64_t end = a.entries;
        place here = place_of(divided(&worker, a.inside), a.inner, extent);
        uint64_t to_offset = address(0, a.inner, extent, into, &here);
        uint64_t to = 0;
        uint64_t from = address((int64_t)a.values, a.inner, extent, values, &here);
        uint32_t row = 0;
        begin = worker;
        if (a.pointers) {
            uint64_t p = a.pointers + (uint64_t)(worker * a.pointer_step);
            begin = whole_number(p, a.pointer_size);
            end = whole_number(p + (uint64_t)a.pointer_step, a.pointer_size);
            begin = begin < 0 ? 0 : begin;
            end = end > a.entries ? a.entries : end;
        } else if (scatter_begins(&a, sorted, worker, &row)) {
            to = scatter_to(&a, row);
        } else {
            continue;
        }
        for (int64_t i = begin;
             i < end && (a.pointers || i == begin || scatter_row(&a, sorted, i) == row); i++) {
            uint64_t value = a.pointers ? from + (uint64_t)(i * a.value_step)
                                        : scatter_value(&a, sorted, i, from);
            if (a.pointers ? scatter_compressed(&a, worker, i, &to) : value)
                scatter_one(&a, to + to_offset, value);
        }
    }
}

/* Entries from `i` on are read together, and added one after the other, each with a rounding,
 * unless `wide`. */
#define SCATTER(K, MEM, T, UP, PLUS, TIMES, DOWN, NOTHING, BY)                                    \
    DEVICE inline void scatter_read_##K(piece_##K *x, uint64_t p, int aligned)                    \
    {                                                                                             \
        if (aligned)                                                                              \
            x->all = *AT(const sixteen, p);                                                       \
        else                                                                                      \
            x->each[0] = *AT(const MEM, p);                                                       \
    }                                                                                             \
    DEVICE inline void scatter_add_##K(const fan_k_scatter *a, sum_##K *sum, const piece_##K *x)  \
    {                                                                                             \
        UNROLL(16)                                                                                \
        for (int k = 0; k < PER_##K; k++)                                                         \
            if (k == 0 || a->aligned) {                                                           \
                T one = plus_##K(sum->each[k], up_##K(x->each[k]));                               \
                sum->each[k] = a->wide ? one : up_##K(down_##K(one));                             \
            }                                                                                     \
    }                                                                                             \
    DEVICE inline void scatter_begin_##K(const fan_k_scatter *a, sum_##K *sum, uint64_t to)       \
    {                                                                                             \
        piece_##K x;                                                                              \
        if (!a->wide) {                                                                           \
            scatter_read_##K(&x, to, a->aligned);                                                 \
            UNROLL(16)                                                                            \
            for (int k = 0; k < PER_##K; k++)                                                     \
                if (k == 0 || a->aligned)                                                         \
                    sum->each[k] = up_##K(x.each[k]);                                             \
        } else if (a->aligned) {                                                                  \
            for (int k = 0; k < SIXTEENS_##K; k++)                                                \
                sum->all[k] = ITEM(const sixteen, to, k);                                         \
        } else {                                                                                  \
            sum->each[0] = *AT(const T, to);                                                      \
        }                                                                                         \
    }                                                                                             \
    DEVICE inline void scatter_end_##K(const fan_k_scatter *a, const sum_##K *sum, uint64_t to)   \
    {                                                                                             \
        piece_##K x;                                                                              \
        if (a->wide && a->aligned) {                                                              \
            for (int k = 0; k < SIXTEENS_##K; k++)                                                \
                ITEM(sixteen, to, k) = sum->all[k];                                               \
        } else if (a->wide) {                                                                     \
            *AT(T, to) = sum->each[0];                                                            \
        } else if (a->aligned) {                                                                  \
            round_piece_##K(&x, sum);                                                             \
            *AT(sixteen, to) = x.all;                                                             \
        } else {                                                                                  \
            *AT(MEM, to) = down_##K(sum->each[0]);                                                \
        }                                                                                         \
    }                                                                                             \
    DEVICE inline void scatter_run_##K(const fan_k_scatter *a, bool sorted, int64_t i,            \
                                       uint32_t row, uint64_t to, uint64_t from)                  \
    {                                                                                             \
        sum_##K sum;                                                                              \
        piece_##K x[AHEAD];                                                                       \
        bool on = true;                                                                           \
        scatter_begin_##K(a, &sum, to);                                                           \
        UNROLL(1)                                                                                 \
        for (; on; i += AHEAD) {                                                                  \
            uint32_t rows[AHEAD];                                                                 \
            uint64_t at[AHEAD];                                                                   \
            UNROLL(AHEAD)                                                                         \
            for (int j = 0; j < AHEAD; j++)                                                       \
                rows[j] = i + j < a->entries ? scatter_row(a, sorted, i + j) : a->coo.nrows;      \
            UNROLL(AHEAD)                                                                         \
            for (int j = 0; j < AHEAD; j++) {                                                     \
                on = on && rows[j] == row;                                                        \
                at[j] = on ? scatter_value(a, sorted, i + j, from) : 0;                           \
            }                                                                                     \
            UNROLL(AHEAD)                                                                         \
            for (int j = 0; j < AHEAD; j++)                                                       \
                if (at[j])                                                                        \
                    scatter_read_##K(&x[j], at[j], a->aligned);                                   \
            UNROLL(AHEAD)                                                                         \
            for (int j = 0; j < AHEAD; j++)                                                       \
                if (at[j])                                                                        \
                    scatter_add_##K(a, &sum, &x[j]);                                              \
        }                                                                                         \
        scatter_end_##K(a, &sum, to);                                                             \
    }                                                                                             \
    KERNEL fan_scatter_##K(ARGS(fan_k_scatter, a))                                                \
    {                                                                                             \
        const bool sorted = scatter_sorted(&a);                                                   \
        const int64_t pieces = a.aligned ? a.inside / PER_##K : a.inside;                         \
        for (int64_t t = THREAD; t < a.entries * pieces; t += THREADS) {                          \
            int64_t i = t;                                                                        \
            uint64_t piece = (uint64_t)divided(&i, pieces) * (a.aligned ? PER_##K : 1);           \
            uint32_t row;                                                                         \
            if (scatter_begins(&a, sorted, i, &row))                                              \
                scatter_run_##K(&a, sorted, i, row,                                               \
                                scatter_to(&a, row) + piece * (a.wide ? sizeof(T) : sizeof(MEM)), \
                                a.values + piece * sizeof(MEM));                                  \
        }                                                                                         \
    }
NUMBER_LIST(SCATTER)
