/* ranks: functions of the core for fanin.dist besides windows (window.c): lines of a bucket in the
 * trace, copies of gradients, a comparison of first messages, and a yield. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/arrays/dlpack.h"

#include "base/fault.h"
#include "base/thread.h"
#include "base/trace.h"

#include <assert.h>
#include <sched.h>
#include <string.h>

/* send_bytes: the number of bytes for a rank; -1 with an exception. */
static int64_t send_bytes(PyObject *sends, Py_ssize_t rank)
{
    int64_t bytes;
    if (fan_index(PyTuple_GET_ITEM(sends, rank), "sends", PyExc_ValueError, &bytes) < 0)
        return -1;
    return bytes;
}

static PyObject *trace_bucket(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    static const char *const names[] = {"group", "number", "bucket", "begin_ns"};
    fan_trace_line line = {
        .kind = FAN_TRACE_BUCKET,
        .device = -1,
        .start_us = -1,
        .end_us = -1,
    };
    PyObject *sends = a[5];
    const Py_ssize_t ranks = PyTuple_GET_SIZE(sends);
    const char *label = PyUnicode_AsUTF8(a[0]);
    int64_t numbers[4];
    if (!fan_trace_on())
        Py_RETURN_NONE;
    if (!label)
        return NULL;
    for (int i = 0; i < 4; i++) {
        if (fan_index(a[1 + i], names[i], PyExc_ValueError, &numbers[i]) < 0)
            return NULL;
    }
    PyOS_snprintf(line.label, sizeof line.label, "%s", label);
    line.buffer = (uint64_t)numbers[0];
    line.key = numbers[1];
    line.slot = (int32_t)numbers[2];
    line.begin_ns = (uint64_t)numbers[3];
    for (Py_ssize_t r = 0; r < ranks; r++) {
        int64_t bytes = send_bytes(sends, r);
        if (bytes < 0)
            return NULL;
        line.bytes += (uint64_t)bytes;
    }
    fan_trace_put(&line);
    line.kind = FAN_TRACE_SEND;
    for (Py_ssize_t r = 0; r < ranks; r++) {
        line.bytes = (uint64_t)send_bytes(sends, r);
        line.to = (uint64_t)r;
        if (line.bytes > 0)
            fan_trace_put(&line);
    }
    Py_RETURN_NONE;
}

static PyObject *tracing(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(fan_trace_on());
}

#define FEW_BYTES (1 << 14) /* NumPy copies more without the GIL */

/* copy_begin: a step of an explored schedule; -1 with an exception. */
static int copy_begin(void)
{
    if (!fan_thread_get_hooks())
        return 0;
    if (fan_sched_enter_or_raise() < 0)
        return -1;
    fan_sched_access(FAN_THING_HOST_MEMORY, 0, FAN_SCHED_WRITE);
    return 0;
}

/* is_plain_tensor: whether the memory of a tensor holds its value, and no graph refers to it. Torch
 * lets other threads run meanwhile. */
static bool is_plain_tensor(PyObject *o)
{
    return fan_is_tensor(o) && fan_plain_has_own_value(o) && fan_plain_is_detached(o);
}

/* tensor_fits: whether a plain tensor has the dtype and shape of an array, both without gaps. No
 * other thread runs meanwhile. */
static bool tensor_fits(PyObject *from, PyArrayObject *to, char **data)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    if (!fan_plain_import_as(from, false, &kind, data) || kind.order != 0)
        return false;
    if (!PyArray_ISCARRAY(to) || fan_dtype_of_descr(PyArray_DESCR(to)) != kind.dtype)
        return false;
    return fan_shape_same(kind.ndim, kind.shape, PyArray_NDIM(to), PyArray_DIMS(to));
}

