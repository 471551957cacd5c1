/* dlpack_export: arrays of ours for other libraries. A host array goes out through an exporter, an object with
 * __dlpack__ and __dlpack_device__; an array on a device offers itself. */
#ifndef FAN_PY_DLPACK_EXPORT_H
#define FAN_PY_DLPACK_EXPORT_H

#include "py/dlpack.h"

/* The arguments of __dlpack__. */
typedef struct fan_dl_request {
    PyObject *stream;
    long major, type, id;
    int copy; /* -1: not given */
} fan_dl_request;

/* fan_dl_request_parse: reads the arguments of __dlpack__, in the order of core.pyi. -1 with an exception. */
int fan_dl_request_parse(PyObject *const *values, fan_dl_request *q);
/* fan_dl_request_decide: a view goes out as itself unless a copy was requested or a capsule cannot describe it; -1
 * with BufferError where a copy is not wanted. */
int fan_dl_request_decide(const fan_array *a, fan_dl_request *q);
/* fan_dlpack_offer: a capsule over the memory of `a`, which it holds. */
PyObject *fan_dlpack_offer(fan_array *a, fan_dl_device at, bool versioned, bool copied);
/* fan_dlpack_send: the tensor without a capsule, and without the interpreter. FAN_ERR_NOMEM, FAN_ERR_BUFFER. */
fan_status fan_dlpack_send(fan_array *a, fan_dl_device at, fan_dl_versioned **out, fan_error *err);
/* fan_dlpack_capsule: a capsule over a tensor that it takes over, unless NULL comes back. */
PyObject *fan_dlpack_capsule(fan_dl_versioned *managed);

/* ---- dlpack_device.c ---- */

/* fan_dlpack_export: __dlpack__ of an array on a device with streams. Whatever stream the consumer names waits for all
 * that used the memory, and is marked. */
PyObject *fan_dlpack_export(fan_array *a, fan_device *d, PyObject *const *values);
PyObject *fan_dlpack_device(const fan_device *d);
/* fan_interface_export: __cuda_array_interface__ of it: a dict; AttributeError where it cannot have one. */
PyObject *fan_interface_export(fan_array *a, fan_device *d);

/* ---- exporter.c ---- */

/* fan_exporter_new: an object that offers `a` (a host array; a hold of its own) by __dlpack__. */
PyObject *fan_exporter_new(fan_array *a);

#endif
