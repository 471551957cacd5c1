/* array: fanin.sim.Array, an array on a device, or on the CPU in a graph tree. Geometry is read freely; values only by
 * numpy(), or by work on a stream; on the CPU by NumPy's functions, which are recorded where a function of a tree is
 * (fanin.graph.cpu_arrays). */
#include "py/base/args.h"
#include "py/base/handles.h"
#include "py/arrays/dlpack_export.h"

#include "device/cpu/recording.h"

#include <string.h>

/* ---- views: each takes nothing and returns a new object on the same memory ---- */

static bool array_on_cpu(PyObject *o)
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

/* shadow_of: an ndarray of this geometry and no right to its elements: NumPy computes views of it. */
static PyObject *shadow_of(const fan_array *a)
{
    static const int types[] = {[1] = NPY_BYTE, [2] = NPY_SHORT, [4] = NPY_INT, [8] = NPY_LONGLONG, [16] = NPY_CDOUBLE};
    return PyArray_New(&PyArray_Type, a->ndim, (const npy_intp *)a->shape, types[fan_dtype_size(a->dtype)],
                       (const npy_intp *)a->strides, a->data, 0, 0, NULL);
}

/* check_index: an index that gives a view; -1 with TypeError. */
static int check_index(PyObject *o, PyObject *k)
{
    bool on_cpu = array_on_cpu(o);
    if (k == Py_Ellipsis || k == Py_None || PySlice_Check(k) ||
        (PyIndex_Check(k) && !PyBool_Check(k) && !(PyArray_Check(k) && PyArray_NDIM((PyArrayObject *)k) > 0)))
        return 0;
    PyErr_Format(PyExc_TypeError,
                 "an array %s is indexed by integers, slices, ... and None, which give views, not by %.80s; %s, or "
                 "index x.numpy()%s",
                 on_cpu ? "of a graph tree" : "on a device", Py_TYPE(k)->tp_name,
                 on_cpu ? "np.take(x, places, axis) and np.where can be recorded"
                        : "queue a kernel with Machine.launch",
                 on_cpu ? " outside of functions" : "");
    return -1;
}

static PyObject *array_getitem(PyObject *o, PyObject *key)
{
    PyObject *keys = PyTuple_Check(key) ? PySequence_List(key) : Py_BuildValue("[O]", key);
    PyObject *whole = NULL, *shadow, *part, *made = NULL;
    bool dots = false;
    for (Py_ssize_t i = 0; keys && i < PyList_GET_SIZE(keys); i++) {
        dots |= PyList_GET_ITEM(keys, i) == Py_Ellipsis;
        if (check_index(o, PyList_GET_ITEM(keys, i)) < 0)
            Py_CLEAR(keys);
    }
    /* With an ellipsis NumPy returns a view even of one element, and reads none. */
    if (keys && (dots || PyList_Append(keys, Py_Ellipsis) == 0))
        whole = PyList_AsTuple(keys);
    shadow = whole ? shadow_of(fan_array_self(o)->a) : NULL;
    part = shadow ? PyObject_GetItem(shadow, whole) : NULL;
    if (part) {
        PyArrayObject *p = (PyArrayObject *)part;
        made = view(fan_array_self(o), PyArray_BYTES(p), PyArray_NDIM(p), (const int64_t *)PyArray_DIMS(p),
                    (const int64_t *)PyArray_STRIDES(p));
    }
    Py_XDECREF(part);
    Py_XDECREF(shadow);
    Py_XDECREF(whole);
    Py_XDECREF(keys);
    return made;
}

/* args_of: methods that take `f(2, 3)` and `f((2, 3))` alike; borrowed. */
static PyObject *args_of(PyObject *args) { return PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : args; }

static PyObject *array_transpose(PyObject *o, PyObject *args)
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

/* restride: the strides of a view of `a` with `shape` (as many elements), without a copy; false where there are none.
 * Runs of axes with as many elements on both sides are matched; inside a run the old axes must lie one behind the
 * other. */
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

/* reshape_copy: a copy of this shape, as ndarray's method returns: on the CPU, where it is recorded. */
static PyObject *reshape_copy(PyObject *o, PyObject *shape)
{
    PyObject *copy = PyObject_CallMethod(o, "copy", NULL);
    PyObject *made = copy ? PyObject_CallMethod(copy, "reshape", "(O)", shape) : NULL;
    Py_XDECREF(copy);
    return made;
}

