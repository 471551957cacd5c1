/* convert: runs of elements from one dtype to another; and types for reading foreign memory.
 *
 * Every dtype converts to every other: exactly if possible, else rounded once to nearest even (D9);
 * integers wrap; any nonzero byte is true. Conversions that D6 forbids are never requested, but
 * defined: complex to real drops the imaginary part, float to integer truncates and saturates at
 * the ends of int64 (uint64 for uint64), NaN gives 0. */
#ifndef FAN_ARRAY_CONVERT_H
#define FAN_ARRAY_CONVERT_H

#include "array/dtype.h"
#include "base/status.h"

#include <stdint.h>

/* Element types for any address and memory of any type. A load through them compiles to the same as
 * memcpy to a local. */
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

/* FAN_VECTOR: the next loop may be vectorized although its pointers may be equal: element i is
 * written from elements i alone. */
#if defined(__clang__)
#define FAN_VECTOR _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FAN_VECTOR _Pragma("GCC ivdep")
#else
#define FAN_VECTOR
#endif

/* fan_convert: converts n elements, `step` bytes apart, from src to dst, which must not overlap. */
void fan_convert(char *dst, fan_dtype to, int64_t dst_step, const char *src, fan_dtype from,
                 int64_t src_step, int64_t n);
/* fan_convert_dense: as fan_convert, without gaps on either side. */
void fan_convert_dense(char *dst, fan_dtype to, const char *src, fan_dtype from, int64_t n);

#endif
