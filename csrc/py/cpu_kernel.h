/* cpu_kernel: kernels of Python's on the CPU (device/cpu/recording.h). */
#ifndef FAN_PY_CPU_KERNEL_H
#define FAN_PY_CPU_KERNEL_H

#include "py/py.h"

#include "device/cpu/recording.h"

/* A call is a tuple: the callable, its name, None or the names of keyword arguments, the arguments. */
#define FAN_CALL_ARGS 3

/* fan_call_new: the call fn(*reads, *writes) with what `argument` makes of each: a new reference, or NULL with an
 * exception; i: its index among reads, or among writes. */
typedef PyObject *(*fan_call_argument)(void *ctx, PyObject *name, PyObject *x, bool write, Py_ssize_t i);
PyObject *fan_call_new(PyObject *fn, PyObject *name, PyObject *const lists[2], fan_call_argument argument, void *ctx);
/* fan_call_run: makes the call, with the interpreter's lock. FAN_ERR_EXTERN; also where the callable keeps an argument.
 */
fan_status fan_call_run(void *call, fan_error *err);
/* fan_call_record: puts the call, whose first `reads` arguments are read, into a recording; how: its run, drop and ctx,
 * which is taken, also where it fails. */
fan_status fan_call_record(fan_recording *r, PyObject *call, Py_ssize_t reads, fan_cpu_call how, fan_error *err);
/* fan_kernel_running: the name of the kernel of tape.compiled that this thread runs, borrowed; NULL: none. */
PyObject *fan_kernel_running(void);
/* Title: Inner loops. A call of a ufunc of NumPy's on arrays of one layout ends in one call of a C function over them:
 * that is what a replay does, without the interpreter. Where NumPy would do more (cast, broadcast, walk through gaps,
 * call the loop more than once), it is asked to. What such a loop says of floats (overflow, invalid) is not warned of.
 * fan_call_loop: how->run, drop and ctx of such a call; false, without an exception: it has to be made as it is. */
bool fan_call_loop(PyObject *call, fan_cpu_call *how);
#endif
