/* region: see region.h. ndarrays, torch tensors (by torch's exchange table), fanin's device arrays
 * and objects with a buffer are read here, without calling Python; for everything else
 * fanin._interop.sharing.memory_of is called.
 *
 * In this order: one object, by each of these ways; several; the words of errors. */
#include "py/arrays/region.h"
#include "py/base/args.h"
#include "py/arrays/arrays.h"

#include "base/mem.h"
#include "py/arrays/dlpack.h"
#include "py/arrays/facts.h"

#include <stdio.h>

/* An item's device: 0: the host; an address: one of fanin's devices; with this bit: DLPack's type
 * and number. */
#define DL_DEVICE (UINT64_C(1) << 63)
/* An item's dtype: the address of an ndarray's dtype; with this bit: DLPack's, or a hash of a
 * buffer's format. */
#define NO_DESCR (UINT64_C(1) << 63)

/* One object that is read. */
typedef struct reading {
    PyObject *object;
    const char *who;  /* messages begin with it and the index */
    Py_ssize_t index; /* negative: none */
    int64_t *dims;    /* room for FAN_REGION_DIMS */
    fan_layout_item *item;
} reading;

/* refuse: takes the text; NULL: after an error. */
static int refuse(const reading *r, PyObject *type, PyObject *text)
{
    if (text && r->index < 0)
        PyErr_Format(type, "%s: %U", r->who, text);
    else if (text)
        PyErr_Format(type, "%s: array %zd: %U", r->who, r->index, text);
    Py_XDECREF(text);
    return -1;
}

/* refuse_type: TypeError; `format` has the object's type once. */
static int refuse_type(const reading *r, const char *format)
{
    return refuse(r, PyExc_TypeError, PyUnicode_FromFormat(format, Py_TYPE(r->object)->tp_name));
}

/* set_region: copies the dims of a region of at most FAN_MAX_NDIM axes; strides NULL: in C order.
 */
static void set_region(reading *r, fan_region of)
{
    int64_t *steps = r->dims + of.ndim;
    uint64_t step = (uint64_t)of.itemsize;
    for (int i = of.ndim - 1; i >= 0; i--) {
        r->dims[i] = of.shape[i];
        steps[i] = (int64_t)step;
        if (of.strides)
            steps[i] = of.strides[i];
        step *= (uint64_t)fan_max(of.shape[i], 1);
    }
    of.shape = r->dims;
    of.strides = steps;
    r->item->region = of;
}

static uint64_t dlpack_device(int type, int id)
{
    if (type == FAN_DL_CPU || type == FAN_DL_CUDA_HOST)
        return 0;
    return DL_DEVICE | (uint64_t)(uint32_t)type << 32 | (uint32_t)id;
}

static void read_ndarray(reading *r, PyArray_Descr **descr)
{
    PyArrayObject *a = (PyArrayObject *)r->object;
    *descr = PyArray_DESCR(a);
    fan_region of = {
        .data = (uintptr_t)PyArray_DATA(a),
        .itemsize = PyArray_ITEMSIZE(a),
        .ndim = PyArray_NDIM(a),
        .shape = (const int64_t *)PyArray_DIMS(a),
        .strides = (const int64_t *)PyArray_STRIDES(a),
    };
    set_region(r, of);
    r->item->dtype = (uintptr_t)*descr;
    r->item->device = 0;
    r->item->writable = PyArray_ISWRITEABLE(a);
}

/* check_one_memory: 0 of a subclass of ndarray that has one memory, -1 with an exception. */
static int check_one_memory(const reading *r)
{
    PyObject *masked = fan_lazy(&fan_state_get()->masked_type, "numpy.ma", "MaskedArray");
    if (!masked)
        return -1;
    int is_masked = PyObject_IsInstance(r->object, masked);
    if (is_masked <= 0)
        return is_masked;
    return refuse_type(
        r, "a %.200s has two memories; expected one array: give its .data or its .mask");
}

/* read_dlpack: false, without an exception, if it cannot be read. */
static bool read_dlpack(reading *r, const fan_dl_tensor *t)
{
    int ndim = t->ndim;
    int64_t itemsize = t->dtype.bits * t->dtype.lanes / 8;
    bool empty = false;
    if (ndim < 0 || ndim > FAN_MAX_NDIM)
        return false;
    if (t->dtype.bits * t->dtype.lanes % 8 != 0)
        return false;
    if (ndim > 0 && !t->shape)
        return false;
    for (int i = 0; i < ndim; i++)
        empty |= t->shape[i] == 0;
    if (!empty && !t->data)
        return false;
    fan_region of = {
        .data = (uintptr_t)t->data + t->byte_offset,
        .itemsize = itemsize,
        .ndim = ndim,
        .shape = t->shape,
        .strides = t->strides,
    };
    set_region(r, of);
    for (int i = 0; i < ndim && t->strides; i++) {
        if (__builtin_mul_overflow(t->strides[i], itemsize, &r->dims[ndim + i]))
            r->dims[ndim + i] = INT64_MAX; /* too far to be represented */
    }
    r->item->dtype =
        NO_DESCR | (uint64_t)t->dtype.code << 32 | (uint64_t)t->dtype.bits << 16 | t->dtype.lanes;
    r->item->device = dlpack_device(t->device.type, t->device.id);
    r->item->writable = true;
    return true;
}

