/* float_mode: the floating-point modes of a thread: the direction of rounding, what becomes of
 * subnormal numbers, and which exceptions trap.
 *
 * Each thread has its own modes, and a program may change them (torch.set_flush_denormal,
 * fesetround). The bits of a sum depend on none of that (A15): each function of array/ that adds,
 * rounds or converts, and that other folders call, begins with FAN_DEFAULT_FLOAT_MODE: round to
 * nearest, keep subnormal numbers, no traps. Helper threads, which run nothing else, have these
 * modes from their start.
 *
 * Foreign code runs in the modes of the thread that called: a callback from within our arithmetic
 * (a handler of a signal) has them back for its time, and a thread of the pool takes over those of
 * the thread that started its job.
 *
 * x86-64: MXCSR, aarch64: FPCR. On other processors only the direction of rounding is kept. No code
 * here uses the x87 unit, which has modes of its own. */
#ifndef FAN_BASE_FLOAT_MODE_H
#define FAN_BASE_FLOAT_MODE_H

#include "base/fault.h"

#include <stdint.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <fenv.h>
#endif

/* The modes of a thread, as its processor has them. */
typedef uint64_t fan_float_mode;

/* FAN_FLOAT_MODE_DEFAULT: the modes with which a process starts; _UPWARD: the same, but to round
 * up. FAN__FLOAT_CONTROL: the bits that are modes; the others are flags of exceptions that have
 * occurred. */
#if defined(__x86_64__)
#define FAN__FLOAT_CONTROL 0xffc0u
#define FAN_FLOAT_MODE_DEFAULT 0x1f80u
#define FAN_FLOAT_MODE_UPWARD 0x5f80u
#elif defined(__aarch64__)
#define FAN__FLOAT_CONTROL UINT64_MAX
#define FAN_FLOAT_MODE_DEFAULT 0u
#define FAN_FLOAT_MODE_UPWARD 0x400000u
#else
#define FAN__FLOAT_CONTROL UINT64_MAX
#define FAN_FLOAT_MODE_DEFAULT ((fan_float_mode)FE_TONEAREST)
#define FAN_FLOAT_MODE_UPWARD ((fan_float_mode)FE_UPWARD)
#endif

/* fan_float_mode_get: returns the modes of this thread. */
static inline fan_float_mode fan_float_mode_get(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return (fan_float_mode)fegetround();
#endif
}

/* fan_float_mode_set: sets the modes of this thread. The compiler moves no access to memory across
 * it; arithmetic in registers it may move (FAN_FLOAT_BARRIER). */
static inline void fan_float_mode_set(fan_float_mode mode)
{
    __asm__ volatile("" ::: "memory");
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)fesetround((int)mode);
#endif
    __asm__ volatile("" ::: "memory");
}

/* fan__float_is_default: returns whether a thread with these modes needs no change. */
static inline int fan__float_is_default(fan_float_mode mode)
{
    return (mode & FAN__FLOAT_CONTROL) == FAN_FLOAT_MODE_DEFAULT;
}

/* fan_float_mode_begin: gives this thread the default modes. Returns those that it had, for
 * fan_float_mode_end. */
static inline fan_float_mode fan_float_mode_begin(void)
{
    fan_float_mode before = fan_float_mode_get();
    if (!fan__float_is_default(before) && !FAN_FAULT(FLOAT_MODE_OF_CALLER))
        fan_float_mode_set(FAN_FLOAT_MODE_DEFAULT);
    return before;
}

/* fan_float_mode_end: gives this thread back the modes that it had at fan_float_mode_begin. */
static inline void fan_float_mode_end(const fan_float_mode *before)
{
    if (!fan__float_is_default(*before))
        fan_float_mode_set(*before);
}

/* FAN_DEFAULT_FLOAT_MODE: the rest of the block runs in the default modes; each way out of it
 * restores those before. It costs a read of a register where a thread has the default modes
 * already. */
#define FAN_DEFAULT_FLOAT_MODE                                                                    \
    const fan_float_mode fan__float_before __attribute__((unused, cleanup(fan_float_mode_end))) = \
        fan_float_mode_begin()

/* FAN_FLOAT_BARRIER: computes `number`, a variable, before what follows, and nothing from it
 * earlier. A block in the default modes needs it for what comes in or leaves other than through
 * memory: an integer argument that it converts, and a number that it returns. Compilers take
 * arithmetic for independent of the modes: clang computes the root of a returned number after the
 * block. */
#define FAN_FLOAT_BARRIER(number) __asm__ volatile("" : "+m"(number) : : "memory")

#endif
