/* array_view: views of fanin.sim.Array: each takes nothing and gives a new object on the same memory. */
#include "py/base/args.h"
#include "py/arrays/array_view.h"

#include <string.h>

bool fan_array_on_cpu(PyObject *o)
{
    fan_device *d = NULL;
    return fan_array_arg(o, &d) && d == fan_cpu();
}

static PyObject *wrap_taken(fan_array *a, fan_device *d)
{
    PyObject *made = fan_array_wrap(a, d);
    fan_array_drop(a);
    return made;
}

static PyObject *view(fan_array_object *self, char *data, int ndim, const int64_t *shape, const int64_t *strides)
{
    fan_array *made = NULL;
    fan_error err = {0};
    fan_status status;
    if (fan_array_usable(self->a) < 0)
        return NULL;
    status =
        fan_array_view(self->a->storage, data, self->a->dtype, ndim, shape, strides, self->a->writable, &made, &err);
    return status == FAN_OK ? wrap_taken(made, self->d) : fan_raise(status, &err);
}

/* A subscript on its way: what has been made of the axes before `axis`. */
typedef struct subscript {
    const fan_array *a;
    bool on_cpu;
    char *data;
    int ndim, axis;
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
} subscript;

static int put_axis(subscript *s, int64_t extent, int64_t stride)
{
    if (s->ndim == FAN_MAX_NDIM) {
        PyErr_Format(PyExc_IndexError, "at most %d dimensions are supported", FAN_MAX_NDIM);
        return -1;
    }
    s->shape[s->ndim] = extent;
    s->strides[s->ndim++] = stride;
    return 0;
}

/* take_whole: the next n axes as they are. */
static int take_whole(subscript *s, int n)
{
    for (; n > 0; n--, s->axis++)
        if (put_axis(s, s->a->shape[s->axis], s->a->strides[s->axis]) < 0)
            return -1;
    return 0;
}

static int take_slice(subscript *s, PyObject *slice)
{
    Py_ssize_t start, stop, step, length;
    int64_t stride = s->a->strides[s->axis];
    if (PySlice_Unpack(slice, &start, &stop, &step) < 0)
        return -1;
    length = PySlice_AdjustIndices(s->a->shape[s->axis], &start, &stop, step);
    if (put_axis(s, length, length > 1 ? stride * step : stride) < 0)
        return -1;
    if (length > 0)
        s->data += start * stride;
    s->axis++;
    return 0;
}

static int take_index(subscript *s, PyObject *k)
{
    int64_t extent = s->a->shape[s->axis], at;
    if (!PyIndex_Check(k) || PyBool_Check(k) || (PyArray_Check(k) && PyArray_NDIM((PyArrayObject *)k) > 0)) {
        PyErr_Format(PyExc_TypeError,
                     "an array %s is indexed by integers, slices, ... and None, which give views, not by %.80s; %s, or "
                     "index x.numpy()%s",
                     s->on_cpu ? "of a graph tree" : "on a device", Py_TYPE(k)->tp_name,
                     s->on_cpu ? "np.take(x, places, axis) and np.where can be recorded"
                               : "queue a kernel with Machine.launch",
                     s->on_cpu ? " outside of functions" : "");
        return -1;
    }
    if (fan_int_arg(k, PyExc_IndexError, &at) < 0)
        return -1;
    if (at < -extent || at >= extent) {
        PyErr_Format(PyExc_IndexError, "index %lld is out of range for axis %d of length %lld", (long long)at, s->axis,
                     (long long)extent);
        return -1;
    }
    s->data += (at < 0 ? at + extent : at) * s->a->strides[s->axis];
    s->axis++;
    return 0;
}

