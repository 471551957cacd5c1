/* The loops for AVX-512. The target is set by pragma, so the file needs no compiler flags; empty
 * for other processors. */
#if defined(__x86_64__)
#include "array/sum_loops.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
#endif

#define FAN_SET fan_loops_avx512
#define FAN_NAME "avx512"
#define FAN_WIDE 64
#include "array/sum_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int fan_nothing_here;
#endif
