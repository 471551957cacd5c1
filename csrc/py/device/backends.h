/* backends: the registry of device backends. A new backend is its folder and one line of
 * FAN_BACKENDS: all other code finds devices, streams, and the exchange with other libraries
 * through the entries of its table (device/backend.h). A copy of the tree may lack device/sim, a
 * part (docs/design.md): then the registry is without it. */
#ifndef FAN_PY_BACKENDS_H
#define FAN_PY_BACKENDS_H

#include "py/base/py.h"

#define FAN_BACKENDS(X) \
    X(cpu)              \
    X(cuda)             \
    X(sim)

/* fan_device_arg: "cpu", "sim:0" (innermost machine entered on this thread); None: NULL. A hold in
 * *out. */
int fan_device_arg(PyObject *o, fan_device **out);
/* fan_backend_of_dlpack: the backend whose devices read memory of a DLPack device type; NULL: none
 * does. */
const fan_backend_entry *fan_backend_of_dlpack(long type);
/* fan_backend_named: the backend of this name; NULL: there is none. */
const fan_backend_entry *fan_backend_named(const char *name);
/* fan_backend_device: device `index` of a backend; a hold in *out. Releases the GIL. Returns -1
 * with an exception. */
int fan_backend_device(const fan_backend_entry *b, long index, fan_device **out);
/* fan_backend_stream: the stream of d with a handle; a hold, or NULL with an exception. */
fan_stream *fan_backend_stream(fan_device *d, uint64_t handle);
/* fan_backends_keep: calls the entry `keep` of all backends. Call it without the GIL. */
void fan_backends_keep(size_t bytes);
/* fan_backends_trim: calls the entry `trim` of all backends; returns the sum. Call it without the
 * GIL. */
size_t fan_backends_trim(void);
/* fan_backends_entered: a tuple of what this thread has entered of each backend
 * (fan_backend_scope); NULL with an exception. */
PyObject *fan_backends_entered(void);
/* fan_backends_enter: enters the same on a thread that works for it. */
void fan_backends_enter(PyObject *entered);
/* fan_backends_leave: undoes fan_backends_enter. */
void fan_backends_leave(PyObject *entered);
/* fan_is_shared: whether other libraries can use memory of d, and have streams of their own on
 * it. */
static inline bool fan_is_shared(const fan_device *d)
{
    return d->backend->has_streams && d->backend->dlpack[0];
}

#endif
