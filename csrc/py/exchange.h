/* exchange: what the files of the way in and out share (import*, export, library). */
#ifndef FAN_PY_EXCHANGE_H
#define FAN_PY_EXCHANGE_H

#include "py/dlpack.h"

/* D15, D5: the sum is of the kind of the first contribution of the lowest rank. */
enum { RANK_ARRAY, RANK_NUMPY_SCALAR, RANK_PYTHON_SCALAR };
/* fan_import_ndarray: an ndarray's memory as that of `object`. fan_is_not_summed: an ndarray of a dtype that we do not
 * sum? A slot with combine= takes it as an object. fan_shape_tuple: a tuple of ints that fanin itself made or checked;
 * its length, -1 with an exception. */
int fan_import_ndarray(PyArrayObject *a, PyObject *object, fan_origin origin, bool writable, fan_value *out);
bool fan_is_not_summed(PyObject *o);
int fan_shape_tuple(PyObject *o, int64_t *shape);
/* fan_import_dense, _sparse: what describe said of one. */
int fan_import_dense(PyObject *d, fan_value *out);
int fan_import_sparse(PyObject *d, fan_value *out);

/* ---- library.c ---- */

#define FAN_ASKS_VALUE 256 /* beside a type's origin: what its table does not tell is asked of the array (torch) */
/* fan_import_by_table: an array of a CUDA device by its library's exchange table: nothing waits for anything. 1: it is
 * imported; 0: not by this way, and nothing is said; -1 with an exception. */
int fan_import_by_table(PyObject *o, fan_value *out);
/* fan_release_library_array: of the storage of an array that a library allocated for a sum. fan_is_dense_like: whether
 * a library's tensor is a gap-free one as it was asked for. */
void fan_release_library_array(void *ctx);
bool fan_is_dense_like(const fan_dl_tensor *t, const fan_device *d, fan_dtype dtype, int ndim, const int64_t *shape,
                       const int64_t *strides);
/* fan_leaves: an object of a library's leaves us: its allocator, or a second hold on its memory, is told of all the
 * streams that used it (Lifetime). What fails here is shown by sys.unraisablehook: the object must not be lost. */
void fan_leaves(PyObject *object, const fan_value *v);
PyObject *fan_hold_for(PyObject *module, PyObject *args);

#endif