PyObject *fan_array_getitem(PyObject *o, PyObject *key)
{
    const fan_array *a = fan_array_self(o)->a;
    bool several = PyTuple_Check(key);
    Py_ssize_t n = several ? PyTuple_GET_SIZE(key) : 1, used = 0, dots = 0;
    FAN_UNINITIALIZED subscript s;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *k = several ? PyTuple_GET_ITEM(key, i) : key;
        dots += k == Py_Ellipsis;
        used += k != Py_Ellipsis && k != Py_None;
    }
    if (dots > 1)
        return PyErr_Format(PyExc_IndexError, "an index can have one ellipsis (...) only, not %zd", dots);
    if (used > a->ndim)
        return PyErr_Format(PyExc_IndexError, "too many indices: %zd for an array of %d dimensions", used, a->ndim);
    s.a = a;
    s.on_cpu = fan_array_on_cpu(o);
    s.data = a->data;
    s.ndim = s.axis = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *k = several ? PyTuple_GET_ITEM(key, i) : key;
        int result = k == Py_Ellipsis   ? take_whole(&s, a->ndim - (int)used)
                     : k == Py_None     ? put_axis(&s, 1, 0)
                     : PySlice_Check(k) ? take_slice(&s, k)
                                        : take_index(&s, k);
        if (result < 0)
            return NULL;
    }
    if (!dots && take_whole(&s, a->ndim - (int)used) < 0)
        return NULL;
    return view(fan_array_self(o), s.data, s.ndim, s.shape, s.strides);
}

/* args_of: methods that take `f(2, 3)` and `f((2, 3))` alike; borrowed. */
static PyObject *args_of(PyObject *args) { return PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : args; }

PyObject *fan_array_transpose(PyObject *o, PyObject *args)
{
    fan_array *a = fan_array_self(o)->a;
    int64_t axes[FAN_MAX_NDIM], shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    uint64_t seen = 0;
    PyObject *given = args_of(args);
    if (PyTuple_GET_SIZE(args) == 0 || given == Py_None) {
        for (int i = 0; i < a->ndim; i++)
            axes[i] = a->ndim - 1 - i;
    } else {
        int n = fan_ints_arg(given, axes);
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
    return view(fan_array_self(o), a->data, a->ndim, shape, strides);
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

/* reshape_copy: a copy seen so, as ndarray's method gives: on the CPU, where it is recorded. */
static PyObject *reshape_copy(PyObject *o, PyObject *shape)
{
    PyObject *copy = PyObject_CallMethod(o, "copy", NULL);
    PyObject *made = copy ? PyObject_CallMethod(copy, "reshape", "(O)", shape) : NULL;
    Py_XDECREF(copy);
    return made;
}

PyObject *fan_array_reshape(PyObject *o, PyObject *args)
{
    fan_array *a = fan_array_self(o)->a;
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM], size = 1;
    char was[128];
    int hole = -1, n = fan_ints_arg(args_of(args), shape);
    fan_shape_text(a->ndim, a->shape, was, sizeof was);
    if (n < 0)
        return NULL;
    for (int i = 0; i < n; i++) {
        if (shape[i] == -1 && hole < 0)
            hole = i;
        else if (shape[i] < 0 || __builtin_mul_overflow(size, shape[i], &size))
            return PyErr_Format(PyExc_ValueError, "reshape: %s has no view of shape %R", was, args_of(args));
    }
    if (hole >= 0 && size > 0 && a->size % size == 0)
        size *= shape[hole] = a->size / size;
    else if (hole >= 0)
        size = -1;
    if (size != a->size)
        return PyErr_Format(PyExc_ValueError, "reshape: %s has no view of shape %R: it has %lld elements", was,
                            args_of(args), (long long)a->size);
    if (size == 0)
        memset(strides, 0, sizeof strides); /* the view, which checks the shape, makes its own */
    else if (!restride(a, n, shape, strides))
        return fan_array_on_cpu(o)
                   ? reshape_copy(o, args_of(args))
                   : PyErr_Format(PyExc_ValueError,
                                  "reshape: %s with these strides has no view of shape %R without a copy, "
                                  "and a copy is work for a stream: "
                                  "use Machine.empty and Machine.launch",
                                  was, args_of(args));
    return view(fan_array_self(o), a->data, n, shape, strides);
}

PyObject *fan_array_broadcast_to(PyObject *o, PyObject *args)
{
    int64_t shape[FAN_MAX_NDIM];
    fan_array *made = NULL;
    fan_error err = {0};
    fan_status status;
    int n = fan_ints_arg(args_of(args), shape);
    if (n < 0 || fan_array_usable(fan_array_self(o)->a) < 0)
        return NULL;
    status = fan_array_broadcast(fan_array_self(o)->a, n, shape, &made, &err);
    return status == FAN_OK ? wrap_taken(made, fan_array_self(o)->d) : fan_raise(status, &err);
}
