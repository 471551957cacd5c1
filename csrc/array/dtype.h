/* dtype: the element types, their promotion and their accumulation types. */
#ifndef FAN_ARRAY_DTYPE_H
#define FAN_ARRAY_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(NAME, name, bytes, kind): kind as NumPy writes it: b bool, i, u, f, c. The order has no meaning. */
#define FAN_DTYPE_LIST(X)                     \
    X(BOOL, "bool", 1, 'b')                   \
    X(INT8, "int8", 1, 'i')                   \
    X(INT16, "int16", 2, 'i')                 \
    X(INT32, "int32", 4, 'i')                 \
    X(INT64, "int64", 8, 'i')                 \
    X(UINT8, "uint8", 1, 'u')                 \
    X(UINT16, "uint16", 2, 'u')               \
    X(UINT32, "uint32", 4, 'u')               \
    X(UINT64, "uint64", 8, 'u')               \
    X(FLOAT16, "float16", 2, 'f')             \
    X(BFLOAT16, "bfloat16", 2, 'f')           \
    X(FLOAT8_E4M3FN, "float8_e4m3fn", 1, 'f') \
    X(FLOAT8_E5M2, "float8_e5m2", 1, 'f')     \
    X(FLOAT32, "float32", 4, 'f')             \
    X(FLOAT64, "float64", 8, 'f')             \
    X(COMPLEX64, "complex64", 8, 'c')         \
    X(COMPLEX128, "complex128", 16, 'c')

typedef enum fan_dtype {
#define X(NAME, name, bytes, kind) FAN_DT_##NAME,
    FAN_DTYPE_LIST(X)
#undef X
        FAN_DT_COUNT,
    FAN_DT_NONE = 0xff
} fan_dtype;

extern const uint8_t fan_dtype_sizes[FAN_DT_COUNT];
static inline size_t fan_dtype_size(fan_dtype d)
{
    return (unsigned)d < (unsigned)FAN_DT_COUNT ? fan_dtype_sizes[d] : 0;
}
char fan_dtype_kind(fan_dtype d);
const char *fan_dtype_name(fan_dtype d);         /* "float32"; "none" for FAN_DT_NONE */
fan_dtype fan_dtype_from_name(const char *name); /* FAN_DT_NONE if unknown */
/* fan_dtype_promote: D4; FAN_DT_NONE where there is none (two kinds of float8). Symmetric; not associative. */
fan_dtype fan_dtype_promote(fan_dtype a, fan_dtype b);
/* fan_dtype_promote_weak: `a` beside a Python scalar of kind b (bool), i, f or c (D5). */
fan_dtype fan_dtype_promote_weak(fan_dtype a, char kind);
fan_dtype fan_dtype_accumulate(fan_dtype d);           /* D2: float32 for the low floats, else d */
bool fan_dtype_can_cast(fan_dtype from, fan_dtype to); /* D6: same_kind */

#endif
