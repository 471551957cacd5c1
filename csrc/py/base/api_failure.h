/* api_failure: the core's errors for callers of the C API, and the structs that these fill in. */
#ifndef FAN_PY_API_FAILURE_H
#define FAN_PY_API_FAILURE_H

#include "base/status.h"

#include <fanin.h>

/* fan_api_table: the function table (py/api/table/table.c); py/module alone uses it. */
extern const fanin_api fan_api_table;

/* fan_api_status: returns the status of fanin.h for a status of the core. */
fanin_status fan_api_status(fan_status s);
/* fan_api_fail: returns the status of fanin.h, and writes the error to *why (may be NULL). */
fanin_status fan_api_fail(fanin_failure *why, fan_status s, const fan_error *err);
/* fan_api_core_status: returns the status of the core; FAN_ERR_EXTERN of a number that is none. */
fan_status fan_api_core_status(fanin_status s);

/* fan_api_options: reads a struct of the caller's that begins with its size into `out` of `size`
 * bytes, zeroed beyond; `given` NULL: all zero. `least`: its size in the version that had it first.
 * FAN_ERR_VALUE. */
fan_status fan_api_options(const void *given, size_t least, size_t size, const char *what,
                           void *out, fan_error *err);
/* fan_api_flags: FAN_ERR_VALUE of flags that are not known. */
fan_status fan_api_flags(uint32_t flags, uint32_t known, const char *what, fan_error *err);
/* fan_api_reserved: FAN_ERR_VALUE of a reserved field that is not 0. */
fan_status fan_api_reserved(uint32_t reserved, const char *what, fan_error *err);

#endif
