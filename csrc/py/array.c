/* array: fanin.sim.Array, an array on a device. Geometry is read freely; values only by numpy(), or by work on a
 * stream. */
#include "py/dlpack.h"
#include "py/machine.h"
#include "py/turn.h"

#include <string.h>
#include <structmember.h>

typedef struct array_object {
    PyObject_HEAD fan_array *a; /* held; never NULL */
    fan_device *d;              /* held; never NULL */
    PyObject *weakrefs;
} array_object;

static array_object *self_of(PyObject *o) { return (array_object *)o; }

PyObject *fan_array_wrap(fan_array *a, fan_device *d)
{
    PyTypeObject *type = fan_state_get()->array_type;
    array_object *self = (array_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->a = fan_array_hold(a);
    self->d = fan_device_hold(d);
    return (PyObject *)self;
}

fan_array *fan_array_arg(PyObject *o, fan_device **d)
{
    if (Py_TYPE(o) != fan_state_get()->array_type)
        return NULL;
    if (d)
        *d = self_of(o)->d;
    return self_of(o)->a;
}

static PyObject *array_new(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_SetString(PyExc_TypeError, "arrays on a simulated device are made by Machine.array(ndarray, device=0) and "
                                     "Machine.empty(shape, dtype, device=0)");
    return NULL;
}

static void array_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    array_object *self = self_of(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    /* The memory may go with its last hold: the device is told, and may hand the turn to another host thread. */
    Py_BEGIN_ALLOW_THREADS fan_array_drop(self->a);
    fan_device_drop(self->d);
    Py_END_ALLOW_THREADS type->tp_free(o);
    Py_DECREF(type);
}

/* Views: `view` takes nothing and gives a new object on the same memory. */

static PyObject *wrap_taken(fan_array *a, fan_device *d)
{
    PyObject *made = fan_array_wrap(a, d);
    fan_array_drop(a);
    return made;
}

static PyObject *view(array_object *self, char *data, int ndim, const int64_t *shape, const int64_t *strides)
{
    fan_array *made = NULL;
    fan_error err = {0};
    fan_status status =
        fan_array_view(self->a->storage, data, self->a->dtype, ndim, shape, strides, self->a->writable, &made, &err);
    return status == FAN_OK ? wrap_taken(made, self->d) : fan_raise(status, &err);
}

PyObject *fan_ints(int n, const int64_t *items)
{
    PyObject *t = PyTuple_New(n);
    for (int i = 0; t && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(items[i]);
        if (!item)
            Py_CLEAR(t);
        else
            PyTuple_SET_ITEM(t, i, item);
    }
    return t;
}

/* int_of: an integer index; -1 with an exception, of class `large` where it is no int64. bool is refused: True as an
 * index is a mistake. */
static int int_of(PyObject *o, PyObject *large, int64_t *out)
{
    Py_ssize_t n;
    if (!PyIndex_Check(o) || PyBool_Check(o)) {
        PyErr_Format(PyExc_TypeError, "expected an integer, got %.80s", Py_TYPE(o)->tp_name);
        return -1;
    }
    n = PyNumber_AsSsize_t(o, large);
    *out = n;
    return n == -1 && PyErr_Occurred() ? -1 : 0;
}

/* ints_of: integers from a sequence, or one bare integer; their number, -1 with an exception. */
static int ints_of(PyObject *o, int64_t *out)
{
    PyObject *items;
    Py_ssize_t n;
    if (PyIndex_Check(o))
        return int_of(o, PyExc_ValueError, out) < 0 ? -1 : 1;
    if (!(items = PySequence_Tuple(o))) { /* a tuple: an __index__ cannot change it under our hands */
        if (PyErr_ExceptionMatches(PyExc_TypeError))
            PyErr_Format(PyExc_TypeError, "expected an integer or a sequence of integers, got %.80s",
                         Py_TYPE(o)->tp_name);
        return -1;
    }
    n = PyTuple_GET_SIZE(items);
    if (n > FAN_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "at most %d dimensions are supported, not %zd", FAN_MAX_NDIM, n);
        n = -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (int_of(PyTuple_GET_ITEM(items, i), PyExc_ValueError, out + i) < 0)
            n = -1;
    Py_DECREF(items);
    return (int)n;
}

int fan_shape_arg(PyObject *o, int64_t *shape) { return ints_of(o, shape); }

static PyObject *array_getitem(PyObject *o, PyObject *key)
{
    array_object *self = self_of(o);
    fan_array *a = self->a;
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    PyObject *alone = key;
    bool many = PyTuple_Check(key);
    Py_ssize_t n = many ? PyTuple_GET_SIZE(key) : 1, used = 0, dots = 0;
    char *data = a->data;
    int ndim = 0, axis = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *k = many ? PyTuple_GET_ITEM(key, i) : alone;
        dots += k == Py_Ellipsis;
        used += k != Py_Ellipsis && k != Py_None;
    }
    if (dots > 1)
        return PyErr_Format(PyExc_IndexError, "an index can have one ellipsis (...) only, not %zd", dots);
    if (used > a->ndim)
        return PyErr_Format(PyExc_IndexError, "too many indices: %zd for an array of %d dimensions", used, a->ndim);
    for (Py_ssize_t i = 0; i <= n; i++) {
        PyObject *k = i == n ? NULL : many ? PyTuple_GET_ITEM(key, i) : alone;
        int whole = 0; /* axes taken as they are */
        if (k == Py_Ellipsis) {
            whole = a->ndim - (int)used;
            dots = -1;
        } else if (!k) {
            whole = dots < 0 ? 0 : a->ndim - (int)used;
        } else if (k == Py_None) {
            if (ndim == FAN_MAX_NDIM)
                return PyErr_Format(PyExc_IndexError, "at most %d dimensions are supported", FAN_MAX_NDIM);
            shape[ndim] = 1;
            strides[ndim++] = 0;
        } else if (PySlice_Check(k)) {
            Py_ssize_t start, stop, step, length;
            if (PySlice_Unpack(k, &start, &stop, &step) < 0)
                return NULL;
            length = PySlice_AdjustIndices(a->shape[axis], &start, &stop, step);
            if (ndim == FAN_MAX_NDIM)
                return PyErr_Format(PyExc_IndexError, "at most %d dimensions are supported", FAN_MAX_NDIM);
            shape[ndim] = length;
            strides[ndim] = length > 1 ? a->strides[axis] * step : a->strides[axis];
            if (length > 0)
                data += start * a->strides[axis];
            ndim++;
            axis++;
        } else if (PyIndex_Check(k) && !PyBool_Check(k) &&
                   !(PyArray_Check(k) && PyArray_NDIM((PyArrayObject *)k) > 0)) {
            int64_t at;
            if (int_of(k, PyExc_IndexError, &at) < 0)
                return NULL;
            if (at < -a->shape[axis] || at >= a->shape[axis])
                return PyErr_Format(PyExc_IndexError, "index %lld is out of range for axis %d of length %lld",
                                    (long long)at, axis, (long long)a->shape[axis]);
            data += (at < 0 ? at + a->shape[axis] : at) * a->strides[axis];
            axis++;
        } else {
            return PyErr_Format(
                PyExc_TypeError,
                "an array on a device is indexed by integers, slices, ... and None, which give views, not by %.80s; "
                "queue a kernel with Machine.launch, or index x.numpy()",
                Py_TYPE(k)->tp_name);
        }
        for (; whole > 0; whole--, axis++) {
            if (ndim == FAN_MAX_NDIM)
                return PyErr_Format(PyExc_IndexError, "at most %d dimensions are supported", FAN_MAX_NDIM);
            shape[ndim] = a->shape[axis];
            strides[ndim++] = a->strides[axis];
        }
    }
    return view(self, data, ndim, shape, strides);
}

