/* dlpack_export: arrays of ours for other libraries. A host array goes out through an exporter, an object with
 * __dlpack__ and __dlpack_device__; an array on a device offers itself. */
#ifndef FAN_PY_DLPACK_EXPORT_H
#define FAN_PY_DLPACK_EXPORT_H

#include "py/arrays/dlpack.h"

/* fan_dlpack_send: an array as a tensor that holds it, without a capsule and without the interpreter. FAN_ERR_NOMEM,
 * FAN_ERR_BUFFER. */
fan_status fan_dlpack_send(fan_array *a, fan_dl_device at, fan_dl_versioned **out, fan_error *err);
/* fan_dlpack_capsule: a capsule over a tensor that it takes over, unless NULL comes back. */
PyObject *fan_dlpack_capsule(fan_dl_versioned *managed);

/* fan_dlpack_export: __dlpack__ of an array on a device with streams. Whatever stream the consumer names waits for all
 * that used the memory, and is marked. */
PyObject *fan_dlpack_export(fan_array *a, fan_device *d, PyObject *const *values);
PyObject *fan_dlpack_device(const fan_device *d);
/* fan_interface_export: __cuda_array_interface__ of it: a dict; AttributeError where it cannot have one. */
PyObject *fan_interface_export(fan_array *a, fan_device *d);

/* fan_exporter_new: an object that offers `a` (a host array; a hold of its own) by __dlpack__. */
PyObject *fan_exporter_new(fan_array *a);

#endif