static PyObject *array_reshape(PyObject *o, PyObject *args)
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
        return array_on_cpu(o) ? reshape_copy(o, args_of(args))
                               : PyErr_Format(PyExc_ValueError,
                                              "reshape: %s with these strides has no view of shape %R without a copy, "
                                              "and a copy is work for a stream: "
                                              "use Machine.empty and Machine.launch",
                                              was, args_of(args));
    return view(fan_array_self(o), a->data, n, shape, strides);
}

static PyObject *array_broadcast_to(PyObject *o, PyObject *args)
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

/* ---- the type ---- */

static PyObject *array_new(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_SetString(PyExc_TypeError, "arrays on a simulated device are made by Machine.array(ndarray, device=0) and "
                                     "Machine.empty(shape, dtype, device=0)");
    return NULL;
}

static void array_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    fan_array_object *self = fan_array_self(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    /* The last hold may free the memory: that calls the device, which may switch to another host thread. */
    Py_BEGIN_ALLOW_THREADS
        fan_array_drop(self->a);
        fan_device_drop(self->d);
    Py_END_ALLOW_THREADS
    type->tp_free(o);
    Py_DECREF(type);
}

static Py_ssize_t array_length(PyObject *o)
{
    fan_array *a = fan_array_self(o)->a;
    if (a->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "len() of an array of no dimensions");
        return -1;
    }
    return (Py_ssize_t)a->shape[0];
}

/* Values */

static const fan_error reads = {
    .text = "numpy(): a function that is recorded cannot read values on the host: what is done with them would not be "
            "done again"};

static PyObject *array_numpy(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_array_object *self = fan_array_self(o);
    fan_array *a = self->a, *dst = NULL;
    fan_storage *st = NULL;
    npy_intp dims[FAN_MAX_NDIM];
    int64_t strides[FAN_MAX_NDIM];
    fan_error err = {0};
    fan_status status = FAN_ERR_NOMEM;
    fan_stream *s;
    if (array_on_cpu(o) && fan_recording_here())
        return fan_raise_sim(FAN_ERR_CAPTURE, &reads);
    PyArray_Descr *descr = fan_array_usable(a) < 0 ? NULL : fan_descr_of_dtype(a->dtype);
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
        Py_BEGIN_ALLOW_THREADS
            s = fan_stream_current(self->d);
            status = s || array_on_cpu(o) ? FAN_OK : fan_fail(&err, FAN_ERR_NOMEM, "out of memory for a stream");
            if (status == FAN_OK && self->d->backend->use)
                status = self->d->backend->use(self->d, a, "read", false, &err);
            if (status == FAN_OK)
                status = self->d->backend->read(s, dst, a, &err);
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
    Py_BEGIN_ALLOW_THREADS
        status = fan_memory_record_stream(fan_array_self(o)->a->storage, s, &err);
        fan_stream_drop(s);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    Py_RETURN_NONE;
}

/* To other libraries (dlpack.h) */

static PyObject *array_dlpack(PyObject *o, PyObject *const *a)
{
    if (fan_array_usable(fan_array_self(o)->a) < 0)
        return NULL;
    if (array_on_cpu(o))
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: memory of a graph tree ends with its step, and %R may be of one: x.numpy() is "
                            "a copy",
                            o);
    return fan_dlpack_export(fan_array_self(o)->a, fan_array_self(o)->d, a);
}

static PyObject *array_dlpack_device(PyObject *o, PyObject *Py_UNUSED(none))
{
    return array_on_cpu(o) ? Py_BuildValue("(ii)", FAN_DL_CPU, 0) : fan_dlpack_device(fan_array_self(o)->d);
}

static PyObject *array_get_cuda_array_interface(PyObject *o, void *Py_UNUSED(closure))
{
    if (fan_array_usable(fan_array_self(o)->a) < 0)
        return NULL;
    if (array_on_cpu(o))
        return PyErr_Format(PyExc_AttributeError, "__cuda_array_interface__: %R is on the CPU", o);
    return fan_interface_export(fan_array_self(o)->a, fan_array_self(o)->d);
}

