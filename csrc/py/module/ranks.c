/* ranks: functions of the core for fanin.dist besides windows (window.c): lines of a bucket in the
 * trace, a copy, and a yield. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"

#include "base/fault.h"
#include "base/thread.h"
#include "base/trace.h"

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

static PyObject *copy_plain(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    if (!PyArray_CheckExact(a[0]) || !PyArray_CheckExact(a[1]))
        Py_RETURN_FALSE;
    PyArrayObject *from = (PyArrayObject *)a[0];
    PyArrayObject *to = (PyArrayObject *)a[1];
    if (PyArray_DESCR(from) != PyArray_DESCR(to) || !PyArray_SAMESHAPE(from, to))
        Py_RETURN_FALSE;
    if (fan_thread_get_hooks()) { /* a step of an explored schedule */
        if (fan_sched_enter_or_raise() < 0)
            return NULL;
        fan_sched_access(FAN_THING_HOST_MEMORY, 0, FAN_SCHED_WRITE);
    }
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

static PyObject *yield_thread(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS
        sched_yield();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#include "py/declared/ranks.h"
