/* args: the arguments of kernels, passed by value. Shared by the backend, the kernels and the fake
 * driver, so it is C and CUDA C.
 *
 * Addresses are the device's. The general kernels have extents, strides (bytes) and addresses one
 * after the other in `words`, for any rank: each struct defines the order. All structs are below
 * 4096 bytes, which every driver accepts. */
#ifndef FAN_DEVICE_KERNELS_ARGS_H
#define FAN_DEVICE_KERNELS_ARGS_H

#include "array/device_stats.h"
#include "array/dtype.h"

#include <stdint.h>

#define FAN_K_SOURCES 480 /* of a fold in one launch */
#define FAN_K_WORDS 480
#define FAN_K_BLOCK 256 /* threads of a block */

/* Flags of a fold. ALIGNED: every address is a multiple of 16; else of its numbers' size.
 * FIRST_WIDE, OUT_WIDE: in[0], or out, has the accumulation dtype. */
#define FAN_K_ALIGNED 1
#define FAN_K_FIRST_WIDE 2
#define FAN_K_OUT_WIDE 4

/* fan_fold_*: out[i] = ((in[0][i] + in[1][i]) + ..) * factor, all gap-free, and of one dtype except
 * for the flags. out may be one of the sources of its dtype. fan_fold_stats_*: also computes the
 * statistics of the result, a row for each block (array/device_stats.h); out 0: the result is not
 * written. */
typedef struct fan_k_fold {
    uint64_t out;
    int64_t count;                   /* numbers */
    uint64_t factor;                 /* the bits of one number of the accumulation type */
    int32_t n, scaled, flags, parts; /* parts: numbers of an element */
    uint64_t rows;
    /* negative: signed integers; first_suspect: sources before it are not reported */
    int32_t negative;
    int32_t first_suspect;
    uint64_t in[FAN_K_SOURCES];
} fan_k_fold;

/* fan_many_*: many folds of one kind in one launch. Their table is in device memory: rows[],
 * sources[] (addresses), tiles[] (the row of each), one after the other. A tile is FAN_K_TILE bytes
 * of a result, or its remainder: a warp's share. */
#define FAN_K_TILE 1024
#define FAN_K_WARP 32

typedef struct fan_k_row {
    uint64_t out;
    uint32_t count;    /* numbers */
    uint32_t first;    /* the index of its first source */
    uint32_t tile;     /* the index of its first tile */
    uint16_t n, flags; /* n: sources */
} fan_k_row;

typedef struct fan_k_many {
    uint64_t table;
    uint64_t factor;
    int64_t rows;
    int64_t sources;
    int64_t tiles;
    int32_t scaled;
    int32_t unused;
} fan_k_many;

/* fan_any, fan_fold_stats_any: the same for any dtypes, strides and accumulation dtypes (D3). n ==
 * 0 fills with zeros. fan_nonfinite_any: if the figures at `rows` contain a non-finite element
 * without its contribution, and the source has one: reports the source, by its key in factor[0].
 * words: extent[ndim]; out: address, stride[ndim]; each source: address, dtype | acc << 8,
 * stride[ndim]. Where `weighted` is set, then for each source its weight: the bits of two float64.
 */
typedef struct fan_k_any {
    int64_t size;
    int32_t n, ndim, out, scaled; /* out: its dtype */
    int32_t weighted;
    int32_t divided;
    uint64_t divisor; /* the bits of one number of the last accumulation dtype's parts */
    /* anywhere: some address is no multiple of its numbers' size */
    int32_t anywhere;
    int32_t first_suspect;
    uint64_t rows;
    uint64_t factor[2]; /* the bits of one element of the last accumulation dtype */
    int64_t words[FAN_K_WORDS];
} fan_k_any;

/* fan_fold_stats_end: adds the rows in order into the struct that the host reads. One block. before
 * 0: no contribution was found before; else another fan_device_stats, or the same. */
typedef struct fan_k_stats_end {
    uint64_t rows;
    uint64_t stats;
    uint64_t before;
    int64_t nrows;
    int64_t count;
    int64_t keys[FAN_K_SOURCES]; /* of the sources */
} fan_k_stats_end;

/* fan_reduce_*: sums numbers over the reduced axes, in the order of D7, a part of that in each
 * launch: each `group` of terms in a row is distributed over 2^lanes lanes. A thread makes a lane
 * (run: of which group, and which of its lanes), or `whole`: all lanes of a group, and adds them
 * up. It leaves the result for the next launch, in dtype acc at out[t]; or `last`: in dtype `to` as
 * an element of the result. across: neighbouring threads have neighbouring numbers, not
 * neighbouring runs. Complex numbers are two independent parts. words: of the kept axes,
 * extent[stay], out stride[stay], in stride[stay]; of the reduced ones, extent[go], in
 * stride[go]. */
typedef struct fan_k_reduce {
    uint64_t out;
    uint64_t in;
    int64_t numbers, terms, runs; /* of the result; of `in` for each; threads for each */
    int64_t group;
    int64_t in_part, out_part; /* bytes from one part to the next */
    int32_t parts;
    int32_t lanes;
    int32_t whole;
    int32_t across;
    int32_t again, last; /* again: `in` is an earlier launch's result */
    int32_t acc;
    int32_t to;
    int32_t anywhere;
    int32_t stay;
    int32_t go;
    int32_t unused;
    int64_t words[FAN_K_WORDS];
} fan_k_reduce;

/* The distribution of terms (D7), as in array/reduce.c. Up to FAN_K_RUN terms are not
 * distributed. */
