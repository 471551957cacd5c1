/* options: process-wide switches and counters, and what only tests ask for. */
#include "py/turn.h"

#include "array/convert.h"
#include "array/exact.h"
#include "array/sum.h"
#include "array/sum_loops.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/workers.h"

#include <math.h>

static PyObject *get_options(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    size_t pool = fan_pool_get().limit;
    return Py_BuildValue("{s:N,s:N,s:N,s:s,s:i,s:N,s:N}", "debug", PyBool_FromLong(fan_get_debug()),
                         "warn_stream_mismatch", PyBool_FromLong(fan_get_warn_mismatch()), "budget",
                         fan_budget_wrap(fan_state_get()->budget), "isa", fan_sum_isa(), "threads",
                         fan_workers_chosen(), "pool_bytes", fan_budget_wrap(pool == SIZE_MAX ? UINT64_MAX : pool),
                         "capture_redirect", PyBool_FromLong(fan_get_capture_redirect()));
}

/* isa_arg: the name of an instruction set that this machine has. */
static const char *isa_arg(PyObject *o)
{
    char names[64] = "";
    const char *wish = PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : NULL;
    if (!wish && PyErr_Occurred())
        return NULL;
    for (size_t i = 0; fan_sum_isa_at(i); i++) {
        if (wish && strcmp(fan_sum_isa_at(i), wish) == 0)
            return fan_sum_isa_at(i);
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s'%s'", i ? ", " : "", fan_sum_isa_at(i));
    }
    PyErr_Format(PyExc_ValueError, "isa=%R: this machine has %s", o, names);
    return NULL;
}

/* threads_arg: how many; 0, which Python's side does not let through, is the default. */
static int threads_arg(PyObject *o)
{
    long n = PyLong_CheckExact(o) ? PyLong_AsLong(o) : -1;
    if (n >= 0 && n <= FAN_TEAM_MOST)
        return (int)n;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "threads=%R: expected a number of threads from 1 to %d", o, FAN_TEAM_MOST);
    return -1;
}

/* pool_arg: a number of bytes that may be held, math.inf for no bound. */
static int pool_arg(PyObject *o, size_t *out)
{
    double f = -1;
    if (PyBool_Check(o) || (!PyFloat_Check(o) && !PyIndex_Check(o)))
        return fan_refuse(PyExc_TypeError, "pool_bytes: expected a number of bytes, math.inf or None, got %R", o);
    if (PyFloat_Check(o)) {
        f = PyFloat_AS_DOUBLE(o);
    } else {
        PyObject *i = PyNumber_Index(o);
        int positive = i ? PyObject_RichCompareBool(i, fan_state_get()->zero, Py_GE) : -1;
        if (positive > 0) {
            *out = PyLong_AsSize_t(i);
            if (*out == (size_t)-1 && PyErr_Occurred())
                PyErr_Clear(); /* more than any machine has: no bound */
        }
        Py_XDECREF(i);
        if (positive != 0)
            return positive < 0 ? -1 : 0;
    }
    if (!(f >= 0) || (isfinite(f) && f != floor(f)))
        return fan_refuse(PyExc_ValueError,
                          "pool_bytes: expected a whole number of bytes from 0 on, or math.inf, got %R", o);
    *out = f >= 0x1p63 ? SIZE_MAX : (size_t)f;
    return 0;
}