static Py_ssize_t array_length(PyObject *o)
{
    fan_array *a = self_of(o)->a;
    if (a->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "len() of an array of no dimensions");
        return -1;
    }
    return (Py_ssize_t)a->shape[0];
}

/* args_of: methods that take `f(2, 3)` and `f((2, 3))` alike; borrowed. */
static PyObject *args_of(PyObject *args) { return PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : args; }

static PyObject *array_transpose(PyObject *o, PyObject *args)
{
    fan_array *a = self_of(o)->a;
    int64_t axes[FAN_MAX_NDIM], shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    uint64_t seen = 0;
    PyObject *given = args_of(args);
    if (PyTuple_GET_SIZE(args) == 0 || given == Py_None) {
        for (int i = 0; i < a->ndim; i++)
            axes[i] = a->ndim - 1 - i;
    } else {
        int n = ints_of(given, axes);
        if (n < 0)
            return NULL;
        for (int i = 0; i < n && n == a->ndim; i++) {
            if (axes[i] < 0)
                axes[i] += a->ndim;
            if (axes[i] >= 0 && axes[i] < a->ndim)
                seen |= UINT64_C(1) << axes[i];
        }
        if (n != a->ndim || (n && seen != ~UINT64_C(0) >> (64 - n)))
            return PyErr_Format(PyExc_ValueError, "transpose: %R does not name each of %d axes once", given, a->ndim);
    }
    for (int i = 0; i < a->ndim; i++) {
        shape[i] = a->shape[axes[i]];
        strides[i] = a->strides[axes[i]];
    }
    return view(self_of(o), a->data, a->ndim, shape, strides);
}

