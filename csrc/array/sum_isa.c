/* sum_isa: chooses the loops: the widest set that the machine supports, on first use, or the one
 * that is named. */
#include "array/sum_isa.h"

#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* sum_base.c, sum_avx2.c, sum_avx512.c */
extern const fan_loop_set fan_loops_base, fan_loops_avx2, fan_loops_avx512;

#define SETS 3

#if defined(__x86_64__)
/* sum_isa_has_f16c: returns whether the processor converts float16. clang before 19 has no name for
 * it in
 * __builtin_cpu_supports. The caller also checks avx2, without which the system does not save its
 * registers. */
static bool sum_isa_has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool sum_isa_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && sum_isa_has_f16c();
}

static bool sum_isa_has_avx512(void)
{
    bool words = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    bool lengths = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return words && lengths && sum_isa_has_avx2();
}
#endif

/* sum_isa_available: returns set i if this machine supports it. */
static const fan_loop_set *sum_isa_available(size_t i)
{
    switch (i) {
    case 0:
        return &fan_loops_base;
#if defined(__x86_64__)
    case 1:
        if (sum_isa_has_avx2())
            return &fan_loops_avx2;
        return NULL;
    case 2:
        if (sum_isa_has_avx512())
            return &fan_loops_avx512;
        return NULL;
#endif
    default:
        return NULL;
    }
}

static _Atomic(const fan_loop_set *) chosen;

static const fan_loop_set *sum_isa_choose(void)
{
    const fan_loop_set *best = NULL;
    for (size_t i = 0; i < SETS; i++) {
        const fan_loop_set *set = sum_isa_available(i);
        if (set)
            best = set;
    }
    atomic_store_explicit(&chosen, best, memory_order_relaxed);
    return best;
}

static inline const fan_loop_set *set_now(void)
{
    const fan_loop_set *set = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (set)
        return set;
    return sum_isa_choose();
}

const fan_loops *fan_loops_of(fan_dtype d)
{
    return &set_now()->of[d];
}

bool fan_sum_set_isa(const char *name)
{
    for (size_t i = 0; name && i < SETS; i++) {
        const fan_loop_set *set = sum_isa_available(i);
        if (set && strcmp(set->name, name) == 0) {
            atomic_store_explicit(&chosen, set, memory_order_relaxed);
            return true;
        }
    }
    if (!name)
        (void)sum_isa_choose();
    return !name;
}

const char *fan_sum_isa(void)
{
    return set_now()->name;
}

/* By address: cpuid costs tens of microseconds in a virtual machine. */
int fan_sum_isa_rank(void)
{
#if defined(__x86_64__)
    const fan_loop_set *set = set_now();
    if (set == &fan_loops_avx512)
        return 2;
    return set == &fan_loops_avx2;
#else
    return 0;
#endif
}

#ifdef FAN_TEST
uint64_t fan_sum_read(const char *p, size_t bytes)
{
    return set_now()->read(p, bytes);
}
#endif

const char *fan_sum_isa_at(size_t i)
{
    for (size_t k = 0; k < SETS; k++) {
        const fan_loop_set *set = sum_isa_available(k);
        if (set && i-- == 0)
            return set->name;
    }
    return NULL;
}
