/* Digests (digest.h): words of 64 bits are mixed into lanes; lanes into one number; pieces of a
 * large array, which several threads read, in their order.
 *
 * A lane takes one word after another: it is xored, its high half is folded into the low one, and
 * all is multiplied by an odd number. Each of these steps is one-to-one, so a difference in one
 * word never vanishes, and a word's place among its lane's counts. Lanes begin with different
 * numbers, so the lane counts, too. */
#include "array/digest.h"

#include "array/nditer.h"
#include "array/sum_isa.h"
#include "base/fault.h"
#include "base/workers.h"

#include <string.h>

/* Inlined into loops that are compiled for several instruction sets. */
#define FAN_INLINE __attribute__((always_inline))
#if defined(__clang__)
#define FAN_UNROLL _Pragma("unroll")
#else
#define FAN_UNROLL _Pragma("GCC unroll 16")
#endif

#define LANES 32                         /* as many as hide the time of a product */
#define BLOCK (LANES * 8)                /* bytes that one step of all lanes reads */
#define PIECE ((int64_t)1 << 18)         /* bytes of a piece: a multiple of BLOCK */
#define ODD 0x9e3779b1u                  /* by which words are multiplied */
#define BUFFER 4096                      /* bytes that are gathered of strided memory at a time */
#define PARALLEL_FROM ((int64_t)1 << 22) /* bytes */

/* How the NaNs of a dtype are found: by the width of its parts. */
typedef enum digest_nans {
    NANS_NONE,
    NANS_E4M3FN,
    NANS_E5M2,
    NANS_FLOAT16,
    NANS_BFLOAT16,
    NANS_FLOAT32,
    NANS_FLOAT64
} digest_nans;

static digest_nans nans_of(fan_dtype dtype)
{
    switch (dtype) {
    case FAN_DT_FLOAT8_E4M3FN:
        return NANS_E4M3FN;
    case FAN_DT_FLOAT8_E5M2:
        return NANS_E5M2;
    case FAN_DT_FLOAT16:
        return NANS_FLOAT16;
    case FAN_DT_BFLOAT16:
        return NANS_BFLOAT16;
    case FAN_DT_FLOAT32:
    case FAN_DT_COMPLEX64:
        return NANS_FLOAT32;
    case FAN_DT_FLOAT64:
    case FAN_DT_COMPLEX128:
        return NANS_FLOAT64;
    default:
        return NANS_NONE;
    }
}

/* mix_one: spreads every bit of x over the word. */
static uint64_t mix_one(uint64_t x)
{
    x ^= x >> 32;
    x *= 0x9fb21c651e98df25u;
    x ^= x >> 29;
    x *= 0x2545f4914f6cdd1du;
    return x ^ (x >> 32);
}

/* ---- blocks ---- */

/* The loops of vectors of 16 bytes, which every machine has, and of 32 bytes. */
#define FAN_WIDE 16
#define words words_16
#define one_nan one_nan_16
#define blocks blocks_16
#define any_blocks any_blocks_16
#include "array/digest_body.h"
#undef words
#undef one_nan
#undef blocks
#undef any_blocks

#if defined(__x86_64__)
#define FAN_WIDE 32
#define words words_32
#define one_nan one_nan_32
#define blocks blocks_32
#define any_blocks any_blocks_32
#include "array/digest_body.h"
#undef words
#undef one_nan
#undef blocks
#undef any_blocks

/* The same loops for each instruction set; all give the same digest. */
__attribute__((target("avx2"))) static void blocks_avx2(uint64_t *lane, const char *from, size_t n,
                                                        digest_nans nans)
{
    any_blocks_32(lane, from, n, nans);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2"))) static void blocks_avx512(
    uint64_t *lane, const char *from, size_t n, digest_nans nans)
{
    any_blocks_32(lane, from, n, nans);
}
#endif

static void mix_blocks(uint64_t *lane, const char *from, size_t n, digest_nans nans)
{
#if defined(__x86_64__)
    int rank = fan_sum_isa_rank();
    if (rank > 1) {
        blocks_avx512(lane, from, n, nans);
        return;
    }
    if (rank > 0) {
        blocks_avx2(lane, from, n, nans);
        return;
    }
#endif
    any_blocks_16(lane, from, n, nans);
}

/* ---- pieces ---- */

/* mix_bytes: mixes bytes into the lanes, the last block filled with zeros. */
static void mix_bytes(uint64_t *lane, const char *from, size_t bytes, digest_nans nans)
{
    size_t whole = bytes / BLOCK;
    size_t rest = bytes % BLOCK;
    mix_blocks(lane, from, whole, nans);
    if (!rest)
        return;
    _Alignas(16) char last[BLOCK] = {0};
    memcpy(last, from + whole * BLOCK, rest);
    mix_blocks(lane, last, 1, nans);
}

/* An array that is read in pieces. */
typedef struct digest_read {
    const fan_array *array;
    fan_nditer walk;
    digest_nans nans;
    int64_t each; /* elements of a piece */
} digest_read;

