// clang-format Language: Cpp
/* digest_body: the loop of digests over vectors of one width, whose lanes stay in registers.
 *
 * digest.c includes it once for each width, after it has defined FAN_WIDE, the bytes of a vector,
 * and names of its own for all that is defined here: a processor whose vectors are narrower
 * would take them apart, one number after another. */
#define VECTOR __attribute__((vector_size(FAN_WIDE)))
#define VECTORS (BLOCK / FAN_WIDE)

typedef uint64_t words VECTOR;

/* one_nan: makes all NaNs of a vector one. */
static inline FAN_INLINE void one_nan(words *vector, digest_nans nans)
{
    typedef uint8_t of_8 VECTOR;
    typedef uint16_t of_16 VECTOR;
    typedef uint32_t of_32 VECTOR;
    typedef float floats VECTOR;
    typedef double doubles VECTOR;
    if (nans == NANS_NONE)
        return;
    words bits = *vector;
    words one;
    words is_nan;
    if (nans == NANS_E4M3FN || nans == NANS_E5M2) {
        uint8_t infinite = nans == NANS_E4M3FN ? 0x7e : 0x7c; /* the largest that is no NaN */
        one = (words)((of_8){0} + (uint8_t)0x7f);
        is_nan = (words)(((of_8)bits & (uint8_t)0x7f) > infinite);
    } else if (nans == NANS_FLOAT16 || nans == NANS_BFLOAT16) {
        uint16_t infinite = nans == NANS_FLOAT16 ? 0x7c00 : 0x7f80;
        one = (words)((of_16){0} + (uint16_t)0x7fff);
        is_nan = (words)(((of_16)bits & (uint16_t)0x7fff) > infinite);
    } else if (nans == NANS_FLOAT32) {
        floats numbers = (floats)bits;
        one = (words)((of_32){0} + (uint32_t)0x7fffffff);
        is_nan = (words)(numbers != numbers);
    } else {
        doubles numbers = (doubles)bits;
        one = (words){0} + (UINT64_MAX >> 1);
        is_nan = (words)(numbers != numbers);
    }
    *vector = (is_nan & one) | (~is_nan & bits);
}

/* blocks: mixes n blocks; `nans` is a constant of each caller, so that each has a loop of its own.
 */
static inline FAN_INLINE void blocks(uint64_t *lane, const char *from, size_t n, digest_nans nans)
{
    words own[VECTORS];
    memcpy(own, lane, sizeof own);
    for (size_t i = 0; i < n; i++) {
        FAN_UNROLL
        for (size_t k = 0; k < VECTORS; k++) {
            words x;
            memcpy(&x, from, sizeof x);
            from += sizeof x;
            one_nan(&x, nans);
            if (FAN_FAULT(DIGEST_WITHOUT_PLACE)) {
                own[k] += x;
                continue;
            }
            x ^= own[k];
            x ^= x >> 32;
            own[k] = x * ODD;
        }
    }
    memcpy(lane, own, sizeof own);
}

static inline FAN_INLINE void any_blocks(uint64_t *lane, const char *from, size_t n,
                                         digest_nans nans)
{
    switch (nans) {
    case NANS_NONE:
        blocks(lane, from, n, NANS_NONE);
        return;
    case NANS_E4M3FN:
        blocks(lane, from, n, NANS_E4M3FN);
        return;
    case NANS_E5M2:
        blocks(lane, from, n, NANS_E5M2);
        return;
    case NANS_FLOAT16:
        blocks(lane, from, n, NANS_FLOAT16);
        return;
    case NANS_BFLOAT16:
        blocks(lane, from, n, NANS_BFLOAT16);
        return;
    case NANS_FLOAT32:
        blocks(lane, from, n, NANS_FLOAT32);
        return;
    case NANS_FLOAT64:
        blocks(lane, from, n, NANS_FLOAT64);
        return;
    }
}

#undef VECTOR
#undef VECTORS
#undef FAN_WIDE