/* What NumPy and operators would do behind the caller's back is refused in words. */

static PyObject *advise(const char *what)
{
    return PyErr_Format(
        PyExc_TypeError,
        "%s an array on a device is work for a stream: queue it with Machine.launch, or read the values with x.numpy()",
        what);
}

static PyObject *array_array(PyObject *o, PyObject *const *a)
{
    PyObject *dtype = a[0] ? a[0] : Py_None, *copy = a[1], *values, *made = NULL;
    PyArray_Descr *descr = NULL;
    if (!array_on_cpu(o))
        return PyErr_Format(PyExc_TypeError,
                            "an array on a device is not converted to NumPy silently: x.numpy() waits for the "
                            "device's current stream and copies");
    if (copy == Py_False)
        return PyErr_Format(PyExc_ValueError,
                            "__array__: copy=False, but the values of %R can only be copied, because its memory ends "
                            "with its step: x.numpy(), or np.asarray(x) without copy=",
                            o);
    if (!(values = array_numpy(o, NULL)) || dtype == Py_None)
        return values;
    if (PyArray_DescrConverter(dtype, &descr))
        made = PyArray_FromArray((PyArrayObject *)values, descr, NPY_ARRAY_FORCECAST); /* takes descr */
    Py_DECREF(values);
    return made;
}

/* ask_numpy: a function of fanin.graph.cpu_arrays. */
static PyObject *ask_numpy(const char *name, PyObject *args, PyObject *kwargs)
{
    PyObject *module = PyImport_ImportModule("fanin.graph.cpu_arrays");
    PyObject *fn = module ? PyObject_GetAttrString(module, name) : NULL;
    PyObject *made = fn ? PyObject_Call(fn, args, kwargs) : NULL;
    Py_XDECREF(fn);
    Py_XDECREF(module);
    return made;
}

static PyObject *array_array_ufunc(PyObject *o, PyObject *args, PyObject *kwargs)
{
    return array_on_cpu(o) ? ask_numpy("of_ufunc", args, kwargs) : advise("computing with");
}

static PyObject *array_array_function(PyObject *o, PyObject *args, PyObject *kwargs)
{
    return array_on_cpu(o) ? ask_numpy("of_function", args, kwargs) : advise("computing with");
}

/* by_ufunc: NumPy's function of two operands, of one (b NULL), or of two into the first. */
static PyObject *by_ufunc(const char *name, PyObject *a, PyObject *b, bool in_place)
{
    if (!array_on_cpu(a) && !(b && array_on_cpu(b)))
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *numpy = PyImport_ImportModule("numpy"), *f = numpy ? PyObject_GetAttrString(numpy, name) : NULL;
    PyObject *made = !f         ? NULL
                     : in_place ? PyObject_CallFunctionObjArgs(f, a, b, a, NULL)
                                : PyObject_CallFunctionObjArgs(f, a, b, NULL);
    Py_XDECREF(f);
    Py_XDECREF(numpy);
    return made;
}

/* X(slot, name): operators, and NumPy's functions of them. */
#define TWO_LIST(X)                 \
    X(add, "add")                   \
    X(subtract, "subtract")         \
    X(multiply, "multiply")         \
    X(true_divide, "true_divide")   \
    X(floor_divide, "floor_divide") \
    X(remainder, "remainder")       \
    X(and, "bitwise_and")           \
    X(or, "bitwise_or")             \
    X(xor, "bitwise_xor")           \
    X(lshift, "left_shift")         \
    X(rshift, "right_shift")
#define ONE_LIST(X)         \
    X(invert, "invert")     \
    X(negative, "negative") \
    X(positive, "positive") \
    X(absolute, "absolute")

#define X(slot, name)                                                                               \
    static PyObject *array_##slot(PyObject *a, PyObject *b) { return by_ufunc(name, a, b, false); } \
    static PyObject *array_in_place_##slot(PyObject *a, PyObject *b) { return by_ufunc(name, a, b, true); }
TWO_LIST(X)
#undef X
#define X(slot, name) \
    static PyObject *array_##slot(PyObject *a) { return by_ufunc(name, a, NULL, false); }
ONE_LIST(X)
#undef X