/* read_piece: returns the digest of one piece; its elements are in C order. */
static uint64_t read_piece(const digest_read *read, size_t piece)
{
    const fan_array *a = read->array;
    int64_t size = fan_dtype_step(a->dtype);
    int64_t at = (int64_t)piece * read->each;
    int64_t end = fan_min(at + read->each, read->walk.size);
    uint64_t lane[LANES];
    for (size_t i = 0; i < LANES; i++)
        lane[i] = (i + 1) * 0x9fb21c651e98df25u;

    const char *whole = fan_nditer_whole(&read->walk, a, at, end - at);
    if (whole)
        mix_bytes(lane, whole, (size_t)((end - at) * size), read->nans);
    FAN_UNINITIALIZED _Alignas(16) char buffer[BUFFER];
    while (!whole && at < end) {
        int64_t n = fan_min(BUFFER / size, end - at);
        const char *from = fan_nditer_elements(&read->walk, a, at, n, a->dtype, buffer);
        mix_bytes(lane, from, (size_t)(n * size), read->nans);
        at += n;
    }

    uint64_t result = 0;
    for (size_t i = 0; i < LANES; i++) {
        if (FAN_FAULT(DIGEST_WITHOUT_PLACE))
            result += lane[i];
        else
            result = mix_one(result ^ lane[i]);
    }
    return result;
}

/* Some pieces, from `first` on. */
typedef struct digest_some {
    const digest_read *read;
    size_t first;
    uint64_t *results;
} digest_some;

static void some_piece(void *context, size_t i)
{
    const digest_some *some = context;
    some->results[i] = read_piece(some->read, some->first + i);
}

#define PIECES 64 /* read together */

/* mix_elements: mixes the digests of all pieces into `digest`. */
static uint64_t mix_elements(const fan_array *a, uint64_t digest)
{
    uint64_t results[PIECES];
    fan_array bytes = *a;
    if (a->dtype == FAN_DT_BOOL)
        bytes.dtype = FAN_DT_UINT8; /* the bytes of bools as they are */
    int64_t size = fan_dtype_step(bytes.dtype);
    digest_read read = {.array = &bytes, .nans = nans_of(a->dtype), .each = PIECE / size};
    fan_nditer_one(&read.walk, &bytes, true);
    size_t all = (size_t)((read.walk.size + read.each - 1) / read.each);
    bool parallel = read.walk.size >= PARALLEL_FROM / size;
    for (size_t first = 0; first < all; first += PIECES) {
        size_t n = fan_umin(all - first, PIECES);
        digest_some some = {&read, first, results};
        if (parallel)
            fan_workers_run(n, some_piece, &some);
        for (size_t i = 0; i < n && !parallel; i++)
            some_piece(&some, i);
        for (size_t i = 0; i < n; i++)
            digest = mix_one(digest ^ results[i]) + first + i;
    }
    return digest;
}

/* ---- arrays ---- */

/* mix_shape: begins a digest: dtype, number of axes, extents. */
static uint64_t mix_shape(fan_dtype dtype, int ndim, const int64_t *shape, uint64_t form)
{
    uint64_t digest = mix_one(form + 1);
    if (!FAN_FAULT(DIGEST_WITHOUT_DTYPE))
        digest = mix_one(digest ^ (uint64_t)dtype);
    if (FAN_FAULT(DIGEST_WITHOUT_SHAPE))
        return digest;
    digest = mix_one(digest ^ (uint64_t)ndim);
    for (int i = 0; i < ndim; i++)
        digest = mix_one(digest ^ (uint64_t)shape[i]) + (uint64_t)i;
    return digest;
}

/* finish: 0 is for what has no digest. */
static uint64_t finish(uint64_t digest)
{
    digest = mix_one(digest);
    if (digest)
        return digest;
    return 1;
}

/* The forms of a gradient, which begin its digest. */
enum {
    FORM_DENSE,
    FORM_ZERO,
    FORM_PARTIAL,
    FORM_SPARSE
};

static uint64_t mix_array(const fan_array *a)
{
    return mix_elements(a, mix_shape(a->dtype, a->ndim, a->shape, FORM_DENSE));
}

uint64_t fan_digest_array(const fan_array *a)
{
    return finish(mix_array(a));
}

uint64_t fan_digest_zero(const fan_array *shape)
{
    return finish(mix_shape(shape->dtype, shape->ndim, shape->shape, FORM_ZERO));
}

uint64_t fan_digest_partial(const fan_patch *p, const fan_array *values)
{
    uint64_t digest = mix_shape(values->dtype, p->ndim, p->shape, FORM_PARTIAL);
    for (int i = 0; i < p->ndim; i++) {
        digest = mix_one(digest ^ (uint64_t)p->start[i]);
        digest = mix_one(digest ^ (uint64_t)p->step[i]);
        digest = mix_one(digest ^ (uint64_t)p->from[i]);
    }
    digest = mix_one(digest ^ mix_array(values));
    return finish(digest);
}

uint64_t fan_digest_number(uint64_t digest, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return finish(digest ^ mix_one(bits));
}

uint64_t fan_digest_sparse(const fan_sparse *s)
{
    uint64_t form = FORM_SPARSE + (uint64_t)s->format;
    uint64_t digest = mix_shape(s->values->dtype, s->ndim, s->shape, form);
    digest = mix_one(digest ^ mix_array(s->indices));
    if (s->pointers)
        digest = mix_one(digest ^ mix_array(s->pointers));
    digest = mix_one(digest ^ mix_array(s->values));
    return finish(digest);
}