/* restride: the strides of `a` seen with `shape` (as many elements), without a copy; false where there are none. Runs
 * of axes with as many elements on both sides are matched; inside a run the old axes must lie one behind the other. */
static bool restride(const fan_array *a, int ndim, const int64_t *shape, int64_t *strides)
{
    int64_t old_shape[FAN_MAX_NDIM], old_strides[FAN_MAX_NDIM];
    int n = 0, i = 0, k = 0;
    for (int d = 0; d < a->ndim; d++)
        if (a->shape[d] != 1) {
            old_shape[n] = a->shape[d];
            old_strides[n++] = a->strides[d];
        }
    while (i < n && k < ndim) {
        int64_t old = old_shape[i], new_ = shape[k];
        int i_end = i + 1, k_end = k + 1;
        while (old != new_) {
            if (new_ < old)
                new_ *= shape[k_end++];
            else
                old *= old_shape[i_end++];
        }
        for (int d = i; d + 1 < i_end; d++)
            if (old_strides[d] != old_strides[d + 1] * old_shape[d + 1])
                return false;
        strides[k_end - 1] = old_strides[i_end - 1];
        for (int d = k_end - 1; d > k; d--)
            strides[d - 1] = strides[d] * shape[d];
        i = i_end;
        k = k_end;
    }
    for (; k < ndim; k++) /* extents of 1 */
        strides[k] = (int64_t)fan_dtype_size(a->dtype);
    return true;
}

static PyObject *array_reshape(PyObject *o, PyObject *args)
{
    fan_array *a = self_of(o)->a;
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM], size = 1;
    char was[128];
    int hole = -1, n = ints_of(args_of(args), shape);
    fan_shape_text(a->ndim, a->shape, was, sizeof was);
    if (n < 0)
        return NULL;
    for (int i = 0; i < n; i++) {
        if (shape[i] == -1 && hole < 0)
            hole = i;
        else if (shape[i] < 0 || __builtin_mul_overflow(size, shape[i], &size))
            return PyErr_Format(PyExc_ValueError, "reshape: %s cannot be seen as %R", was, args_of(args));
    }
    if (hole >= 0 && size > 0 && a->size % size == 0)
        size *= shape[hole] = a->size / size;
    else if (hole >= 0)
        size = -1;
    if (size != a->size)
        return PyErr_Format(PyExc_ValueError, "reshape: %s cannot be seen as %R: it has %lld elements", was,
                            args_of(args), (long long)a->size);
    if (size == 0)
        memset(strides, 0, sizeof strides); /* the view, which checks the shape, makes its own */
    else if (!restride(a, n, shape, strides))
        return PyErr_Format(
            PyExc_ValueError,
            "reshape: %s with these strides cannot be seen as %R without a copy, and a copy is work for a stream: "
            "use Machine.empty and Machine.launch",
            was, args_of(args));
    return view(self_of(o), a->data, n, shape, strides);
}

