#include "py/dlpack_export.h"

#include "base/mem.h"

/* A tensor that goes out; both layouts, one allocation. May be deleted on any thread, without the GIL. */
typedef struct sent {
    fan_dl_versioned versioned;
    fan_dl_managed legacy;
    fan_array *a; /* held */
    int64_t dims[];
} sent;

static void delete_sent(sent *s)
{
    fan_array_drop(s->a);
    fan_free(s);
}

static void delete_versioned(fan_dl_versioned *m) { delete_sent(m->ctx); }

static void delete_legacy(fan_dl_managed *m) { delete_sent(m->ctx); }

/* Nobody took what is in the capsule: the deleter is called, the live exception stays. */
static void capsule_gone(PyObject *capsule)
{
    PyObject *live;
    fan_dl_versioned *v;
    fan_dl_managed *m;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        v = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        live = fan_exception_take();
        if (v && v->deleter)
            v->deleter(v);
        fan_exception_put(live);
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        m = PyCapsule_GetPointer(capsule, "dltensor");
        live = fan_exception_take();
        if (m && m->deleter)
            m->deleter(m);
        fan_exception_put(live);
    }
}

PyObject *fan_dlpack_capsule(fan_dl_versioned *managed)
{
    return PyCapsule_New(managed, "dltensor_versioned", capsule_gone);
}

/* countable: whether every stride is a whole number of elements: DLPack cannot express others. */
static bool countable(const fan_array *a)
{
    int64_t item = (int64_t)fan_dtype_size(a->dtype);
    for (int i = 0; i < a->ndim; i++)
        if (a->strides[i] % item != 0)
            return false;
    return true;
}

/* sent_new: NULL: out of memory. */
static sent *sent_new(fan_array *a, fan_dl_device at, bool copied)
{
    size_t ndim = (size_t)a->ndim;
    sent *s = fan_alloc(sizeof *s + 2 * ndim * sizeof(int64_t));
    fan_dl_tensor tensor = {
        .data = a->size ? a->data : NULL, .device = at, .ndim = a->ndim, .dtype = fan_dl_dtype_for(a->dtype)};
    if (!s)
        return NULL;
    tensor.shape = s->dims;
    tensor.strides = s->dims + ndim;
    for (size_t i = 0; i < ndim; i++) {
        tensor.shape[i] = a->shape[i];
        tensor.strides[i] = a->strides[i] / (int64_t)fan_dtype_size(a->dtype);
    }
    s->a = fan_array_hold(a);
    s->versioned = (fan_dl_versioned){
        .major = FAN_DL_MAJOR,
        .minor = FAN_DL_MINOR,
        .ctx = s,
        .deleter = delete_versioned,
        .flags = (a->writable ? 0 : FAN_DL_READ_ONLY) | (copied ? FAN_DL_IS_COPIED : 0),
        .tensor = tensor,
    };
    s->legacy = (fan_dl_managed){.tensor = tensor, .ctx = s, .deleter = delete_legacy};
    return s;
}

fan_status fan_dlpack_send(fan_array *a, fan_dl_device at, fan_dl_versioned **out, fan_error *err)
{
    sent *s = countable(a) ? sent_new(a, at, false) : NULL;
    *out = s ? &s->versioned : NULL;
    if (s)
        return FAN_OK;
    return countable(a) ? fan_fail(err, FAN_ERR_NOMEM, "out of memory")
                        : fan_fail(err, FAN_ERR_BUFFER, "a stride is no whole number of elements: give a copy");
}

PyObject *fan_dlpack_offer(fan_array *a, fan_dl_device at, bool versioned, bool copied)
{
    sent *s = sent_new(a, at, copied);
    PyObject *capsule;
    if (!s)
        return PyErr_NoMemory();
    capsule = versioned ? PyCapsule_New(&s->versioned, "dltensor_versioned", capsule_gone)
                        : PyCapsule_New(&s->legacy, "dltensor", capsule_gone);
    if (!capsule)
        delete_sent(s);
    return capsule;
}

static bool two_ints(PyObject *o, long *first, long *second)
{
    if (!PyTuple_Check(o) || PyTuple_GET_SIZE(o) != 2)
        return false;
    *first = PyLong_AsLong(PyTuple_GET_ITEM(o, 0));
    *second = PyErr_Occurred() ? 0 : PyLong_AsLong(PyTuple_GET_ITEM(o, 1));
    bool are = !PyErr_Occurred();
    PyErr_Clear();
    return are;
}

static PyObject *value_or_none(PyObject *o) { return o ? o : Py_None; }

int fan_dl_request_parse(PyObject *const *values, fan_dl_request *q)
{
    PyObject *max_version = value_or_none(values[1]), *device = value_or_none(values[2]);
    PyObject *copy = value_or_none(values[3]);
    long minor = 0;
    q->stream = value_or_none(values[0]);
    q->major = 0;
    if (max_version != Py_None && !two_ints(max_version, &q->major, &minor))
        return fan_refuse(PyExc_TypeError, "__dlpack__: expected max_version=(major, minor), got %R", max_version);
    if (device != Py_None && !two_ints(device, &q->type, &q->id))
        return fan_refuse(PyExc_TypeError, "__dlpack__: expected dl_device=(type, id), got %R", device);
    q->copy = copy == Py_None ? -1 : copy == Py_True;
    return 0;
}

int fan_dl_request_decide(const fan_array *a, fan_dl_request *q)
{
    if (q->copy > 0)
        return 0;
    if (!countable(a)) {
        if (q->copy == 0)
            return fan_refuse(
                PyExc_BufferError,
                "__dlpack__: a stride is no whole number of elements: this array goes out as a copy only");
        q->copy = 1;
    } else if (!a->writable && q->major < 1) {
        return fan_refuse(PyExc_BufferError,
                          "__dlpack__: the array is read-only, and an unversioned capsule has no flag "
                          "for that; pass max_version=(1, 0) or copy=True");
    }
    return 0;
}
