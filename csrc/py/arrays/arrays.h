/* arrays: gradients as Python objects come in and go out. The functions of this folder that the
 * folders above call, by file. */
#ifndef FAN_PY_ARRAYS_H
#define FAN_PY_ARRAYS_H

#include "py/base/handles.h"

/* The kind of object that a gradient was (fan_value.origin). */
typedef enum fan_origin {
    FAN_FROM_CORE,
    FAN_FROM_NDARRAY,
    FAN_FROM_NUMPY_SCALAR,
    FAN_FROM_PYTHON_SCALAR,
    FAN_FROM_DEVICE_ARRAY,
    FAN_FROM_FANIN_SPARSE,
    FAN_FROM_ZERO,
    FAN_FROM_OBJECT,
    /* and above: the index of a kind that _interop.arrays registered: torch, jax, scipy classes */
    FAN_FROM_FOREIGN
} fan_origin;
/* fan_is_no_gradient: whether an object means that there is no gradient: None, or JAX's float0, the
 * type of cotangents of integers. */
bool fan_is_no_gradient(PyObject *o);
/* fan_import: makes a value of any gradient, None too; the caller owns its holds. `recording`: A1,
 * every gradient is an object. `has_combine`: containers are objects. -1 with an exception. */
int fan_import(PyObject *o, bool recording, bool has_combine, fan_value *out);

/* ---- import_plain.c: plain contributions (buffer/plain.h); all inside the interpreter ---- */

/* fan_plain_import_as: reads the kind and the address of a plain contribution; with `gaps`, also of
 * an array that has gaps along one axis, for a buffer's list alone. Runs no Python code.
 *   true: they are read
 *   false: it is no plain contribution; there is no exception */
bool fan_plain_import_as(PyObject *o, bool gaps, fan_plain_kind *kind, char **data);
/* fan_plain_import: the same, without gaps. */
static inline bool fan_plain_import(PyObject *o, fan_plain_kind *kind, char **data)
{
    return fan_plain_import_as(o, false, kind, data);
}
/* fan_plain_is_unchanged: whether one has the memory, dtype and shape that it had when it came. */
bool fan_plain_is_unchanged(void *o, const fan_plain_kind *kind, const char *data);
/* fan_plain_has_own_value: of one whose kind is checked at use: whether its memory holds its
 * value. */
bool fan_plain_has_own_value(void *o);
/* fan_plain_is_detached: of such a one: whether it requires no gradient of its own. */
bool fan_plain_is_detached(void *o);
/* fan_plain_writable: whether its memory may be written. */
bool fan_plain_writable(void *o, const fan_plain_kind *kind);
/* fan_plain_fresh: allocates an array of the library of `first`, to write a sum into, and returns
 * the address of its first element in *data. NULL with an exception; NULL without one if it is no
 * plain one. */
void *fan_plain_fresh(void *first, const fan_plain_kind *kind, char **data);
/* fan_number_read: reads a Python number (FAN_IS_NUMBER). Returns false for an int that 64 bits do
 * not hold. */
bool fan_number_read(PyObject *o, fan_plain_kind *kind, char **data);
/* fan_plain_number: the number of a kind (fan_plain_kind.scalar) whose value is at `value`; new
 * reference. */
void *fan_plain_number(const fan_plain_kind *kind, const char *value);
/* fan_plain_copy: allocates one with the same elements, and returns their address in *data. NULL,
 * without an exception, if that needs the general path. */
void *fan_plain_copy(void *o, const fan_plain_kind *kind, char **data);
/* fan_owner_has: whether the bytes [lo, hi) lie in the memory that the owner of a view has now:
 * `ndarray.resize(refcheck=False)` may have moved or cut it. True where the owner cannot be
 * read. */
bool fan_owner_has(PyObject *view, const char *lo, const char *hi);

/* ---- import.c, export.c, library.c ---- */

/* fan_value_is_unchanged: the frontend's is_unchanged. */
bool fan_value_is_unchanged(const fan_value *v);
/* fan_library_stream: writes a hold on the current stream of the library that owns a gradient on a
 * CUDA device, as S4 requires, to *out. `last`: the stream that was read before in the same call,
 * often the same, or NULL.
 *
 *   0    *out has the hold; or is NULL: the library has no stream, or the caller made one current
 *   -1   with an exception */
int fan_library_stream(const fan_value *v, fan_stream *last, fan_stream **out);
/* fan_view_ndarray: the memory of an ndarray of this dtype, with a hold on the array: 0, or -1 with
 * an exception. Its storage has a reference of its own, and outlives the value. */
int fan_view_ndarray(PyArrayObject *a, fan_dtype dtype, bool writable, fan_array **out);
/* fan_dims_tuple: reads a tuple of ints that fanin itself made or checked, and returns its length;
 * -1 with an exception, whose message begins with `what`. */
