/* library: C calls to and from libraries that own arrays on CUDA devices: exchange tables, current streams,
 * allocators, and the streams that used what leaves us. */
#ifndef FAN_PY_LIBRARY_H
#define FAN_PY_LIBRARY_H

#include "py/arrays/dlpack.h"

#define FAN_ASKS_VALUE 256 /* beside a type's origin: what its table lacks is read of the array (torch) */
/* fan_import_by_table: an array of a CUDA device, or a torch tensor on the CPU, by its library's exchange table:
 * nothing waits for anything. 1: it is imported; 0: not by this way, without an exception; -1 with an exception. */
int fan_import_by_table(PyObject *o, fan_value *out);
bool fan_tensor_has(PyObject *o, const fan_array *a); /* whether a torch tensor's memory is the array's */
/* fan_release_library_array: of the storage of an array that a library allocated for a sum. fan_is_dense_like: whether
 * a library's tensor is gap-free and as requested. */
void fan_release_library_array(void *ctx);
bool fan_is_dense_like(const fan_dl_tensor *t, const fan_device *d, fan_dtype dtype, int ndim, const int64_t *shape,
                       const int64_t *strides);
/* fan_leaves: an object of a library's leaves us: reports to its allocator, or to a second hold on its memory, all the
 * streams that used it (Lifetime). What fails here is shown by sys.unraisablehook: the object must not be lost. */
void fan_leaves(PyObject *object, const fan_value *v);
PyObject *fan_hold_for(PyObject *owner, PyObject *streams);

#endif
