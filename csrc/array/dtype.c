/* dtype: the facts of each dtype from the one list in dtype.h; then promotion (D4, D5),
 * accumulation (D2) and casts (D6). */
#include "array/dtype.h"

#include <string.h>

enum {
    FROM_NUMPY,
    FROM_ML_DTYPES
};

static const struct {
    const char *name;
    char kind;
    uint8_t sum, from;
} facts[FAN_DT_COUNT] = {
#define X(NAME, name, bytes, kind, SUM, LIBRARY, ...) {name, kind, FAN_DT_##SUM, FROM_##LIBRARY},
    FAN_DTYPE_LIST(X)
#undef X
};

const uint8_t fan_dtype_sizes[FAN_DT_COUNT] = {
#define X(NAME, name, bytes, ...) bytes,
    FAN_DTYPE_LIST(X)
#undef X
};

static bool dtype_valid(fan_dtype d)
{
    return (unsigned)d < (unsigned)FAN_DT_COUNT;
}

char fan_dtype_kind(fan_dtype d)
{
    if (dtype_valid(d))
        return facts[d].kind;
    return '?';
}

const char *fan_dtype_name(fan_dtype d)
{
    if (dtype_valid(d))
        return facts[d].name;
    return "none";
}

fan_dtype fan_dtype_from_name(const char *name)
{
    for (int d = 0; name && d < FAN_DT_COUNT; d++) {
        if (*facts[d].name == *name && strcmp(facts[d].name, name) == 0)
            return (fan_dtype)d;
    }
    return FAN_DT_NONE;
}

static bool is_float8(fan_dtype d)
{
    return dtype_valid(d) && (FAN_FLOAT8_SET >> d & 1);
}

bool fan_dtype_of_ml_dtypes(fan_dtype d)
{
    return dtype_valid(d) && facts[d].from == FROM_ML_DTYPES;
}

static bool dtype_is_integer(fan_dtype d)
{
    return fan_dtype_kind(d) == 'i' || fan_dtype_kind(d) == 'u';
}

/* dtype_float_bytes: returns the width of the real float to which NumPy promotes a bool, an
 * integer, a float, or a part of a complex number. */
static size_t dtype_float_bytes(fan_dtype d)
{
    size_t n = fan_dtype_size(d);
    switch (fan_dtype_kind(d)) {
    case 'f':
        return n;
    case 'c':
        return n / 2;
    default:
        if (n < 4)
            return 2 * n;
        return 8;
    }
}

static fan_dtype complex_of(size_t bytes)
{
    if (bytes <= 4)
        return FAN_DT_COMPLEX64;
    return FAN_DT_COMPLEX128;
}

static fan_dtype signed_of(size_t bytes)
{
    if (bytes == 2)
        return FAN_DT_INT16;
    if (bytes == 4)
        return FAN_DT_INT32;
    return FAN_DT_INT64;
}

/* promote_integers: two kinds: a signed type that contains both, or float64. */
static fan_dtype promote_integers(fan_dtype a, fan_dtype b)
{
    if (fan_dtype_kind(a) == fan_dtype_kind(b))
        return fan_dtype_size(a) >= fan_dtype_size(b) ? a : b;
    if (fan_dtype_kind(a) == 'u')
        return promote_integers(b, a);
    size_t bytes = fan_dtype_size(b);
    if (fan_dtype_size(a) > bytes)
        return a;
    if (bytes == 8)
        return FAN_DT_FLOAT64;
    return signed_of(2 * bytes);
}

fan_dtype fan_dtype_promote(fan_dtype a, fan_dtype b)
{
    if (!dtype_valid(a) || !dtype_valid(b))
        return FAN_DT_NONE;
    if (a == b || b == FAN_DT_BOOL)
        return a;
    if (a == FAN_DT_BOOL)
        return b;
    if (dtype_is_integer(a) && dtype_is_integer(b))
        return promote_integers(a, b);
    if (is_float8(a) && is_float8(b))
        return FAN_DT_NONE;
    if (fan_dtype_of_ml_dtypes(a) && dtype_is_integer(b))
        return a;
    if (fan_dtype_of_ml_dtypes(b) && dtype_is_integer(a))
        return b;
    size_t bytes = dtype_float_bytes(a);
    if (bytes < dtype_float_bytes(b))
        bytes = dtype_float_bytes(b);
    if (fan_dtype_kind(a) == 'c' || fan_dtype_kind(b) == 'c')
        return complex_of(bytes);
    if (is_float8(a))
        return b;
    if (is_float8(b))
        return a;
    /* bfloat16 with float16: neither contains the other */
    if (bytes == 2 && (fan_dtype_of_ml_dtypes(a) || fan_dtype_of_ml_dtypes(b)))
        return FAN_DT_FLOAT32;
    if (bytes <= 2)
        return FAN_DT_FLOAT16;
    if (bytes == 4)
        return FAN_DT_FLOAT32;
    return FAN_DT_FLOAT64;
}

fan_dtype fan_dtype_promote_weak(fan_dtype a, char kind)
{
    char k = fan_dtype_kind(a);
    switch (kind) {
    case 'b':
        return a;
    case 'i':
        if (a == FAN_DT_BOOL)
            return FAN_DT_INT64;
        return a;
    case 'f':
        if (k == 'b' || dtype_is_integer(a))
            return FAN_DT_FLOAT64;
        return a;
    case 'c':
        if (k == 'c' || !dtype_valid(a))
            return a;
        return complex_of(k == 'f' ? fan_dtype_size(a) : 8);
    default:
        return FAN_DT_NONE;
    }
}

fan_dtype fan_dtype_accumulate(fan_dtype d)
{
    if (dtype_valid(d))
        return (fan_dtype)facts[d].sum;
    return d;
}

bool fan_dtype_can_cast(fan_dtype from, fan_dtype to)
{
    static const char order[] = "buifc"; /* a kind may be cast to any later one */
    if (!dtype_valid(from) || !dtype_valid(to))
        return false;
    return strchr(order, fan_dtype_kind(from)) <= strchr(order, fan_dtype_kind(to));
}