static PyObject *array_broadcast_to(PyObject *o, PyObject *args)
{
    int64_t shape[FAN_MAX_NDIM];
    fan_array *made = NULL;
    fan_error err = {0};
    fan_status status;
    int n = ints_of(args_of(args), shape);
    if (n < 0)
        return NULL;
    status = fan_array_broadcast(self_of(o)->a, n, shape, &made, &err);
    return status == FAN_OK ? wrap_taken(made, self_of(o)->d) : fan_raise(status, &err);
}

/* Values */

static PyObject *array_numpy(PyObject *o, PyObject *Py_UNUSED(none))
{
    array_object *self = self_of(o);
    fan_array *a = self->a, *dst = NULL;
    fan_storage *st = NULL;
    npy_intp dims[FAN_MAX_NDIM];
    int64_t strides[FAN_MAX_NDIM];
    fan_error err = {0};
    fan_status status = FAN_ERR_NOMEM;
    fan_stream *s;
    PyArray_Descr *descr = fan_descr_of_dtype(a->dtype);
    PyObject *made;
    if (!descr)
        return NULL;
    for (int i = 0; i < a->ndim; i++)
        dims[i] = (npy_intp)a->shape[i];
    made = PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, dims, NULL, NULL, 0, NULL);
    if (!made)
        return NULL;
    for (int i = 0; i < a->ndim; i++)
        strides[i] = PyArray_STRIDE((PyArrayObject *)made, i);
    st = fan_storage_wrap(PyArray_DATA((PyArrayObject *)made), (size_t)PyArray_NBYTES((PyArrayObject *)made), NULL,
                          NULL);
    if (st)
        status = fan_array_view(st, PyArray_BYTES((PyArrayObject *)made), a->dtype, a->ndim, a->shape, strides, true,
                                &dst, &err);
    if (status == FAN_OK) {
        Py_BEGIN_ALLOW_THREADS s = fan_stream_current(self->d);
        status =
            s ? self->d->backend->read(s, dst, a, &err) : fan_fail(&err, FAN_ERR_NOMEM, "out of memory for a stream");
        fan_stream_drop(s);
        Py_END_ALLOW_THREADS
    }
    fan_array_drop(dst);
    fan_storage_drop(st);
    if (status != FAN_OK) {
        Py_DECREF(made);
        return fan_raise_sim(status, &err);
    }
    return made;
}

static PyObject *array_record_stream(PyObject *o, PyObject *arg)
{
    fan_stream *s = NULL;
    fan_error err = {0};
    fan_status status;
    if (fan_stream_arg(arg, &s) < 0)
        return NULL;
    if (!s)
        return PyErr_Format(PyExc_TypeError, "record_stream: expected a stream, got None");
    Py_BEGIN_ALLOW_THREADS status = fan_memory_record_stream(self_of(o)->a->storage, s, &err);
    fan_stream_drop(s);
    Py_END_ALLOW_THREADS if (status != FAN_OK) return fan_raise(status, &err);
    Py_RETURN_NONE;
}

/* To other libraries (dlpack.h) */

static PyObject *array_dlpack(PyObject *o, PyObject *args, PyObject *kwargs)
{
    return fan_dlpack_export(self_of(o)->a, self_of(o)->d, args, kwargs);
}

static PyObject *array_dlpack_device(PyObject *o, PyObject *Py_UNUSED(none))
{
    return fan_dlpack_device(self_of(o)->d);
}

static PyObject *array_interface(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_interface_export(self_of(o)->a, self_of(o)->d);
}

/* What NumPy and operators would do behind the caller's back is refused in words. */

static PyObject *advise(const char *what)
{
    return PyErr_Format(
        PyExc_TypeError,
        "%s an array on a device is work for a stream: queue it with Machine.launch, or read the values with x.numpy()",
        what);
}