#define FAN_K_RUN 256
#define FAN_K_LANES 5 /* 2^5 */
#define FAN_K_GROUP (FAN_K_RUN << FAN_K_LANES)

/* fan_sort_*: sort the entries of COO data stably by their rows: a row is the linear index along
 * the sparse axes. Each pass sorts by `bits` bits of the rows: count counts the digits of each
 * tile, FAN_K_ENTRIES in a row; scan adds up those of earlier tiles; move moves the entries. The
 * first pass computes the rows from the indices (`indices` not 0), the others read `list`.
 * unsorted: 0 unless the first count finds a row above the next one's; while it is 0 the rest does
 * nothing. A row that is not among the `nrows` from `first_row` on, or is beyond the shape, counts
 * as nrows: it comes last, and is skipped. words: extent[sparse]. */
#define FAN_K_PER_LANE 16
#define FAN_K_ENTRIES (FAN_K_PER_LANE * FAN_K_BLOCK)
#define FAN_K_DIGIT 9 /* bits, at most */

typedef struct fan_k_coo {
    uint64_t indices;
    /* bytes from one entry to the next; from one axis's indices to the next's */
    int64_t index_step;
    int64_t index_row;
    uint64_t first_row;
    uint32_t nrows;
    int32_t index_size;
    int32_t sparse;
    int32_t unused;
} fan_k_coo;

/* The entries in a sort, each list with as few bytes as possible. A row is split into its low bits,
 * for the first pass, and its high bits, in a list of their own, so that later passes read only
 * those; high_size 0: all bits are in `low`. came: the original position of the entry; or, if
 * values is not 0, its value itself. */
typedef struct fan_k_list {
    uint64_t low;
    uint64_t high;
    uint64_t came;
} fan_k_list;

typedef struct fan_k_entry {
    int32_t low_bits, low_size, high_size, came_size; /* sizes: bytes of an entry */
    uint64_t values;
    int64_t value_step;
} fan_k_entry;

typedef struct fan_k_sort {
    fan_k_coo coo;
    fan_k_entry entry;
    fan_k_list list;
    fan_k_list out;
    uint64_t counts, totals; /* uint32: [digit][tile], [digit] */
    uint64_t unsorted;       /* uint32 */
    int64_t entries;
    int64_t tiles;
    int32_t shift;
    int32_t bits;
    int64_t words[64];
} fan_k_sort;

/* fan_scatter_any: into += the entries of sparse data, those with the same index one after the
 * other, in into's dtype. A worker of COO data handles all entries of a row, if it is the first of
 * them, else nothing; one of compressed data those between two pointers. fan_scatter_NAME: the same
 * for COO data whose entries are gap-free, there and in `values`: by 16 bytes of `values` if
 * `aligned`. wide: into has the accumulation dtype of the kernel; else that of `values`. words:
 * COO: extent[sparse], stride of into[sparse]; else: extent along the plain axis in blocks, stride
 * of a row, stride of a column (of blocks); then of the axes inside an entry, extent[inner], stride
 * of into[inner], stride of values[inner]. */
typedef struct fan_k_scatter {
    uint64_t into, values, indices, pointers;     /* pointers 0: COO */
    int64_t entries, lanes, inside;               /* lanes: workers; inside: numbers of an entry */
    int64_t value_step, index_step, pointer_step; /* bytes from one entry to the next */
    int32_t into_dtype;
    int32_t value_dtype;
    int32_t index_size;
    int32_t pointer_size;
    int32_t inner;
    int32_t anywhere;
    int32_t aligned;
    int32_t wide;
    fan_k_coo coo;
    fan_k_entry entry; /* as fan_sort_* wrote them */
    fan_k_list list;
    uint64_t unsorted; /* 0: the list is not read, because there is one entry */
    int64_t words[256];
} fan_k_scatter;

/* X(name, bytes of a number in memory, its dtype, the accumulation dtype): the folds with a kernel
 * of their own. Complex ones are folds of twice as many numbers; integers need no sign. */
#define FAN_K_FOLD_LIST(X)          \
    X(truth, 1, BOOL, BOOL)         \
    X(bits8, 1, UINT8, UINT8)       \
    X(bits16, 2, UINT16, UINT16)    \
    X(bits32, 4, UINT32, UINT32)    \
    X(bits64, 8, UINT64, UINT64)    \
    X(single, 4, FLOAT32, FLOAT32)  \
    X(twice, 8, FLOAT64, FLOAT64)   \
    X(doubled, 4, FLOAT32, FLOAT64) \
    FAN_LOW_LIST(FAN_K_LOW_FOLD, X)
#define FAN_K_LOW_FOLD(X, NAME, c, bits, ...) X(c, bits / 8, NAME, FLOAT32)

/* X(name, dtype in memory, dtype of the sum): those with a kernel for sums over axes. */
#define FAN_K_REDUCE_LIST(X)    \
    X(truth, BOOL, BOOL)        \
    X(bits8, UINT8, UINT8)      \
    X(bits16, UINT16, UINT16)   \
    X(bits32, UINT32, UINT32)   \
    X(bits64, UINT64, UINT64)   \
    X(single, FLOAT32, FLOAT64) \
    X(twice, FLOAT64, FLOAT64)  \
    FAN_LOW_LIST(FAN_K_LOW_REDUCE, X)
#define FAN_K_LOW_REDUCE(X, NAME, c, ...) X(c, NAME, FLOAT64)

#endif
