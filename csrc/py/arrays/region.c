/* region: see region.h. ndarrays, torch tensors (by torch's exchange table), fanin's device arrays
 * and objects with a buffer are read here, without calling Python; for everything else
 * fanin._interop.sharing.memory_of is called. */
#include "py/arrays/region.h"
#include "py/base/args.h"
#include "py/arrays/arrays.h"

#include "base/mem.h"
#include "py/arrays/dlpack.h"

#include <stdio.h>

/* An item's device: 0: the host; an address: one of fanin's devices; with this bit: DLPack's type
 * and number. */
#define DL_DEVICE (UINT64_C(1) << 63)
/* An item's dtype: the address of an ndarray's dtype; with this bit: DLPack's, or a hash of a
 * buffer's format. */
#define NO_DESCR (UINT64_C(1) << 63)

/* refuse: takes the text; NULL: after an error. */
static int refuse(const char *who, Py_ssize_t index, PyObject *type, PyObject *text)
{
    if (text && index < 0)
        PyErr_Format(type, "%s: %U", who, text);
    else if (text)
        PyErr_Format(type, "%s: array %zd: %U", who, index, text);
    Py_XDECREF(text);
    return -1;
}

/* c_strides: of memory without strides. */
static void c_strides(fan_region *r, int64_t *strides)
{
    uint64_t step = (uint64_t)r->itemsize;
    for (int i = r->ndim - 1; i >= 0; i--) {
        strides[i] = (int64_t)step;
        step *= (uint64_t)(r->shape[i] > 0 ? r->shape[i] : 1);
    }
}

/* read_tensor: false, without an exception, if it cannot be read. */
static bool read_tensor(const fan_dl_tensor *t, int64_t *dims, fan_layout_item *out)
{
    int bits = t->dtype.bits * t->dtype.lanes;
    int64_t size = 1;
    if (t->ndim < 0 || t->ndim > FAN_MAX_NDIM || bits % 8 != 0 || (t->ndim > 0 && !t->shape))
        return false;
    out->region = (fan_region){(uint64_t)(uintptr_t)t->data + t->byte_offset, bits / 8, dims,
                               dims + t->ndim, t->ndim};
    for (int i = 0; i < t->ndim; i++) {
        dims[i] = t->shape[i];
        size = t->shape[i] == 0 ? 0 : size;
    }
    if (size && !t->data)
        return false;
    c_strides(&out->region, dims + t->ndim);
    for (int i = 0; i < t->ndim && t->strides; i++)
        if (__builtin_mul_overflow(t->strides[i], (int64_t)(bits / 8), &dims[t->ndim + i]))
            dims[t->ndim + i] = INT64_MAX; /* too far to be represented */
    out->dtype =
        NO_DESCR | (uint64_t)t->dtype.code << 32 | (uint64_t)t->dtype.bits << 16 | t->dtype.lanes;
    out->device =
        t->device.type == FAN_DL_CPU || t->device.type == FAN_DL_CUDA_HOST
            ? 0
            : DL_DEVICE | (uint64_t)(uint32_t)t->device.type << 32 | (uint32_t)t->device.id;
    out->writable = true;
    return true;
}

/* is_parameter: whether an object is exactly a torch Parameter, which has the memory of a tensor
 * and no other. */
static bool is_parameter(fan_state *st, PyObject *o)
{
    if (!st->torch_api || Py_TYPE(o)->tp_base != st->torch_type)
        return false;
    PyObject *type = fan_lazy(&st->parameter_type, "torch.nn", "Parameter");
    if (!type)
        PyErr_Clear(); /* the slow path reads it */
    return (PyObject *)Py_TYPE(o) == type;
}

static bool read_quickly(PyObject *o, int64_t *dims, fan_layout_item *out)
{
    fan_state *st = fan_state_get();
    fan_dl_tensor t;
    return (fan_is_tensor(st, o) || is_parameter(st, o)) && fan_tensor_look(st, o, &t) &&
           read_tensor(&t, dims, out);
}

static uint64_t hash_text(const char *s)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * UINT64_C(0x100000001b3);
    return h;
}

/* read_buffer: by the buffer protocol. -1 with an exception. */
static int read_buffer(PyObject *o, const char *who, Py_ssize_t index, int64_t *dims,
                       fan_layout_item *out)
{
    Py_buffer view;
    int result = -1;
    if (PyObject_GetBuffer(o, &view, PyBUF_FULL_RO) < 0)
        return -1;
    bool indirect = false;
    for (int i = 0; i < view.ndim && view.suboffsets; i++)
        indirect |= view.suboffsets[i] >= 0;
    if (view.ndim > FAN_MAX_NDIM || indirect) {
        refuse(
            who, index, PyExc_TypeError,
            PyUnicode_FromFormat(
                "the buffer of this %.200s has no single address with strides; expected an array",
                Py_TYPE(o)->tp_name));
        goto done;
    }
    for (int i = 0; i < view.ndim; i++) {
        dims[i] = view.shape ? view.shape[i] : view.len / (view.itemsize ? view.itemsize : 1);
        dims[view.ndim + i] = view.strides ? view.strides[i] : 0;
    }
    out->region = (fan_region){(uint64_t)(uintptr_t)view.buf, view.itemsize, dims, dims + view.ndim,
                               view.ndim};
    if (!view.strides)
        c_strides(&out->region, dims + view.ndim);
    out->dtype = NO_DESCR | hash_text(view.format ? view.format : "B");
    out->device = 0;
    out->writable = !view.readonly;
    result = 0;
done:
    PyBuffer_Release(&view);
    return result;
}

