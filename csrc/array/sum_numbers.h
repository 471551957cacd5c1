/* sum_numbers: the number types of sums, one number or a vector of them at a time. No guard:
 * sum_body.h includes it once for each width, after it has defined
 *
 *   WIDTH   the end of the names: 1, s (short vectors) or w (the widest)
 *   BYTES   of a vector; 0 for one number
 *
 * In this order: types; short integers; low floats; doubles; the functions of each number type. */

/* ---- Types ----
 *
 * v: in a register; m: at any address. half32, half16, half8: the floats, or low floats, of memory
 * that become a whole vector. */
#if BYTES
#define TYPE(T, name, bytes)                                         \
    typedef T AT_WIDTH(v##name) __attribute__((vector_size(bytes))); \
    typedef T AT_WIDTH(m##name) __attribute__((vector_size(bytes), aligned(1), may_alias));
#else
#define TYPE(T, name, bytes)     \
    typedef T AT_WIDTH(v##name); \
    typedef T FAN_ANYWHERE AT_WIDTH(m##name);
#endif
#define U32 AT_WIDTH(vu32)
#define I32 AT_WIDTH(vi32)
#define F32 AT_WIDTH(vf32)
#define F64 AT_WIDTH(vf64)
#define HALF32 AT_WIDTH(vhalf32)
#define HALF16 AT_WIDTH(vhalf16)
#define HALF8 AT_WIDTH(vhalf8)

TYPE(uint8_t, u8, BYTES)
TYPE(uint16_t, u16, BYTES)
TYPE(uint32_t, u32, BYTES)
TYPE(int32_t, i32, BYTES)
TYPE(uint64_t, u64, BYTES)
TYPE(float, f32, BYTES)
TYPE(double, f64, BYTES)
TYPE(float, half32, BYTES / 2)
TYPE(uint16_t, half16, BYTES / 2)
#if BYTES == 16 && defined(__x86_64__)
/* Four bytes are handled as one number. */
typedef uint32_t HALF8;
typedef fan_any_u32 AT_WIDTH(mhalf8);
#else
TYPE(uint8_t, half8, BYTES / 4)
#endif
#undef TYPE

#if BYTES

/* ---- Short integers to 32 bits and back ---- */

ALWAYS U32 AT_WIDTH(widen16)(HALF16 x)
{
#if defined(__x86_64__)
    JOIN(halves, _, BYTES) y = {0};
    memcpy(&y, &x, sizeof x);
    return (U32)JOIN(widen16, _, BYTES)(y);
#else
    return __builtin_convertvector(x, U32);
#endif
}

ALWAYS U32 AT_WIDTH(widen8)(HALF8 x)
{
#if defined(__x86_64__)
    JOIN(bytes, _, BYTES) y = {0};
    memcpy(&y, &x, sizeof x);
    return (U32)JOIN(widen8, _, BYTES)(y);
#else
    return __builtin_convertvector(x, U32);
#endif
}

ALWAYS HALF16 AT_WIDTH(narrow16)(U32 x)
{
#if defined(__x86_64__)
    JOIN(halves, _, BYTES) y = JOIN(narrow16, _, BYTES)((JOIN(words, _, BYTES))x);
    HALF16 z;
    memcpy(&z, &y, sizeof z);
    return z;
#else
    return __builtin_convertvector(x, HALF16);
#endif
}

ALWAYS HALF8 AT_WIDTH(narrow8)(U32 x)
{
#if defined(__x86_64__)
    JOIN(bytes, _, BYTES) y = JOIN(narrow8, _, BYTES)((JOIN(words, _, BYTES))x);
    HALF8 z;
    memcpy(&z, &y, sizeof z);
    return z;
#else
    return __builtin_convertvector(x, HALF8);
#endif
}

/* ---- Low floats: as lowp.h, lane by lane ---- */

/* either: a comparison of vectors is a vector of masks. */
ALWAYS U32 AT_WIDTH(either)(I32 mask, U32 yes, U32 no)
{
    return no ^ ((yes ^ no) & (U32)mask);
}

ALWAYS U32 AT_WIDTH(low_round)(U32 a, uint32_t mant, uint32_t bias)
{
    uint32_t dropped = 23u - mant;
    uint32_t rebias = (127u - bias) << 23;
    uint32_t power = (127u + 24u - bias - mant) << 23;
    U32 half = ((1u << (dropped - 1u)) - 1u) + ((a >> dropped) & 1u);
    U32 normal = (a - rebias + half) >> dropped;
    U32 subnormal = (U32)((F32)a + fan_float_of_bits(power)) - power;
    return AT_WIDTH(either)(a < rebias + (1u << 23), subnormal, normal);
}

ALWAYS U32 AT_WIDTH(low_widen)(U32 a, uint32_t mant, uint32_t bias)
{
    U32 normal = (a << (23u - mant)) + ((127u - bias) << 23);
    float step = fan_float_of_bits((127u + 1u - bias - mant) << 23);
    U32 subnormal = (U32)(__builtin_convertvector((I32)a, F32) * step);
    return AT_WIDTH(either)(a < (1u << mant), subnormal, normal);
}

/* low_down: x rounded: float32 bits from `over` on become `inf`, NaN becomes `nan`; the sign goes
 * to the top bit of a number of `bits`. */
ALWAYS U32 AT_WIDTH(low_down)(F32 x, uint32_t mant, uint32_t bias, uint32_t over, uint32_t inf,
                              uint32_t nan, int bits)
{
    U32 u = (U32)x;
    U32 a = u & 0x7fffffffu;
    U32 zero = {0};
    U32 r = AT_WIDTH(low_round)(a, mant, bias);
    r = AT_WIDTH(either)(a >= over, zero + inf, r);
    if (nan != inf)
        r = AT_WIDTH(either)(a > 0x7f800000u, zero + nan, r);
    return r | (u >> (32 - bits) & 1u << (bits - 1));
}

ALWAYS F32 AT_WIDTH(float16_up)(U32 h)
{
    U32 a = h & 0x7fffu;
    U32 r = AT_WIDTH(low_widen)(a, 10, 15);
    r = AT_WIDTH(either)(a >= 0x7c00u, 0x7f800000u | a << 13, r);
    return (F32)(r | (h & 0x8000u) << 16);
}

ALWAYS U32 AT_WIDTH(float16_down)(F32 x)
{
    return AT_WIDTH(low_down)(x, 10, 15, 0x477ff000u, 0x7c00u, 0x7e00u, 16);
}

ALWAYS F32 AT_WIDTH(bfloat16_up)(U32 h)
{
    return (F32)(h << 16);
}

ALWAYS U32 AT_WIDTH(bfloat16_down)(F32 x)
{
    U32 u = (U32)x;
    U32 r = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return AT_WIDTH(either)((u & 0x7fffffffu) > 0x7f800000u, u >> 16 | 0x40u, r);
}

ALWAYS F32 AT_WIDTH(e5m2_up)(U32 h)
{
    return AT_WIDTH(float16_up)(h << 8);
}

ALWAYS U32 AT_WIDTH(e5m2_down)(F32 x)
{
    return AT_WIDTH(low_down)(x, 2, 15, 0x47700000u, 0x7cu, 0x7eu, 8);
}

ALWAYS F32 AT_WIDTH(e4m3fn_up)(U32 h)
{
    U32 zero = {0};
    U32 a = h & 0x7fu;
    U32 r = AT_WIDTH(low_widen)(a, 3, 7);
    r = AT_WIDTH(either)(a == 0x7fu, zero + 0x7fc00000u, r);
    return (F32)(r | (h & 0x80u) << 24);
}

ALWAYS U32 AT_WIDTH(e4m3fn_down)(F32 x)
{
    return AT_WIDTH(low_down)(x, 3, 7, 0x43e80001u, 0x7fu, 0x7fu, 8);
}

/* Of memory to float32 and back. */
#define LOW_MEMORY(X, NAME, K, BITS, ...)                     \
    ALWAYS F32 AT_WIDTH(K##_in)(AT_WIDTH(vhalf##BITS) x)      \
    {                                                         \
        return AT_WIDTH(K##_up)(AT_WIDTH(widen##BITS)(x));    \
    }                                                         \
    ALWAYS AT_WIDTH(vhalf##BITS) AT_WIDTH(K##_out)(F32 x)     \
    {                                                         \
        return AT_WIDTH(narrow##BITS)(AT_WIDTH(K##_down)(x)); \
    }

#else

#define LOW_MEMORY(X, NAME, K, BITS, ...)            \
    ALWAYS float AT_WIDTH(K##_in)(uint##BITS##_t x)  \
    {                                                \
        return fan_float_of_##K(x);                  \
    }                                                \
    ALWAYS uint##BITS##_t AT_WIDTH(K##_out)(float x) \
    {                                                \
        return fan_##K##_of(x);                      \
    }

#endif
FAN_LOW_LIST(LOW_MEMORY, )
#undef LOW_MEMORY

#if BYTES >= 32
/* AVX2 and AVX-512 machines have instructions for float16; only their NaNs are made ours first. */
ALWAYS F32 quick_in(HALF16 x)
{
#if BYTES == 64
    return (F32)_mm512_cvtph_ps((__m256i)x);
#else
    return (F32)_mm256_cvtph_ps((__m128i)x);
#endif
}

ALWAYS HALF16 quick_out(F32 x)
{
    U32 u = (U32)x;
    U32 nan = (u & 0x80000000u) | 0x7fc00000u;
    u = AT_WIDTH(either)((u & 0x7fffffffu) > 0x7f800000u, nan, u);
#if BYTES == 64
    return (HALF16)_mm512_cvtps_ph((__m512)u, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (HALF16)_mm256_cvtps_ph((__m256)u, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
}
#define float16_in_w quick_in
#define float16_out_w quick_out
#endif

/* ---- Floats to doubles and back ----
 *
 * With instructions, as for short integers. */

ALWAYS F64 AT_WIDTH(doubles)(HALF32 x)
{
#if BYTES == 64
    return (F64)_mm512_cvtps_pd((__m256)x);
#elif BYTES == 32
    return (F64)_mm256_cvtps_pd((__m128)x);
#elif BYTES
    return __builtin_convertvector(x, F64);
#else
    return (double)x;
#endif
}

ALWAYS HALF32 AT_WIDTH(floats)(F64 x)
{
#if BYTES == 64
    return (HALF32)_mm512_cvtpd_ps((__m512d)x);
#elif BYTES == 32
    return (HALF32)_mm256_cvtpd_ps((__m256d)x);
#elif BYTES
    return __builtin_convertvector(x, HALF32);
#else
    return (float)x;
#endif
}

/* ---- In, plus, times, weigh, over, out ----
 *
 * in_K from an address; up_K of memory, plus_K, times_K, down_K to memory. weigh_K: a term times
 * its weight, rounded to the number's type; over_K: a sum over its divisor, rounded so too.
 * Integers wrap: they are unsigned here, whatever their dtype; they are not divided. */

/* X(kind, in memory, number, in, a plus b, a times b, a over b, out, rounded to the type) */
#define NUMBER_LIST(X)                                    \
    X(truth, u8, u8, (x != 0) & 1, a | b, a & b, a, x, x) \
    X(bits8, u8, u8, x, a + b, a * b, a, x, x)            \
    X(bits16, u16, u16, x, a + b, a * 1u * b, a, x, x)    \
    X(bits32, u32, u32, x, a + b, a * b, a, x, x)         \
    X(bits64, u64, u64, x, a + b, a * b, a, x, x)         \
    X(single, f32, f32, x, a + b, a * b, a / b, x, x)     \
    X(twice, f64, f64, x, a + b, a * b, a / b, x, x)      \
    X(doubled, half32, f64, AT_WIDTH(doubles)(x), a + b, a * b, a / b, AT_WIDTH(floats)(x), x)
#define LOW_NUMBERS(X, NAME, K, BITS, ...)                                                      \
    X(K, half##BITS, f32, AT_WIDTH(K##_in)(x), a + b, a * b, a / b, AT_WIDTH(K##_out)(x), x)    \
    X(own_##K, half##BITS, f32, AT_WIDTH(K##_in)(x), a + b, a * b, a / b, AT_WIDTH(K##_out)(x), \
      AT_WIDTH(K##_in)(AT_WIDTH(K##_out)(x)))

#define NUMBERS(K, MEM, T, IN, PLUS, TIMES, OVER, OUT, ROUNDED)                  \
    typedef AT_WIDTH(v##MEM) AT_WIDTH(memory_##K);                               \
    typedef AT_WIDTH(v##T) AT_WIDTH(number_##K);                                 \
    ALWAYS AT_WIDTH(v##T) AT_WIDTH(up_##K)(AT_WIDTH(v##MEM) x)                   \
    {                                                                            \
        return (AT_WIDTH(v##T))(IN);                                             \
    }                                                                            \
    ALWAYS AT_WIDTH(v##T) AT_WIDTH(in_##K)(const char *p)                        \
    {                                                                            \
        return AT_WIDTH(up_##K)(*(const AT_WIDTH(m##MEM) *)p);                   \
    }                                                                            \
    ALWAYS AT_WIDTH(v##MEM) AT_WIDTH(down_##K)(AT_WIDTH(v##T) x)                 \
    {                                                                            \
        return OUT;                                                              \
    }                                                                            \
    ALWAYS AT_WIDTH(v##T) AT_WIDTH(rounded_##K)(AT_WIDTH(v##T) x)                \
    {                                                                            \
        return ROUNDED;                                                          \
    }                                                                            \
    ALWAYS AT_WIDTH(v##T) AT_WIDTH(plus_##K)(AT_WIDTH(v##T) a, AT_WIDTH(v##T) b) \
    {                                                                            \
        return AT_WIDTH(rounded_##K)((AT_WIDTH(v##T))(PLUS));                    \
    }                                                                            \
    ALWAYS AT_WIDTH(v##T) AT_WIDTH(times_##K)(AT_WIDTH(v##T) a, v##T##_1 b)      \
    {                                                                            \
        return (AT_WIDTH(v##T))(TIMES);                                          \
    }                                                                            \
    ALWAYS AT_WIDTH(v##T) AT_WIDTH(weigh_##K)(AT_WIDTH(v##T) a, v##T##_1 b)      \
    {                                                                            \
        return AT_WIDTH(rounded_##K)(AT_WIDTH(times_##K)(a, b));                 \
    }                                                                            \
    ALWAYS AT_WIDTH(v##T) AT_WIDTH(over_##K)(AT_WIDTH(v##T) a, v##T##_1 b)       \
    {                                                                            \
        (void)b;                                                                 \
        return AT_WIDTH(rounded_##K)(OVER);                                      \
    }
NUMBER_LIST(NUMBERS)
FAN_LOW_LIST(LOW_NUMBERS, NUMBERS)
#undef NUMBERS
#undef LOW_NUMBERS
#undef NUMBER_LIST
#undef U32
#undef I32
#undef F32
#undef F64
#undef HALF32
#undef HALF16
#undef HALF8
#undef WIDTH
#undef BYTES
