/* cpu_kernel: kernels that are Python callables, on the CPU (device/cpu/recording.h). */
#ifndef FAN_PY_CPU_KERNEL_H
#define FAN_PY_CPU_KERNEL_H

#include "py/base/py.h"

#include "device/cpu/recording.h"

/* A call is a tuple: the callable, its name, None or the names of keyword arguments, the arguments. */
#define FAN_CALL_ARGS 3

/* fan_call_new: the call fn(*reads, *writes); `argument` converts each (i: its index among reads or writes). New
 * reference, or NULL with an exception. */
typedef PyObject *(*fan_call_argument)(void *ctx, PyObject *name, PyObject *x, bool write, Py_ssize_t i);
PyObject *fan_call_new(PyObject *fn, PyObject *name, PyObject *const lists[2], fan_call_argument argument, void *ctx);
/* fan_call_run: with the interpreter's lock. FAN_ERR_EXTERN, also if the callable keeps an argument. */
fan_status fan_call_run(void *call, fan_error *err);
/* fan_call_record: adds the call to a recording; its first `reads` arguments are read, the others written. how: its
 * run, drop and ctx, which is taken also on failure. */
fan_status fan_call_record(fan_recording *r, PyObject *call, Py_ssize_t reads, fan_cpu_call how, fan_error *err);
/* Title: Inner loops. A NumPy ufunc on arrays of one layout ends in one call of a C function, which a replay calls
 * directly, without the interpreter. If NumPy does more (casts, broadcasts, skips gaps, calls the loop more than once),
 * the replay calls the ufunc. A direct loop does not warn of overflow or invalid values.
 * fan_call_loop: how->run, drop and ctx of the direct loop; false, without an exception: there is none. */
bool fan_call_loop(PyObject *call, fan_cpu_call *how);
#endif
