/* convert: runs of elements from one dtype to another; and the types through which memory of others is read.
 *
 * Any dtype becomes any: exactly where it can, else rounded once to nearest even (D9); integers wrap; any nonzero byte
 * is true. What D6 forbids is never asked for, and is defined all the same: complex into real drops the imaginary part,
 * float into integer truncates and stops at the ends of int64 (uint64 for uint64), NaN gives 0.
 */
#ifndef FAN_ARRAY_CONVERT_H
#define FAN_ARRAY_CONVERT_H

#include "array/dtype.h"

#include <stdint.h>

/* Element types that may lie at any address and over memory of any type. A load through them is what memcpy into a
 * local would be. */
#define FAN_ANYWHERE __attribute__((may_alias, aligned(1)))
typedef uint8_t FAN_ANYWHERE fan_any_u8;
typedef uint16_t FAN_ANYWHERE fan_any_u16;
typedef uint32_t FAN_ANYWHERE fan_any_u32;
typedef uint64_t FAN_ANYWHERE fan_any_u64;
typedef int8_t FAN_ANYWHERE fan_any_i8;
typedef int16_t FAN_ANYWHERE fan_any_i16;
typedef int32_t FAN_ANYWHERE fan_any_i32;
typedef int64_t FAN_ANYWHERE fan_any_i64;
typedef float FAN_ANYWHERE fan_any_f32;
typedef double FAN_ANYWHERE fan_any_f64;

/* Large buffers on the stack: not cleared first where the compiler would (-ftrivial-auto-var-init). */
#if defined(__has_attribute)
#if __has_attribute(uninitialized)
#define FAN_UNCLEARED __attribute__((uninitialized))
#endif
#endif
#ifndef FAN_UNCLEARED
#define FAN_UNCLEARED
#endif

/* FAN_VECTOR: the loop that follows may be made a vector loop although its pointers may be equal: element i is written
 * from elements i alone. */
#if defined(__clang__)
#define FAN_VECTOR _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FAN_VECTOR _Pragma("GCC ivdep")
#else
#define FAN_VECTOR
#endif

/* fan_convert: n elements, `step` bytes apart, from src into dst. They do not overlap. */
void fan_convert(char *dst, fan_dtype to, int64_t dst_step, const char *src, fan_dtype from, int64_t src_step,
                 int64_t n);

#endif