/* read_record: a Region of _interop/records.py. */
static int read_record(PyObject *record, int64_t *dims, fan_layout_item *out)
{
    PyObject *shape, *strides;
    unsigned long long address;
    long long itemsize;
    const char *dtype;
    int writable, type, id, ndim;
    if (!PyArg_ParseTuple(record, "KOOLspii:memory", &address, &shape, &strides, &itemsize, &dtype,
                          &writable, &type, &id))
        return -1;
    ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0 || fan_dims_tuple("strides", strides, dims + ndim) < 0)
        return -1;
    out->region = (fan_region){address, itemsize, dims, dims + ndim, ndim};
    out->dtype = NO_DESCR | hash_text(dtype);
    out->device =
        type == FAN_DL_CPU ? 0 : DL_DEVICE | (uint64_t)(uint32_t)type << 32 | (uint32_t)id;
    out->writable = writable;
    return 0;
}

static int read_capsule(PyObject *capsule, PyObject *o, const char *who, Py_ssize_t index,
                        int64_t *dims, fan_layout_item *out)
{
    FAN_UNINITIALIZED int64_t copy[2 * FAN_MAX_NDIM];
    fan_dl_tensor t;
    uint64_t flags;
    /* raises the exception again, with a prefix for the array */
    if (fan_dlpack_peek(capsule, copy, &t, &flags) < 0) {
        PyObject *e = fan_exception_take();
        refuse(who, index, (PyObject *)Py_TYPE(e), PyObject_Str(e));
        Py_DECREF(e);
        return -1;
    }
    if (flags & FAN_DL_IS_COPIED)
        return refuse(
            who, index, PyExc_TypeError,
            PyUnicode_FromFormat("this %.200s exports a copy by DLPack, which hides its own memory",
                                 Py_TYPE(o)->tp_name));
    if (!read_tensor(&t, dims, out))
        return refuse(
            who, index, PyExc_TypeError,
            PyUnicode_FromFormat(
                "the DLPack tensor of this %.200s has no memory whose bytes can be compared",
                Py_TYPE(o)->tp_name));
    out->writable = !(flags & FAN_DL_READ_ONLY);
    return 0;
}

static int read_slowly(PyObject *o, const char *who, Py_ssize_t index, int64_t *dims,
                       fan_layout_item *out)
{
    fan_state *st = fan_state_get();
    PyObject *memory_of = fan_lazy(&st->memory_of, "fanin._interop.sharing", "memory_of"), *record;
    int result = -1;
    record = memory_of ? PyObject_CallOneArg(memory_of, o) : NULL;
    if (!record)
        return -1;
    Py_ssize_t n = PyTuple_Check(record) ? PyTuple_GET_SIZE(record) : 0;
    /* the first tensor of the process: memory_of has just made the table known */
    if (read_quickly(o, dims, out))
        result = 0;
    else if (n == 1)
        result = read_capsule(PyTuple_GET_ITEM(record, 0), o, who, index, dims, out);
    else if (n == 2)
        result =
            refuse(who, index, PyTuple_GET_ITEM(record, 0), Py_NewRef(PyTuple_GET_ITEM(record, 1)));
    else
        result = read_record(record, dims, out);
    Py_DECREF(record);
    return result;
}

