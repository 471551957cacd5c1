/* import_memory: whose memory a gradient's is: ndarrays, and what fanin._interop.arrays.describe names: as values.
 *
 * An array's storage holds the object whose memory it is, and the value holds it as well: so a view outlives the value,
 * and an ndarray without other references counts two (see unshared in frontend.c).
 */
#ifndef FAN_PY_IMPORT_MEMORY_H
#define FAN_PY_IMPORT_MEMORY_H

#include "py/py.h"

/* D15, D5: the sum is of the kind of the first contribution of the lowest rank. */
enum { RANK_ARRAY, RANK_NUMPY_SCALAR, RANK_PYTHON_SCALAR };
/* fan_import_ndarray: an ndarray's memory as that of `object`. fan_is_not_summed: an ndarray of a dtype that we do not
 * sum? A slot with combine= takes it as an object. fan_shape_tuple: a tuple of ints that fanin itself made or checked;
 * its length, -1 with an exception. */
/* fan_view_ndarray: its memory, with a hold on the array; its dtype has been looked at: 0, or -1 with an exception. */
int fan_view_ndarray(PyArrayObject *a, fan_dtype dtype, bool writable, fan_array **out);
int fan_import_ndarray(PyArrayObject *a, PyObject *object, fan_origin origin, bool writable, fan_value *out);
bool fan_is_not_summed(PyObject *o);
bool fan_tensor_has(PyObject *o, const fan_array *a); /* whether a torch tensor's memory is the array's */
int fan_shape_tuple(PyObject *o, int64_t *shape);
/* fan_import_dense, _sparse: from the record of one. */
int fan_import_dense(PyObject *d, fan_value *out);
int fan_import_sparse(PyObject *d, fan_value *out);

#endif