/* set_options: each argument None, or the new value; all are checked before any is set. */
static PyObject *set_options(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *debug, *warn, *budget, *isa, *threads, *pool, *redirect;
    const char *set = NULL;
    int team = 0;
    uint64_t bytes = 0;
    size_t most = 0;
    int on = 0, warns = 0, redirects = 0;
    if (!PyArg_ParseTuple(args, "OOOOOOO:set_options", &debug, &warn, &budget, &isa, &threads, &pool, &redirect))
        return NULL;
    on = debug == Py_None ? 0 : PyObject_IsTrue(debug);
    warns = warn == Py_None ? 0 : PyObject_IsTrue(warn);
    redirects = redirect == Py_None ? 0 : PyObject_IsTrue(redirect);
    if (on < 0 || warns < 0 || redirects < 0 || (budget != Py_None && fan_buffer_budget_arg(budget, &bytes) < 0) ||
        (pool != Py_None && pool_arg(pool, &most) < 0))
        return NULL;
    if ((isa != Py_None && !(set = isa_arg(isa))) || (threads != Py_None && (team = threads_arg(threads)) < 0))
        return NULL;
    if (debug != Py_None) {
        fan_set_debug(on);
#ifndef FAN_TEST /* where it is always on */
        fan_pool_set_poison(on);
#endif
    }
    if (pool != Py_None)
        fan_pool_set_limit(most);
    if (warn != Py_None)
        fan_set_warn_mismatch(warns);
    if (redirect != Py_None)
        fan_set_capture_redirect(redirects);
    if (budget != Py_None)
        fan_state_get()->budget = bytes;
    if (set)
        (void)fan_sum_set_isa(set);
    if (threads != Py_None) {
        Py_BEGIN_ALLOW_THREADS fan_workers_set(team); /* waits for a sum under way */
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *counters(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return fan_process_counters(); }

static PyObject *pool(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_pool_counts n = fan_pool_get();
    return Py_BuildValue("{s:n,s:n,s:K,s:K}", "pool_bytes", (Py_ssize_t)n.held, "pool_peak_bytes", (Py_ssize_t)n.peak,
                         "pool_hits", (unsigned long long)n.hits, "pool_misses", (unsigned long long)n.misses);
}

static PyObject *trim(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    size_t gone;
    Py_BEGIN_ALLOW_THREADS gone = fan_pool_trim();
    Py_END_ALLOW_THREADS return PyLong_FromSize_t(gone);
}

static PyObject *auto_budget(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_auto_budget now = fan_budget_auto();
    return Py_BuildValue("(KK)", (unsigned long long)now.alone, (unsigned long long)now.held);
}

static PyObject *test_auto_budget(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long alone = 0, held = 0;
    if (!PyArg_ParseTuple(args, "|KK:_test_auto_budget", &alone, &held))
        return NULL;
    fan_budget_auto_set(PyTuple_GET_SIZE(args) ? &(fan_auto_budget){alone, held} : NULL);
    Py_RETURN_NONE;
}

static PyObject *test_fail_at(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long skip, count = 1;
    if (!PyArg_ParseTuple(args, "L|L:_test_fail_at", &skip, &count))
        return NULL;
    fan_mem_fail_at(skip, count);
    Py_RETURN_NONE;
}

static PyObject *test_memory(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_mem_counts n = fan_mem_get();
    n.live -= (int64_t)fan_state_get()->nspares; /* kept for the next buffers: no leak */
    return Py_BuildValue("(LLL)", (long long)n.live, (long long)n.total, (long long)n.failed);
}

/* test_read: every byte once, and nothing else: the floor under any sum. */
static PyObject *test_read(PyObject *Py_UNUSED(module), PyObject *o)
{
    Py_buffer view;
    uint64_t all;
    if (PyObject_GetBuffer(o, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS all = fan_sum_read(view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(all);
}

/* test_sum: fan_sum of gap-free buffers of one dtype, as it stands: (statistics or None). */
static PyObject *test_sum(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { MOST = 64 };
    PyObject *into, *sources, *answer = NULL;
    const char *name;
    int with_stats, parallel = 1;
    FAN_UNCLEARED Py_buffer view[MOST + 1];
    Py_ssize_t n, held = 0;
    FAN_UNCLEARED fan_array array[MOST + 1];
    FAN_UNCLEARED fan_operand in[MOST];
    fan_stats stats;
    if (!PyArg_ParseTuple(args, "OO!sp|p:_test_sum", &into, &PyTuple_Type, &sources, &name, &with_stats, &parallel))
        return NULL;
    fan_dtype d = fan_dtype_from_name(name);
    n = PyTuple_GET_SIZE(sources);
    if (d == FAN_DT_NONE || n < 1 || n > MOST) {
        PyErr_SetString(PyExc_ValueError, "expected a dtype and 1 to 64 sources");
        return NULL;
    }
    for (; held <= n; held++) {
        Py_ssize_t k = held; /* the last is the result */
        if (PyObject_GetBuffer(k < n ? PyTuple_GET_ITEM(sources, k) : into, &view[k],
                               k < n ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
            goto done;
        fan_array *a = &array[k];
        memset(a, 0, sizeof *a);
        a->data = view[k].buf;
        a->dtype = d;
        a->ndim = 1;
        a->shape = a->dims;
        a->strides = a->dims + 1;
        a->size = a->dims[0] = (int64_t)view[k].len / (int64_t)fan_dtype_size(d);
        a->dims[1] = (int64_t)fan_dtype_size(d);
        if (k < n)
            in[k] = (fan_operand){.array = a, .acc = fan_dtype_accumulate(d)};
        if (a->size != array[0].size) {
            held++;
            PyErr_SetString(PyExc_ValueError, "expected buffers of one size");
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS fan_sum(&array[n], in, (size_t)n,
                                   &(fan_sum_how){.stats = with_stats ? &stats : NULL, .parallel = parallel});
    Py_END_ALLOW_THREADS if (!with_stats) answer = Py_NewRef(Py_None);
    else answer = Py_BuildValue("{s:K,s:d,s:d,s:K,s:N}", "count", (unsigned long long)stats.count, "sumsq", stats.sumsq,
                                "absmax", stats.absmax, "nonfinite", (unsigned long long)stats.nonfinite, "bad",
                                stats.bad == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(stats.bad));
done:
    while (held--)
        PyBuffer_Release(&view[held]);
    return answer;
}

static PyObject *test_team(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("(ii)", fan_workers_get(), fan_workers_alive());
}

/* exact_sum: in one go, or over states, `step` arrays at a time. */
static fan_status exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d,
                            const fan_scale *scale, size_t step)
{
    if (step == 0) {
        fan_exact_sum(out, in, n, d, scale);
        return FAN_OK;
    }
    void *state = fan_alloc(fan_exact_state_size(d) * (size_t)out->size);
    if (!state)
        return FAN_ERR_NOMEM;
    fan_exact_start(state, d, out->size);
    for (size_t k = 0; k < n; k += step)
        fan_exact_add(state, d, in + k, n - k < step ? n - k : step);
    fan_exact_finish(out, state, d, scale);
    fan_free(state);
    return FAN_OK;
}

static PyObject *test_exact(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *target, *arrays, *fast = NULL, *result = NULL;
    Py_complex factor = {1, 0};
    Py_ssize_t step = 0, n, had = 0;
    int isa = -1, scaled = 0;
    fan_value out = {0}, *in = NULL;
    const fan_array **terms = NULL;
    fan_dtype d;
    fan_status status;
    if (!PyArg_ParseTuple(args, "OO|pDni:_test_exact", &target, &arrays, &scaled, &factor, &step, &isa) ||
        fan_import_out(target, &out) < 0)
        return NULL;
    fast = PySequence_Tuple(arrays);
    n = fast ? PyTuple_GET_SIZE(fast) : 0;
    in = fan_calloc((size_t)(n + 1) * sizeof *in);
    terms = fan_calloc((size_t)(n + 1) * sizeof *terms);
    if (!fast || !in || !terms) {
        if (fast)
            PyErr_NoMemory();
        goto done;
    }
    d = FAN_DT_NONE;
    for (; had < n; had++) {
        if (fan_import(PyTuple_GET_ITEM(fast, had), false, false, &in[had]) < 0)
            goto done;
        terms[had] = in[had].array;
        if (!terms[had] || !fan_array_same_shape(terms[had], out.array)) {
            had++;
            PyErr_SetString(PyExc_ValueError, "_test_exact: expected dense arrays of one shape");
            goto done;
        }
        d = had ? fan_dtype_promote(d, terms[had]->dtype) : terms[had]->dtype;
    }
    if (n == 0 || d == FAN_DT_NONE || !fan_exact_fits(d) || fan_dtype_kind(d) != fan_dtype_kind(out.array->dtype)) {
        PyErr_SetString(PyExc_ValueError, "_test_exact: expected one array at least, and floats");
        goto done;
    }
    fan_exact_isa(isa);
    Py_BEGIN_ALLOW_THREADS status = exact_sum(
        out.array, terms, (size_t)n, d, &(fan_scale){.on = scaled, .re = factor.real, .im = factor.imag}, (size_t)step);
    Py_END_ALLOW_THREADS fan_exact_isa(-1);
    result = status == FAN_OK ? PyLong_FromLongLong((long long)fan_exact_slow()) : PyErr_NoMemory();
done:
    for (Py_ssize_t i = 0; i < had; i++)
        fan_value_drop(&fan_python, &in[i]);
    fan_free(in);
    fan_free(terms);
    Py_XDECREF(fast);
    fan_value_drop(&fan_python, &out);
    return result;
}

#ifdef FAN_TEST
static PyObject *test_fault(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *text = name == Py_None ? "NONE" : PyUnicode_AsUTF8(name);
    if (!text)
        return NULL;
    fan_fault_id id = fan_fault_named(text);
    if (id == FAN_FAULT_NONE && name != Py_None)
        return PyErr_Format(PyExc_ValueError, "no fault is called %R: base/fault.h has the list", name);
    fan_fault_plant(id);
    Py_RETURN_NONE;
}
#endif

static void seen_counters(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                          PyObject *Py_UNUSED(kwnames))
{
    fan_touch_thing(FAN_THING_COUNTERS, 0, FAN_TOUCH_WEIGHS);
}

FAN_TURN_NONE(counters, seen_counters)

PyMethodDef fan_option_functions[] = {
    {"get_options", get_options, METH_NOARGS, "get_options()\n--\n\nThe process's options, as a dict."},
    {"auto_budget", auto_budget, METH_NOARGS,
     "auto_budget()\n--\n\nWhat budget=\"auto\" allows, in bytes: of what a buffer alone keeps alive, and of what "
     "somebody else holds."},
    {"_test_auto_budget", test_auto_budget, METH_VARARGS,
     "_test_auto_budget(alone, held, /)\n--\n\nTests: other limits than auto_budget's, of buffers made from now on; "
     "without arguments: those again."},
    {"_test_fail_at", test_fail_at, METH_VARARGS,
     "_test_fail_at(skip, count=1, /)\n--\n\nTests: let `skip` allocations pass and fail the `count` after them (-1: "
     "all); skip -1: off."},
    {"_test_memory", test_memory, METH_NOARGS,
     "_test_memory()\n--\n\nTests: blocks alive, allocations ever, allocations refused."},
    {"_test_read", test_read, METH_O, "_test_read(buffer, /)\n--\n\nBenchmarks: read every byte once."},
    {"_test_sum", test_sum, METH_VARARGS,
     "_test_sum(out, sources, dtype, stats, parallel=True, /)\n--\n\nTests: one fold of gap-free buffers; its "
     "statistics if they are asked for."},
    {"_test_team", test_team, METH_NOARGS,
     "_test_team()\n--\n\nTests: threads that work together, helpers that are alive."},
    {"set_options", set_options, METH_VARARGS,
     "set_options(debug, warn_stream_mismatch, budget, isa, threads, pool_bytes, capture_redirect, /)\n--\n\nSet those "
     "that are not None."},
    {"counters", counters_turn, METH_NOARGS,
     "counters()\n--\n\nWhat all buffers of this process have done so far: a fanin.Counters."},
    {"pool", pool, METH_NOARGS, "pool()\n--\n\nThe figures of the pool of memory, as a dict."},
    {"trim", trim, METH_NOARGS,
     "trim()\n--\n\nGive back to the system what is kept of the memory of large results that are gone; returns how "
     "many bytes that were.\n\n"
     "How much is kept at most is `set_options(pool_bytes=)`.\n\n"
     ">>> total = fanin.add_n([np.ones(1 << 18), np.ones(1 << 18)])\n"
     ">>> del total\n"
     ">>> fanin.trim() >= 2 ** 21\n"
     "True\n"
     ">>> fanin.trim()\n"
     "0\n"},
    {"_test_exact", test_exact, METH_VARARGS,
     "_test_exact(out, arrays, scaled=False, scale=1, step=0, isa=-1, /)\n--\n\nTests: the exact sum into out; step: "
     "over states, so many arrays at a time. "
     "Returns how many elements went the integer path so far."},
#ifdef FAN_TEST
    {"_test_fault", test_fault, METH_O,
     "_test_fault(name, /)\n--\n\nTests: plant the fault of that name (base/fault.h); None: none."},
#endif
    {NULL, NULL, 0, NULL},
};