/* is_parameter: whether an object is exactly a torch Parameter, which has the memory of a tensor
 * and no other. Imports read it by Python (_interop.arrays). */
static bool is_parameter(fan_state *st, PyObject *o)
{
    if (!st->torch_api)
        return false;
    if (Py_TYPE(o)->tp_base != st->torch_type)
        return false;
    PyObject *type = fan_lazy(&st->parameter_type, "torch.nn", "Parameter");
    if (!type)
        PyErr_Clear(); /* the slow path reads it */
    return (PyObject *)Py_TYPE(o) == type;
}

static bool read_tensor(reading *r)
{
    fan_dl_tensor t;
    if (!fan_is_tensor(r->object) && !is_parameter(fan_state_get(), r->object))
        return false;
    return fan_tensor_look(r->object, &t) && read_dlpack(r, &t);
}

/* read_array: of a fanin.Array. */
static void read_array(reading *r)
{
    fan_device *device;
    const fan_array *a = fan_array_arg(r->object, &device);
    set_region(r, fan_region_of(a));
    r->item->dtype = NO_DESCR | (uint64_t)a->dtype;
    r->item->device = 0;
    if (device != fan_cpu())
        r->item->device = (uintptr_t)device;
    r->item->writable = a->writable;
}

static uint64_t hash_text(const char *s)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * UINT64_C(0x100000001b3);
    return h;
}

/* is_indirect: whether a buffer's elements are reached by pointers. */
static bool is_indirect(const Py_buffer *view)
{
    for (int i = 0; i < view->ndim && view->suboffsets; i++) {
        if (view->suboffsets[i] >= 0)
            return true;
    }
    return false;
}

/* read_buffer: by the buffer protocol. -1 with an exception. */
static int read_buffer(reading *r)
{
    Py_buffer view;
    int result = -1;
    if (PyObject_GetBuffer(r->object, &view, PyBUF_FULL_RO) < 0)
        return -1;
    if (view.ndim > FAN_MAX_NDIM || is_indirect(&view)) {
        refuse_type(
            r, "the buffer of this %.200s has no single address with strides; expected an array");
        goto done;
    }
    int64_t length = view.len / fan_max(view.itemsize, 1);
    int64_t flat[FAN_MAX_NDIM];
    for (int i = 0; i < view.ndim; i++)
        flat[i] = length;
    fan_region of = {
        .data = (uintptr_t)view.buf,
        .itemsize = view.itemsize,
        .ndim = view.ndim,
        .shape = flat,
        .strides = (const int64_t *)view.strides,
    };
    if (view.shape)
        of.shape = (const int64_t *)view.shape;
    set_region(r, of);
    r->item->dtype = NO_DESCR | hash_text(view.format ? view.format : "B");
    r->item->device = 0;
    r->item->writable = !view.readonly;
    result = 0;
done:
    PyBuffer_Release(&view);
    return result;
}

/* read_record: a Region of _interop/records.py. */
static int read_record(reading *r, PyObject *record)
{
    PyObject *shape;
    PyObject *strides;
    unsigned long long address;
    long long itemsize;
    const char *dtype;
    int writable;
    int type;
    int id;
    FAN_UNINITIALIZED int64_t dims[FAN_MAX_NDIM];
    FAN_UNINITIALIZED int64_t steps[FAN_MAX_NDIM];
    if (!PyArg_ParseTuple(record, "KOOLspii:memory", &address, &shape, &strides, &itemsize, &dtype,
                          &writable, &type, &id))
        return -1;
    int ndim = fan_shape_tuple(shape, dims);
    if (ndim < 0)
        return -1;
    if (fan_dims_tuple("strides", strides, steps) < 0)
        return -1;
    fan_region of = {
        .data = address,
        .itemsize = itemsize,
        .ndim = ndim,
        .shape = dims,
        .strides = steps,
    };
    set_region(r, of);
    r->item->dtype = NO_DESCR | hash_text(dtype);
    r->item->device = dlpack_device(type, id);
    r->item->writable = writable;
    return 0;
}