int fan_dims_tuple(const char *what, PyObject *o, int64_t *dims);
/* fan_shape_tuple: as fan_dims_tuple, for a shape. */
static inline int fan_shape_tuple(PyObject *o, int64_t *shape)
{
    return fan_dims_tuple("a shape", o, shape);
}
static inline PyObject *fan_py_bool(bool value) /* borrowed */
{
    return value ? Py_True : Py_False;
}
/* fan_import_object: makes a value of the result of a combine or an operator: an object, of
 * whatever type. */
int fan_import_object(PyObject *o, fan_value *out);
/* fan_import_out: a writable array to write a sum into (out=). BufferError if it cannot be
 * written. */
int fan_import_out(PyObject *o, fan_value *out);
/* fan_export: makes the Python object of a value: its own object, or an array of the value's
 * origin. New reference; takes the value's holds, on failure, too. */
PyObject *fan_export(fan_value *v);

/* ---- ndarray.c ---- */

#define FAN_ARRAY_CAPSULE "fanin.array" /* the base of an exported ndarray: has the array */
/* fan_export_array: a host array as an ndarray over the same memory, or as a handle
 * (fan_wants_handles); takes a hold of its own. */
PyObject *fan_export_array(fan_array *a);
/* fan_ndarray_over: an ndarray in any case, over memory that `base` keeps. */
PyObject *fan_ndarray_over(const fan_array *a, bool write, PyObject *base);
/* fan_ndarray_extent: the bytes that an ndarray shows. */
void fan_ndarray_extent(PyObject *o, const char **lo, size_t *bytes);
/* fan_ndarray_check_known: 0, or -1 with CaptureError where a function of a graph tree on the CPU
 * is warmed up or recorded on this thread, and an ndarray that it uses is neither memory of the
 * tree nor of an operand that stays where it is: a recording could not find it again. `op`: the
 * operation that uses it. */
int fan_ndarray_check_known(PyObject *o, const char *op);
/* fan_ndarray_lock: NumPy alone may not write into a writable ndarray, until it is unlocked as
 * often. Out of memory nothing changes. */
void fan_ndarray_lock(PyArrayObject *a, bool locks);
/* fan_ndarray_may_write: whether it is writable, or a locked array, or a view of one. */
bool fan_ndarray_may_write(PyArrayObject *a);
/* the capsule under the views that a kernel is called with */
#define FAN_KERNEL_MEMORY "fanin.storage"

/* ---- import.c, frontend.c, library.c: the references of an object; the frontend ---- */

/* fan_visit_behind: for tp_traverse of an object that holds o, as the value v (NULL: with one
 * reference). The collector skips ndarrays, so this visits the base of one without other
 * references. */
int fan_visit_behind(PyObject *o, const fan_value *v, visitproc visit, void *arg);
/* fan_alone: whether an object has just these references, so that its memory is freed with them. A
 * view of an ndarray without other references counts, too. */
bool fan_alone(PyObject *o, Py_ssize_t refs);
/* fan_only_ours: an ndarray that owns its memory and has just these references: no view, no buffer
 * of another and no weak reference leads to it, and no other code can make one. */
bool fan_only_ours(PyObject *o, Py_ssize_t refs);
/* fan_fresh: an array allocated by the library of an origin (value.h: fresh). */
fan_status fan_fresh(uint8_t origin, fan_device *d, fan_stream *on, fan_dtype dtype, int ndim,
                     const int64_t *shape, const fan_array *like, fan_array **out, fan_error *err);
extern const fan_frontend fan_python; /* the frontend of every buffer made from Python */

/* ---- objects.c ---- */

/* fan_object_hold: takes a reference of the core's, on any thread. */
void fan_object_hold(void *object);
/* fan_object_drop: drops such a reference, on any thread. */
void fan_object_drop(void *object);
/* fan_object_hold_here: as fan_object_hold, on a thread that has the interpreter. */
void fan_object_hold_here(void *object);
/* fan_object_drop_here: as fan_object_drop, on a thread that has the interpreter. */
void fan_object_drop_here(void *object);
/* fan_release_object: releases a host storage whose ctx is such a reference. */
void fan_release_object(fan_storage *s);
/* fan_value_release: drops all that a value holds; the live exception stays. */
void fan_value_release(fan_value *v);
/* fan_value_set_dense: makes `out`, which has its array, the value of `object`, of which it takes a
 * reference; `device` is that of the array. */
void fan_value_set_dense(fan_value *out, fan_origin origin, fan_device *device, PyObject *object);
/* fan_arrays_call: calls a function of the module _interop.arrays with a tuple, as Py_BuildValue
 * formats it; new reference; NULL with an exception. */
PyObject *fan_arrays_call(const char *name, const char *format, ...);
/* fan_result_is: takes the reference to a result and compares it with a constant; false, without an
 * exception: it is another, or NULL after an exception. */
bool fan_result_is(PyObject *result, const PyObject *constant);

#endif