static PyObject *array_matmul(PyObject *a, PyObject *b) { return by_ufunc("matmul", a, b, false); }

static PyObject *array_divmod(PyObject *a, PyObject *b) { return by_ufunc("divmod", a, b, false); }

/* power_name: returns the function that ndarray.__pow__ calls for a common exponent of a float array, or NULL. Its bits
 * differ from those of `power` before NumPy 2.3. */
static const char *power_name(PyObject *a, PyObject *b)
{
    if (!array_on_cpu(a) || !(PyFloat_CheckExact(b) || PyLong_CheckExact(b)))
        return NULL;
    switch (fan_array_self(a)->a->dtype) {
    case FAN_DT_FLOAT16:
    case FAN_DT_FLOAT32:
    case FAN_DT_FLOAT64:
    case FAN_DT_COMPLEX64:
    case FAN_DT_COMPLEX128:
        break;
    default:
        return NULL;
    }
    double exponent = PyFloat_AsDouble(b);
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* an int that no float holds */
        return NULL;
    }
    return exponent == 2 ? "square" : exponent == 0.5 ? "sqrt" : exponent == -1 ? "reciprocal" : NULL;
}

static PyObject *array_power(PyObject *a, PyObject *b, PyObject *Py_UNUSED(modulus))
{
    const char *name = power_name(a, b);
    return by_ufunc(name ? name : "power", a, name ? NULL : b, false);
}

static PyObject *array_compare(PyObject *a, PyObject *b, int op)
{
    static const char *const names[] = {"less", "less_equal", "equal", "not_equal", "greater", "greater_equal"};
    return array_on_cpu(a) ? by_ufunc(names[op], a, b, false) : advise("comparing");
}