int fan_region_read(PyObject *o, const char *who, Py_ssize_t index, int64_t *dims,
                    fan_layout_item *out, PyArray_Descr **descr)
{
    fan_device *device;
    fan_array *a;
    *descr = NULL;
    if (PyArray_Check(o)) {
        PyArrayObject *nd = (PyArrayObject *)o;
        int ndim = PyArray_NDIM(nd);
        if (!PyArray_CheckExact(o)) {
            PyObject *masked = fan_lazy(&fan_state_get()->masked_type, "numpy.ma", "MaskedArray");
            int mask = masked ? PyObject_IsInstance(o, masked) : -1;
            if (mask != 0)
                return mask < 0
                           ? -1
                           : refuse(who, index, PyExc_TypeError,
                                    PyUnicode_FromFormat(
                                        "a %.200s has two memories; expected one array: give its "
                                        ".data or its .mask",
                                        Py_TYPE(o)->tp_name));
        }
        for (int i = 0; i < ndim; i++) {
            dims[i] = PyArray_DIM(nd, i);
            dims[ndim + i] = PyArray_STRIDE(nd, i);
        }
        *descr = PyArray_DESCR(nd);
        out->region = (fan_region){(uint64_t)(uintptr_t)PyArray_DATA(nd), PyArray_ITEMSIZE(nd),
                                   dims, dims + ndim, ndim};
        out->dtype = (uint64_t)(uintptr_t)*descr;
        out->device = 0;
        out->writable = PyArray_ISWRITEABLE(nd);
        return 0;
    }
    if (read_quickly(o, dims, out))
        return 0;
    a = fan_array_arg(o, &device);
    if (a) {
        for (int i = 0; i < a->ndim; i++) {
            dims[i] = a->shape[i];
            dims[a->ndim + i] = a->strides[i];
        }
        out->region = fan_region_of(a);
        out->region.shape = dims;
        out->region.strides = dims + a->ndim;
        out->dtype = NO_DESCR | (uint64_t)a->dtype;
        out->device = device == fan_cpu() ? 0 : (uint64_t)(uintptr_t)device;
        out->writable = a->writable;
        return 0;
    }
    if (PyErr_Occurred())
        return -1;
    if (PyObject_CheckBuffer(o)) {
        if (read_buffer(o, who, index, dims, out) == 0)
            return 0;
        if (!PyErr_ExceptionMatches(PyExc_BufferError))
            return -1;
        PyErr_Clear();
    }
    return read_slowly(o, who, index, dims, out);
}

/* ---- several ---- */

void fan_regions_fini(fan_regions *r)
{
    for (size_t i = 0; i < r->n; i++)
        Py_XDECREF(r->descrs[i]);
    fan_free(r->items);
    fan_free(r->descrs);
    fan_free(r->dims);
    Py_XDECREF(r->tuple);
    *r = (fan_regions){.n = 0};
}

static int read_all(const char *who, fan_regions *r)
{
    size_t n = (size_t)PyTuple_GET_SIZE(r->tuple);
    r->items = fan_alloc(n * sizeof *r->items);
    r->descrs = fan_alloc(n * sizeof *r->descrs);
    if (!r->items || !r->descrs)
        goto nomem;
    for (; r->n < n; r->n++) {
        fan_layout_item *item = &r->items[r->n];
        if (fan_grow((void **)&r->dims, &r->cap, r->used + FAN_REGION_DIMS, sizeof *r->dims) < 0)
            goto nomem;
        if (fan_region_read(PyTuple_GET_ITEM(r->tuple, (Py_ssize_t)r->n), who, (Py_ssize_t)r->n,
                            r->dims + r->used, item, &r->descrs[r->n]) < 0)
            return -1;
        Py_XINCREF(r->descrs[r->n]);
        r->used += 2 * (size_t)item->region.ndim;
    }
    /* fan_grow may have moved them. */
    const int64_t *dims = r->dims;
    for (size_t i = 0; i < n; i++) {
        r->items[i].region.shape = dims;
        r->items[i].region.strides = dims + r->items[i].region.ndim;
        dims += 2 * r->items[i].region.ndim;
    }
    return 0;
nomem:
    PyErr_NoMemory();
    return -1;
}

int fan_regions_read(PyObject *o, const char *who, fan_regions *out)
{
    *out = (fan_regions){.n = 0};
    if (PyArray_Check(o) || Py_TYPE(o) == fan_state_get()->array_type || PyUnicode_Check(o) ||
        PyBytes_Check(o) || !(Py_TYPE(o)->tp_iter || PySequence_Check(o)))
        return fan_set_error(PyExc_TypeError, "%s: expected a sequence of arrays, got %s", who,
                             FAN_TYPE_TEXT(o));
    out->tuple = PySequence_Tuple(o);
    if (out->tuple && read_all(who, out) == 0)
        return 0;
    fan_regions_fini(out);
    return -1;
}

/* device_words: "the host", "sim:0", "DLPack's device (2, 0)". */
static const char *device_words(uint64_t device, char *buf, size_t size)
{
    if (device == 0)
        return "the host";
    if (!(device & DL_DEVICE))
        return fan_device_text((const fan_device *)(uintptr_t)device, buf, size);
    snprintf(buf, size, "DLPack's device (%d, %d)", (int)(device >> 32 & INT32_MAX),
             (int)(device & UINT32_MAX));
    return buf;
}

int fan_regions_one_device(const fan_layout_item *items, size_t n, const char *who)
{
    char one[64], two[64];
    for (size_t i = 1; i < n; i++) {
        if (items[i].device == items[0].device)
            continue;
        const char *here = device_words(items[i].device, one, sizeof one);
        const char *there = device_words(items[0].device, two, sizeof two);
        return fan_set_error(PyExc_ValueError,
                             "%s: array %zu is on %s, array 0 on %s%s: expected arrays of one "
                             "device, whose addresses can be compared",
                             who, i, here, there,
                             strcmp(here, there) == 0 ? " of another machine" : "");
    }
    return 0;
}

int fan_overlap_budget_arg(PyObject *o, uint64_t *out)
{
    *out = FAN_OVERLAP_BUDGET;
    return !o || o == Py_None ? 0 : fan_budget_arg(o, "budget", out);
}
