/* for_tests: functions of a development build for tests/kit/hooks.py. A release has none of them.
 *
 * In order: budgets, failing allocations, memory, planted faults and sorts; the end of a pass. */
#include "py/buffer/buffer_object.h"
#include "device/cuda/cuda.h"
#include "py/arrays/dlpack.h"
#include "py/base/args.h"

#ifdef FAN_TEST

#include "base/mem.h"
#include "base/workers.h"

static PyObject *test_auto_budget(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t alone = 0;
    int64_t held = 0;
    if (fan_number_arg(a[0], "alone", &alone) < 0)
        return NULL;
    if (fan_number_arg(a[1], "held", &held) < 0)
        return NULL;
    fan_auto_budget given = {
        .alone = (uint64_t)alone,
        .held = (uint64_t)held,
    };
    fan_budget_auto_set(a[0] ? &given : NULL);
    fan_auto_budget now = fan_budget_auto();
    return Py_BuildValue("(KK)", (unsigned long long)now.alone, (unsigned long long)now.held);
}

static PyObject *test_fail_at(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t skip = 0;
    int64_t count = 1;
    if (fan_number_arg(a[0], "skip", &skip) < 0)
        return NULL;
    if (fan_number_arg(a[1], "count", &count) < 0)
        return NULL;
    fan_mem_fail_at(skip, count);
    Py_RETURN_NONE;
}

static PyObject *test_memory(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_mem_counts n = fan_mem_get();
    const fan_state *st = fan_state_get();
    for (unsigned i = 0; i < st->nfreelist; i++) /* kept for the next buffers: no leak */
        n.live -= (int64_t)fan_buffer_blocks(fan_buffer_of(st->freelist[i]));
    return Py_BuildValue("(LLL)", (long long)n.live, (long long)n.total, (long long)n.failed);
}

static PyObject *test_tensor_throws(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(fan_tensor_throws());
}

static PyObject *test_helpers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLong(fan_workers_alive());
}

static PyObject *test_fault(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *text = "NONE";
    if (name != Py_None)
        text = PyUnicode_AsUTF8(name);
    if (!text)
        return NULL;
    fan_fault_id id = fan_fault_named(text);
    if (id == FAN_FAULT_NONE && name != Py_None) {
        return PyErr_Format(PyExc_ValueError, "no fault is called %R: base/fault.h has the list",
                            name);
    }
    fan_fault_plant(id);
    Py_RETURN_NONE;
}

static PyObject *test_sort_bounds(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t entries = 0;
    int64_t rows = 0;
    if (fan_number_arg(a[0], "entries", &entries) < 0)
        return NULL;
    if (fan_number_arg(a[1], "rows", &rows) < 0)
        return NULL;
    fan_cuda *c;
    if (FAN_CHECK(fan_driver_open(&c, &err)) < 0)
        return NULL;
    fan_cuda_bound_sorts(c, entries, rows);
    Py_BEGIN_ALLOW_THREADS
        fan_cuda_drop(c);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* stream_required: as fan_stream_arg, which takes None for no stream. */
static int stream_required(PyObject *o, fan_stream **out)
{
    if (fan_stream_arg(o, out) < 0)
        return -1;
    if (!*out)
        return fan_set_error(PyExc_TypeError, "expected streams, got None");
    return 0;
}

static PyObject *test_pass_end(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *result = NULL;
    fan_stream *caller = NULL;
    fan_stream **on = NULL;
    fan_value *values = NULL;
    size_t n = 0;
    size_t nvalues = 0;
    PyObject *given = NULL;
    PyObject *streams = PySequence_Tuple(a[1]);
    if (streams)
        given = PySequence_Tuple(a[2]);
    if (!given || stream_required(a[0], &caller) < 0)
        goto done;
    on = fan_calloc(((size_t)PyTuple_GET_SIZE(streams) + 1) * sizeof *on);
    values = fan_calloc(((size_t)PyTuple_GET_SIZE(given) + 1) * sizeof *values);
    if (!on || !values) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(streams); i++) {
        if (stream_required(PyTuple_GET_ITEM(streams, i), &on[n]) < 0)
            goto done;
        n++;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        if (fan_import(PyTuple_GET_ITEM(given, i), false, true, &values[nvalues]) < 0)
            goto done;
        nvalues++;
    }
    result = FAN_DONE_UNLOCKED(fan_stream_join(caller, on, n, values, nvalues, &err));
done:
    while (n-- > 0)
        fan_stream_drop(on[n]);
    while (nvalues-- > 0)
        fan_value_release(&values[nvalues]);
    fan_free(on);
    fan_free(values);
    fan_stream_drop(caller);
    Py_XDECREF(given);
    Py_XDECREF(streams);
    return result;
}

#include "py/declared/for_tests.h"

#endif