static int read_capsule(reading *r, PyObject *capsule)
{
    FAN_UNINITIALIZED int64_t copy[2 * FAN_MAX_NDIM];
    fan_dl_tensor t;
    uint64_t flags;
    /* raises the exception again, with a prefix for the array */
    if (fan_dlpack_peek(capsule, copy, &t, &flags) < 0) {
        PyObject *e = fan_exception_take();
        refuse(r, (PyObject *)Py_TYPE(e), PyObject_Str(e));
        Py_DECREF(e);
        return -1;
    }
    if (flags & FAN_DL_IS_COPIED)
        return refuse_type(r, "this %.200s exports a copy by DLPack, which hides its own memory");
    if (!read_dlpack(r, &t)) {
        return refuse_type(
            r, "the DLPack tensor of this %.200s has no memory whose bytes can be compared");
    }
    r->item->writable = !(flags & FAN_DL_READ_ONLY);
    return 0;
}

/* read_answer: what memory_of returned: (capsule,), (error, text), or a Region. */
static int read_answer(reading *r, PyObject *answer)
{
    Py_ssize_t n = 0;
    if (PyTuple_Check(answer))
        n = PyTuple_GET_SIZE(answer);
    if (n == 0 || n > 2)
        return read_record(r, answer);
    PyObject *first = PyTuple_GET_ITEM(answer, 0);
    if (n == 1)
        return read_capsule(r, first);
    return refuse(r, first, Py_NewRef(PyTuple_GET_ITEM(answer, 1)));
}

static int read_slowly(reading *r)
{
    PyObject *memory_of =
        fan_lazy(&fan_state_get()->memory_of, "fanin._interop.sharing", "memory_of");
    if (!memory_of)
        return -1;
    PyObject *record = PyObject_CallOneArg(memory_of, r->object);
    if (!record)
        return -1;
    int result = 0;
    /* the first tensor of the process: memory_of has just made the table known */
    if (!read_tensor(r))
        result = read_answer(r, record);
    Py_DECREF(record);
    return result;
}

int fan_region_read(PyObject *o, const char *who, Py_ssize_t index, int64_t *dims,
                    fan_layout_item *out, PyArray_Descr **descr)
{
    reading r = {o, who, index, dims, out};
    *descr = NULL;
    switch (fan_class_of(o)) {
    case FAN_IS_NDARRAY_SUBCLASS:
        if (check_one_memory(&r) < 0)
            return -1;
        read_ndarray(&r, descr);
        return 0;
    case FAN_IS_NDARRAY:
        read_ndarray(&r, descr);
        return 0;
    case FAN_IS_ARRAY:
        read_array(&r);
        return 0;
    default:
        break;
    }
    if (read_tensor(&r))
        return 0;
    if (PyObject_CheckBuffer(o)) {
        if (read_buffer(&r) == 0)
            return 0;
        if (!PyErr_ExceptionMatches(PyExc_BufferError))
            return -1;
        PyErr_Clear();
    }
    return read_slowly(&r);
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
        Py_ssize_t at = (Py_ssize_t)r->n;
        PyArray_Descr **descr = &r->descrs[r->n];
        PyObject *o = PyTuple_GET_ITEM(r->tuple, at);
        if (fan_region_read(o, who, at, r->dims + r->used, item, descr) < 0)
            return -1;
        Py_XINCREF(*descr);
        r->used += 2 * (size_t)item->region.ndim;
    }
    /* fan_grow may have moved them. */
    const int64_t *dims = r->dims;
    for (size_t i = 0; i < n; i++) {
        fan_region *region = &r->items[i].region;
        region->shape = dims;
        region->strides = dims + region->ndim;
        dims += 2 * region->ndim;
    }
    return 0;
nomem:
    PyErr_NoMemory();
    return -1;
}

/* is_sequence: whether an object has items, and is no array, text or bytes itself. */
static bool is_sequence(PyObject *o)
{
    switch (fan_class_of(o)) {
    case FAN_IS_NDARRAY:
    case FAN_IS_NDARRAY_SUBCLASS:
    case FAN_IS_ARRAY:
        return false;
    default:
        break;
    }
    if (PyUnicode_Check(o) || PyBytes_Check(o))
        return false;
    return Py_TYPE(o)->tp_iter || PySequence_Check(o);
}

int fan_regions_read(PyObject *o, const char *who, fan_regions *out)
{
    *out = (fan_regions){.n = 0};
    if (!is_sequence(o)) {
        return fan_set_error(PyExc_TypeError, "%s: expected a sequence of arrays, got %s", who,
                             FAN_TYPE_TEXT(o));
    }
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
    char one[64];
    char two[64];
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

Py_ssize_t fan_region_number(PyObject *o, size_t n, const char *call)
{
    int64_t i;
    if (fan_index(o, call, PyExc_IndexError, &i) < 0)
        return -1;
    if ((uint64_t)i < n)
        return (Py_ssize_t)i;
    return fan_set_error(PyExc_IndexError, "%s: there is no array %lld: expected 0 to %zd", call,
                         (long long)i, (Py_ssize_t)n - 1);
}

int fan_overlap_budget_arg(PyObject *o, uint64_t *out)
{
    *out = FAN_OVERLAP_BUDGET;
    if (!o || o == Py_None)
        return 0;
    return fan_budget_arg(o, "budget", out);
}