static PyObject *array_dunder_array(PyObject *Py_UNUSED(o), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_SetString(PyExc_TypeError, "an array on a device is not converted to NumPy silently: x.numpy() waits for the "
                                     "device's current stream and copies");
    return NULL;
}

static PyObject *array_dunder_ufunc(PyObject *Py_UNUSED(o), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    return advise("computing with");
}

static PyObject *array_compare(PyObject *Py_UNUSED(a), PyObject *Py_UNUSED(b), int Py_UNUSED(op))
{
    return advise("comparing");
}

static Py_hash_t array_hash(PyObject *o) { return (Py_hash_t)((uintptr_t)o >> 4); }

static int array_bool(PyObject *Py_UNUSED(o))
{
    advise("testing");
    return -1;
}

static PyObject *array_reduce(PyObject *o, PyObject *Py_UNUSED(none))
{
    return PyErr_Format(PyExc_TypeError,
                        "cannot pickle or copy %R: it is memory of a device of this process; x.numpy() is its values",
                        o);
}

static PyObject *array_repr(PyObject *o)
{
    fan_array *a = self_of(o)->a;
    char shape[256], device[32];
    return PyUnicode_FromFormat("<fanin.sim.Array %s %s on %s, %llu B>",
                                fan_shape_text(a->ndim, a->shape, shape, sizeof shape), fan_dtype_name(a->dtype),
                                fan_device_text(self_of(o)->d, device, sizeof device),
                                (unsigned long long)a->size * fan_dtype_size(a->dtype));
}

static PyObject *array_item(PyObject *o, Py_ssize_t i)
{
    PyObject *index = PyLong_FromSsize_t(i), *made = index ? array_getitem(o, index) : NULL;
    Py_XDECREF(index);
    return made;
}

static PyObject *array_iter(PyObject *o) { return array_length(o) < 0 ? NULL : PySeqIter_New(o); }

static PyObject *array_shape(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_ints(self_of(o)->a->ndim, self_of(o)->a->shape);
}

static PyObject *array_strides(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_ints(self_of(o)->a->ndim, self_of(o)->a->strides);
}

static PyObject *array_dtype(PyObject *o, void *Py_UNUSED(closure))
{
    return (PyObject *)fan_descr_of_dtype(self_of(o)->a->dtype);
}

static PyObject *array_device(PyObject *o, void *Py_UNUSED(closure))
{
    char text[32];
    return PyUnicode_FromString(fan_device_text(self_of(o)->d, text, sizeof text));
}

static PyObject *array_ndim(PyObject *o, void *Py_UNUSED(closure)) { return PyLong_FromLong(self_of(o)->a->ndim); }

static PyObject *array_size(PyObject *o, void *Py_UNUSED(closure)) { return PyLong_FromLongLong(self_of(o)->a->size); }

static PyObject *array_itemsize(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(fan_dtype_size(self_of(o)->a->dtype));
}

static PyObject *array_nbytes(PyObject *o, void *Py_UNUSED(closure))
{
    fan_array *a = self_of(o)->a;
    return PyLong_FromLongLong(a->size * (int64_t)fan_dtype_size(a->dtype));
}

static PyObject *array_t(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *none = PyTuple_New(0);
    PyObject *made = none ? array_transpose(o, none) : NULL;
    Py_XDECREF(none);
    return made;
}

static PyObject *array_address(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(self_of(o)->a->data);
}

static PyObject *array_users(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *list = PyList_New(0), *made = NULL;
    fan_stream *user;
    for (size_t i = 0; list && (user = fan_memory_user(self_of(o)->a->storage, i)); i++) {
        PyObject *s = fan_stream_wrap(user);
        if (!s || PyList_Append(list, s) < 0)
            Py_CLEAR(list);
        Py_XDECREF(s);
        fan_stream_drop(user);
    }
    if (list)
        made = PyList_AsTuple(list);
    Py_XDECREF(list);
    return made;
}

static void seen_users(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                       PyObject *Py_UNUSED(kwnames))
{
    fan_sim_saw_memory(self_of(o)->d, self_of(o)->a, false);
}

