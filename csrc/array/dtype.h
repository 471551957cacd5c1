/* dtype: the element types, their promotion and their accumulation types. */
#ifndef FAN_ARRAY_DTYPE_H
#define FAN_ARRAY_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The element types, and all that the code for one of them is generated from. A new one is a row
 * here (a low float: one in FAN_LOW_LIST, too), its conversions in lowp.h, sum_numbers.h
 * and kernels.cu, its folds in sum_body.h, and its number in fanin.h.
 *
 * X(NAME, name, bytes, kind, SUM, LIBRARY, DLPACK): kind as NumPy writes it: b bool, i, u, f, c.
 * SUM: the dtype in which it is summed (D2). LIBRARY: where NumPy has it from. DLPACK: its type
 * code there. The order has no meaning. */
#define FAN_DTYPE_LIST(X)                                                    \
    X(BOOL, "bool", 1, 'b', BOOL, NUMPY, BOOL)                               \
    X(INT8, "int8", 1, 'i', INT8, NUMPY, INT)                                \
    X(INT16, "int16", 2, 'i', INT16, NUMPY, INT)                             \
    X(INT32, "int32", 4, 'i', INT32, NUMPY, INT)                             \
    X(INT64, "int64", 8, 'i', INT64, NUMPY, INT)                             \
    X(UINT8, "uint8", 1, 'u', UINT8, NUMPY, UINT)                            \
    X(UINT16, "uint16", 2, 'u', UINT16, NUMPY, UINT)                         \
    X(UINT32, "uint32", 4, 'u', UINT32, NUMPY, UINT)                         \
    X(UINT64, "uint64", 8, 'u', UINT64, NUMPY, UINT)                         \
    X(FLOAT16, "float16", 2, 'f', FLOAT32, NUMPY, FLOAT)                     \
    X(BFLOAT16, "bfloat16", 2, 'f', FLOAT32, ML_DTYPES, BFLOAT)              \
    X(FLOAT8_E4M3FN, "float8_e4m3fn", 1, 'f', FLOAT32, ML_DTYPES, F8_E4M3FN) \
    X(FLOAT8_E5M2, "float8_e5m2", 1, 'f', FLOAT32, ML_DTYPES, F8_E5M2)       \
    X(FLOAT32, "float32", 4, 'f', FLOAT32, NUMPY, FLOAT)                     \
    X(FLOAT64, "float64", 8, 'f', FLOAT64, NUMPY, FLOAT)                     \
    X(COMPLEX64, "complex64", 8, 'c', COMPLEX64, NUMPY, COMPLEX)             \
    X(COMPLEX128, "complex128", 16, 'c', COMPLEX128, NUMPY, COMPLEX)

/* The low floats, which are summed in float32. M(X, NAME, c, bits, limbs, unit, digits, always): c:
 * what its conversions and loops are called (fan_float_of_c, fan_c_of); the last four: its
 * fan_exact_kind (array/superacc.h). X is handed on. FAN_LOW_ML_LIST: those that NumPy has from
 * ml_dtypes alone. */
#define FAN_LOW_LIST(M, X)                      \
    M(X, FLOAT16, float16, 16, 2, 24, 11, true) \
    FAN_LOW_ML_LIST(M, X)
#define FAN_LOW_ML_LIST(M, X)                      \
    M(X, BFLOAT16, bfloat16, 16, 5, 133, 8, false) \
    M(X, FLOAT8_E4M3FN, e4m3fn, 8, 1, 9, 4, true)  \
    M(X, FLOAT8_E5M2, e5m2, 8, 1, 16, 3, true)

typedef enum fan_dtype {
#define X(NAME, ...) FAN_DT_##NAME,
    FAN_DTYPE_LIST(X)
#undef X
    FAN_DT_COUNT,
    FAN_DT_NONE = 0xff
} fan_dtype;

/* The floats of 8 bits, as a bit each: two of them have no common dtype. */
enum {
    FAN_FLOAT8_SET = 0
#define X(NAME, name, bytes, kind, ...) | ((bytes) == 1 && (kind) == 'f' ? 1 << FAN_DT_##NAME : 0)
        FAN_DTYPE_LIST(X)
#undef X
};

extern const uint8_t fan_dtype_sizes[FAN_DT_COUNT];
static inline size_t fan_dtype_size(fan_dtype d)
{
    return (unsigned)d < (unsigned)FAN_DT_COUNT ? fan_dtype_sizes[d] : 0;
}
/* fan_dtype_step: returns fan_dtype_size as a signed number, for strides and offsets. */
static inline int64_t fan_dtype_step(fan_dtype d)
{
    return (int64_t)fan_dtype_size(d);
}
char fan_dtype_kind(fan_dtype d);
bool fan_dtype_of_ml_dtypes(fan_dtype d);        /* whether NumPy has it from ml_dtypes alone */
const char *fan_dtype_name(fan_dtype d);         /* "float32"; "none" for FAN_DT_NONE */
fan_dtype fan_dtype_from_name(const char *name); /* FAN_DT_NONE if unknown */
/* fan_dtype_promote: D4; FAN_DT_NONE where there is none (two kinds of float8). Symmetric; not
 * associative. */
fan_dtype fan_dtype_promote(fan_dtype a, fan_dtype b);
/* fan_dtype_promote_weak: `a` beside a Python scalar of kind b (bool), i, f or c (D5). */
fan_dtype fan_dtype_promote_weak(fan_dtype a, char kind);
fan_dtype fan_dtype_accumulate(fan_dtype d);           /* D2: float32 for the low floats, else d */
bool fan_dtype_can_cast(fan_dtype from, fan_dtype to); /* D6: same_kind */

#endif