static int array_assign(PyObject *o, PyObject *key, PyObject *value)
{
    PyObject *part = NULL, *args = NULL, *done = NULL;
    if (!value || !array_on_cpu(o))
        PyErr_Format(PyExc_TypeError, "an array on a device is written by a kernel: queue it with Machine.launch");
    else if ((part = array_getitem(o, key)) && (args = PyTuple_Pack(2, part, value)))
        done = ask_numpy("assign", args, NULL);
    Py_XDECREF(part);
    Py_XDECREF(args);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* array_getattr: on the CPU, ndarray's methods besides. */
static PyObject *array_getattr(PyObject *o, PyObject *name)
{
    PyObject *made = PyObject_GenericGetAttr(o, name), *args;
    if (made || !array_on_cpu(o) || !PyErr_ExceptionMatches(PyExc_AttributeError) ||
        PyUnicode_READ_CHAR(name, 0) == '_')
        return made;
    PyErr_Clear();
    args = PyTuple_Pack(2, o, name);
    made = args ? ask_numpy("method", args, NULL) : NULL;
    Py_XDECREF(args);
    return made;
}

static Py_hash_t array_hash(PyObject *o) { return (Py_hash_t)((uintptr_t)o >> 4); }

/* array_value: the values, to convert them to a Python number. A function of a graph tree computes with arrays alone:
 * a number would be baked into its recording. */
static PyObject *array_value(PyObject *o, const char *what)
{
    if (!array_on_cpu(o))
        return advise(what);
    if (fan_wants_handles(NULL))
        return PyErr_Format(PyExc_TypeError,
                            "%R is not made a Python number: what is read while a function is recorded is decided "
                            "once; compute with the array itself (np.where can be recorded), or read "
                            "x.numpy().item() outside of functions",
                            o);
    return array_numpy(o, NULL);
}

static int array_bool(PyObject *o)
{
    PyObject *values = array_value(o, "testing");
    int result = values ? PyObject_IsTrue(values) : -1;
    Py_XDECREF(values);
    return result;
}

static PyObject *array_number(PyObject *o, PyObject *(*convert)(PyObject *))
{
    PyObject *values = array_value(o, "converting"), *made = values ? convert(values) : NULL;
    Py_XDECREF(values);
    return made;
}

static PyObject *array_float(PyObject *o) { return array_number(o, PyNumber_Float); }

static PyObject *array_int(PyObject *o) { return array_number(o, PyNumber_Long); }

static PyObject *array_complex(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *values = array_value(o, "converting");
    PyObject *made = values ? PyObject_CallOneArg((PyObject *)&PyComplex_Type, values) : NULL;
    Py_XDECREF(values);
    return made;
}

static PyObject *array_reduce(PyObject *o, PyObject *Py_UNUSED(none))
{
    return PyErr_Format(PyExc_TypeError,
                        "cannot pickle or copy %R: it is memory of a device of this process; x.numpy() is its values",
                        o);
}

static PyObject *array_repr(PyObject *o)
{
    fan_array *a = fan_array_self(o)->a;
    char shape[256], device[32];
    return PyUnicode_FromFormat("<fanin.sim.Array %s %s on %s, %llu B>",
                                fan_shape_text(a->ndim, a->shape, shape, sizeof shape), fan_dtype_name(a->dtype),
                                fan_device_text(fan_array_self(o)->d, device, sizeof device),
                                (unsigned long long)a->size * fan_dtype_size(a->dtype));
}

static PyObject *array_item(PyObject *o, Py_ssize_t i)
{
    PyObject *index = PyLong_FromSsize_t(i), *made = index ? array_getitem(o, index) : NULL;
    Py_XDECREF(index);
    return made;
}

static PyObject *array_iter(PyObject *o) { return array_length(o) < 0 ? NULL : PySeqIter_New(o); }

#define GETTER(name, value)                                                  \
    static PyObject *array_get_##name(PyObject *o, void *Py_UNUSED(closure)) \
    {                                                                        \
        const fan_array *a = fan_array_self(o)->a;                           \
        return value;                                                        \
    }
GETTER(shape, fan_ints(a->ndim, a->shape))
GETTER(strides, fan_ints(a->ndim, a->strides))
GETTER(dtype, (PyObject *)fan_descr_of_dtype(a->dtype))
GETTER(ndim, PyLong_FromLong(a->ndim))
GETTER(size, PyLong_FromLongLong(a->size))
GETTER(itemsize, PyLong_FromSize_t(fan_dtype_size(a->dtype)))
GETTER(nbytes, PyLong_FromLongLong(a->size *(int64_t)fan_dtype_size(a->dtype)))
GETTER(address, PyLong_FromVoidPtr(a->data))

static PyObject *array_get_device(PyObject *o, void *Py_UNUSED(closure))
{
    char text[32];
    return PyUnicode_FromString(fan_device_text(fan_array_self(o)->d, text, sizeof text));
}

static PyObject *array_get_T(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *none = PyTuple_New(0);
    PyObject *made = none ? array_transpose(o, none) : NULL;
    Py_XDECREF(none);
    return made;
}

static PyObject *array_get_users(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *list = PyList_New(0), *made = NULL;
    fan_stream *user;
    for (size_t i = 0; list && (user = fan_memory_user(fan_array_self(o)->a->storage, i)); i++) {
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

#include "py/declared/Array.h"

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fan_array_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)array_doc},
    {Py_tp_new, array_new},
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_repr, array_repr},
    {Py_tp_getattro, array_getattr},
    {Py_tp_hash, array_hash},
    {Py_tp_richcompare, array_compare},
    {Py_mp_subscript, array_getitem},
    {Py_mp_ass_subscript, array_assign},
/* clang-format off */
#define X(slot, name) {Py_nb_##slot, array_##slot}, {Py_nb_inplace_##slot, array_in_place_##slot},
    TWO_LIST(X)
#undef X
#define X(slot, name) {Py_nb_##slot, array_##slot},
    ONE_LIST(X)
#undef X
    /* clang-format on */
    {Py_nb_power, array_power},
    {Py_nb_matrix_multiply, array_matmul},
    {Py_nb_divmod, array_divmod},
    {Py_mp_length, array_length},
    {Py_sq_item, array_item},
    {Py_tp_iter, array_iter},
    {Py_nb_bool, array_bool},
    {Py_nb_float, array_float},
    {Py_nb_int, array_int},
    {Py_tp_methods, array_methods},
    {Py_tp_members, members},
    {Py_tp_getset, array_getset},
    {0, NULL},
};

PyType_Spec fan_array_spec = {
    .name = "fanin.sim.Array",
    .basicsize = sizeof(fan_array_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