static PyObject *copy_tensor(PyObject *from, PyArrayObject *to)
{
    char *data = NULL;
    if (!is_plain_tensor(from) || !tensor_fits(from, to, &data))
        Py_RETURN_FALSE;
    if (copy_begin() < 0)
        return NULL;
    size_t bytes = (size_t)PyArray_NBYTES(to);
    if (bytes <= FEW_BYTES) {
        memmove(PyArray_DATA(to), data, bytes);
        Py_RETURN_TRUE;
    }
    Py_BEGIN_ALLOW_THREADS
        memmove(PyArray_DATA(to), data, bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_TRUE;
}

static PyObject *copy_plain(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyArrayObject *from = (PyArrayObject *)a[0];
    PyArrayObject *to = (PyArrayObject *)a[1];
    if (!PyArray_CheckExact(a[1]))
        Py_RETURN_FALSE;
    if (fan_is_tensor(a[0]))
        return copy_tensor(a[0], to);
    if (!PyArray_CheckExact(a[0]))
        Py_RETURN_FALSE;
    if (PyArray_DESCR(from) != PyArray_DESCR(to) || !PyArray_SAMESHAPE(from, to))
        Py_RETURN_FALSE;
    if (copy_begin() < 0)
        return NULL;
    bool flat = PyArray_IS_C_CONTIGUOUS(from) && PyArray_IS_C_CONTIGUOUS(to);
    if (FAN_FAULT(COPY_AS_IT_LIES))
        flat = PyArray_ISONESEGMENT(from) && PyArray_IS_C_CONTIGUOUS(to);
    bool owned = PyDataType_REFCHK(PyArray_DESCR(to)) || !PyArray_ISWRITEABLE(to);
    if (flat && !owned && PyArray_NBYTES(to) <= FEW_BYTES)
        memmove(PyArray_DATA(to), PyArray_DATA(from), (size_t)PyArray_NBYTES(to));
    else if (PyArray_CopyInto(to, from) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

/* ---- the hook of a parameter ---- */

/* Items of a gate that is open, and of a hook's tuple. */
enum {
    GATE_HAS,
    GATE_PLACES,
    GATE_NOW,
    GATE_ITEMS
};
enum {
    HOOK_GATE,
    HOOK_PLACE,
    HOOK_OTHERWISE,
    HOOK_NOTHING
};

/* gate_take: whether a plain tensor was copied. No other thread runs meanwhile. */
static bool gate_take(PyObject *gate, Py_ssize_t place, PyObject *gradient)
{
    char *data = NULL;
    if (PyList_GET_SIZE(gate) != GATE_ITEMS || fan_thread_get_hooks())
        return false;
    PyObject *has = PyList_GET_ITEM(gate, GATE_HAS);
    PyObject *places = PyList_GET_ITEM(gate, GATE_PLACES);
    assert(place < PyByteArray_GET_SIZE(has) && place < PyList_GET_SIZE(places));
    if (PyList_GET_SIZE(PyList_GET_ITEM(gate, GATE_NOW)) || PyByteArray_AS_STRING(has)[place])
        return false;
    PyObject *to = PyList_GET_ITEM(places, place);
    if (!PyArray_CheckExact(to) || PyArray_NBYTES((PyArrayObject *)to) > FEW_BYTES)
        return false;
    if (!tensor_fits(gradient, (PyArrayObject *)to, &data))
        return false;
    memcpy(PyArray_DATA((PyArrayObject *)to), data, (size_t)PyArray_NBYTES((PyArrayObject *)to));
    PyByteArray_AS_STRING(has)[place] = 1;
    return true;
}

static PyObject *gate_call(PyObject *hook, PyObject *gradients)
{
    Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(hook, HOOK_PLACE));
    PyObject *gate = PyTuple_GET_ITEM(hook, HOOK_GATE);
    PyObject *gradient = Py_None;
    if (PyTuple_CheckExact(gradients) && PyTuple_GET_SIZE(gradients) == 1)
        gradient = PyTuple_GET_ITEM(gradients, 0);
    bool open = PyList_GET_SIZE(gate) > 0 && is_plain_tensor(gradient);
    if (open && gate_take(gate, place, gradient))
        return Py_NewRef(PyTuple_GET_ITEM(hook, HOOK_NOTHING));
    return PyObject_CallOneArg(PyTuple_GET_ITEM(hook, HOOK_OTHERWISE), gradients);
}

static PyMethodDef gate_def = {"collect", gate_call, METH_O, NULL};

static PyObject *gate_hook(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t place;
    if (fan_index(a[1], "place", PyExc_ValueError, &place) < 0)
        return NULL;
    PyObject *self = Py_BuildValue("(OLO(O))", a[0], (long long)place, a[2], Py_None);
    if (!self)
        return NULL;
    PyObject *hook = PyCFunction_New(&gate_def, self);
    Py_DECREF(self);
    return hook;
}

/* ---- first messages ---- */

typedef enum heads_found {
    HEADS_SAME,
    HEADS_ALIKE,
    HEADS_OTHER,
    HEADS_CUT_SHORT
} heads_found;

/* The first message of this rank. */
typedef struct own_message {
    const char *data;
    int64_t bytes;
    size_t head;  /* bytes of its head .. */
    size_t alike; /* .. and those that are the same on all ranks with its plan */
} own_message;

/* head_compare: what a message is of which so many bytes came. */
static heads_found head_compare(const own_message *own, const char *data, int64_t came)
{
    if (came < (int64_t)own->head)
        return HEADS_CUT_SHORT;
    bool same = memcmp(data, own->data, own->head) == 0;
    if (!same && memcmp(data, own->data, own->alike) != 0)
        return HEADS_OTHER;
    if (came < own->bytes)
        return HEADS_CUT_SHORT;
    return same ? HEADS_SAME : HEADS_ALIKE;
}

/* message_of: the bytes of a message, at least those of a head; NULL with an exception. */
static const PyArrayObject *message_of(PyObject *o, size_t head)
{
    const PyArrayObject *message = (PyArrayObject *)o;
    bool flat = PyArray_Check(o) && PyArray_IS_C_CONTIGUOUS(message);
    if (flat && PyArray_TYPE(message) == NPY_UBYTE && PyArray_SIZE(message) >= (npy_intp)head)
        return message;
    PyErr_SetString(PyExc_TypeError, "heads_compare: expected messages with heads");
    return NULL;
}

/* heads_compare_all: HEADS_SAME or more; -1 with an exception. */
static int heads_compare_all(PyObject *messages, PyObject *sizes, const own_message *own)
{
    int found = HEADS_SAME;
    for (Py_ssize_t r = 0; r < PyList_GET_SIZE(messages) && found < HEADS_OTHER; r++) {
        const PyArrayObject *message = message_of(PyList_GET_ITEM(messages, r), own->head);
        PyObject *size = PySequence_Fast_GET_ITEM(sizes, r);
        int64_t came;
        if (!message || fan_index(size, "sizes", PyExc_ValueError, &came) < 0)
            return -1;
        int here = (int)head_compare(own, PyArray_BYTES(message), came);
        if (here > found)
            found = here;
    }
    return found;
}

static PyObject *heads_compare(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t head;
    int64_t alike;
    if (fan_index(a[3], "head", PyExc_ValueError, &head) < 0)
        return NULL;
    if (fan_index(a[4], "alike", PyExc_ValueError, &alike) < 0)
        return NULL;
    if (alike > head || PyList_GET_SIZE(a[0]) != PySequence_Size(a[1]))
        return PyErr_Format(PyExc_ValueError, "heads_compare: expected a size for each message");
    own_message own = {.head = (size_t)head, .alike = (size_t)alike};
    const PyArrayObject *mine = message_of(a[2], own.head);
    if (!mine)
        return NULL;
    own.data = PyArray_BYTES(mine);
    own.bytes = PyArray_SIZE(mine);
    PyObject *sizes = PySequence_Fast(a[1], "heads_compare: expected a sequence of sizes");
    if (!sizes)
        return NULL;
    int found = heads_compare_all(a[0], sizes, &own);
    Py_DECREF(sizes);
    return found < 0 ? NULL : PyLong_FromLong(found);
}

static PyObject *yield_thread(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS
        sched_yield();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#include "py/declared/ranks.h"
