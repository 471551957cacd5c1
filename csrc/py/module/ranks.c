/* ranks: what fanin.dist needs of the core besides windows (window.c). */
#include "py/base/args.h"

#include "base/trace.h"

#include <sched.h>

static PyObject *trace_bucket(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_trace_line line = {.kind = FAN_TRACE_BUCKET, .device = -1, .start_us = -1, .end_us = -1};
    const Py_ssize_t ranks = PyTuple_GET_SIZE(a[5]);
    const char *label = PyUnicode_AsUTF8(a[0]);
    int64_t group, number, bucket, begin, bytes;
    if (!fan_trace_on())
        Py_RETURN_NONE;
    if (!label || fan_index(a[1], "group", PyExc_ValueError, &group) < 0 ||
        fan_index(a[2], "number", PyExc_ValueError, &number) < 0 ||
        fan_index(a[3], "bucket", PyExc_ValueError, &bucket) < 0 ||
        fan_index(a[4], "begin_ns", PyExc_ValueError, &begin) < 0)
        return NULL;
    PyOS_snprintf(line.label, sizeof line.label, "%s", label);
    line.buffer = (uint64_t)group;
    line.key = number;
    line.slot = (int32_t)bucket;
    line.begin_ns = (uint64_t)begin;
    for (int pass = 0; pass < 2; pass++) {
        for (Py_ssize_t r = 0; r < ranks; r++) {
            if (fan_index(PyTuple_GET_ITEM(a[5], r), "sends", PyExc_ValueError, &bytes) < 0)
                return NULL;
            if (pass == 0)
                line.bytes += (uint64_t)bytes;
            else if (bytes > 0) {
                fan_trace_line one = line;
                one.kind = FAN_TRACE_SEND;
                one.bytes = (uint64_t)bytes;
                one.to = (uint64_t)r;
                fan_trace_put(&one);
            }
        }
        if (pass == 0)
            fan_trace_put(&line);
    }
    Py_RETURN_NONE;
}

static PyObject *yield_thread(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS
        sched_yield();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#include "py/declared/ranks.h"