static void seen_using(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                       PyObject *Py_UNUSED(kwnames))
{
    fan_sim_saw_memory(self_of(o)->d, self_of(o)->a, true);
}

FAN_TURN_NONE(array_numpy, fan_seen_nothing)
FAN_TURN_ONE(array_record_stream, seen_using)
FAN_TURN_NAMED(array_dlpack, seen_using)
FAN_TURN_GET(array_users, seen_users)

static PyMethodDef methods[] = {
    {"numpy", array_numpy_turn, METH_NOARGS,
     "numpy($self, /)\n--\n\nThe values as a new ndarray, after waiting for the device's current stream, and for that "
     "alone."},
    {"transpose", array_transpose, METH_VARARGS,
     "transpose($self, /, *axes)\n--\n\nA view with the axes in another order; reversed without `axes`."},
    {"reshape", array_reshape, METH_VARARGS,
     "reshape($self, /, *shape)\n--\n\nA view of another shape; ValueError where that needs a copy."},
    {"broadcast_to", array_broadcast_to, METH_VARARGS,
     "broadcast_to($self, /, *shape)\n--\n\nA view that repeats itself, not to be written."},
    {"record_stream", array_record_stream_turn, METH_O,
     "record_stream($self, stream, /)\n--\n\nKeep the memory, once nobody holds it, until what `stream` has queued by "
     "its "
     "last such use has run."},
    {"__dlpack__", (PyCFunction)(void (*)(void))array_dlpack_turn, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
     "A capsule over the array's memory, which the consumer's stream waits for: None and 1 are the legacy default "
     "stream, 2 the\n"
     "per-thread one, -1 asks for no waiting."},
    {"__dlpack_device__", array_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self, /)\n--\n\n(2, n): CUDA device n."},
    {"__array__", (PyCFunction)(void (*)(void))array_dunder_array, METH_VARARGS | METH_KEYWORDS, NULL},
    {"__array_ufunc__", (PyCFunction)(void (*)(void))array_dunder_ufunc, METH_VARARGS | METH_KEYWORDS, NULL},
    {"__array_function__", (PyCFunction)(void (*)(void))array_dunder_ufunc, METH_VARARGS | METH_KEYWORDS, NULL},
    {"__reduce__", array_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"shape", array_shape, NULL, "Its extents.", NULL},
    {"strides", array_strides, NULL, "Bytes from one element to the next, axis by axis.", NULL},
    {"dtype", array_dtype, NULL, "Its NumPy dtype.", NULL},
    {"device", array_device, NULL, "The name of its device, as in \"sim:0\".", NULL},
    {"ndim", array_ndim, NULL, "The number of its axes.", NULL},
    {"size", array_size, NULL, "The number of its elements.", NULL},
    {"itemsize", array_itemsize, NULL, "Bytes of one element.", NULL},
    {"nbytes", array_nbytes, NULL, "Bytes of all elements.", NULL},
    {"T", array_t, NULL, "A view with the axes reversed.", NULL},
    {"address", array_address, NULL, "Where its first element lies: to see which arrays share memory.", NULL},
    {"__cuda_array_interface__", array_interface, NULL,
     "Version 3; its stream is the device's current one, which waits for all work on the memory.", NULL},
    {"users", array_users_turn, NULL, "The streams that its memory is marked as used on, its owner first.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(array_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An array on a simulated device, made by `Machine.array` and `Machine.empty`.\n\n"
                "Indexing by integers, slices, ... and None gives views; values are read by `numpy()` or by kernels."},
    {Py_tp_new, array_new},
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_repr, array_repr},
    {Py_tp_hash, array_hash},
    {Py_tp_richcompare, array_compare},
    {Py_mp_subscript, array_getitem},
    {Py_mp_length, array_length},
    {Py_sq_item, array_item},
    {Py_tp_iter, array_iter},
    {Py_nb_bool, array_bool},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec fan_array_spec = {
    .name = "fanin.sim.Array",
    .basicsize = sizeof(array_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
