/* inside: a library that only tests and benchmarks load (tests/kit/inside.py builds it): the pure
 * rules, and single functions of array/, as Python has them. It has a copy of its own of what it
 * shows, built for tests (FAN_TEST).
 *
 * An array is (address, dtype's name, shape, strides in bytes); who calls keeps its
 * memory. */
#include "inside.h"

#include "array/exact.h"
#include "array/window.h"
#include "array/exact_loops.h"
#include "array/overlap.h"
#include "array/sum.h"
#include "array/sum_isa.h"
#include "base/fault.h"
#include "base/mem.h"

enum {
    MOST = 4096
};

int inside_ints(PyObject *tuple, int64_t *out)
{
    Py_ssize_t n = PyTuple_Check(tuple) ? PyTuple_GET_SIZE(tuple) : -1;
    if (n < 0 || n > FAN_MAX_NDIM) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of at most 64 integers");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    return PyErr_Occurred() ? -1 : (int)n;
}

/* An array and room for its axes. */
typedef struct view {
    fan_array array;
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
} view;

static int view_arg(PyObject *o, void *out)
{
    view *v = out;
    unsigned long long address;
    const char *name;
    PyObject *shape, *strides;
    int ndim;
    memset(v, 0, sizeof *v);
    if (!PyArg_ParseTuple(o, "KsOO", &address, &name, &shape, &strides) ||
        (ndim = inside_ints(shape, v->shape)) < 0 || inside_ints(strides, v->strides) != ndim) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "as many strides as extents");
        return 0;
    }
    v->array = (fan_array){.data = (char *)(uintptr_t)address, // NOLINT: who calls keeps the memory
                           .dtype = fan_dtype_from_name(name),
                           .ndim = ndim,
                           .size = 1,
                           .shape = v->shape,
                           .strides = v->strides,
                           .writable = true};
    for (int i = 0; i < ndim; i++)
        v->array.size *= v->shape[i];
    if (v->array.dtype == FAN_DT_NONE) {
        PyErr_Format(PyExc_ValueError, "no dtype is called %s", name);
        return 0;
    }
    return 1;
}

/* views_arg: 1 to MOST arrays of the shape of `like`, from a tuple; NULL with an exception. Free
 * with PyMem_Free. */
static view *views_arg(PyObject *tuple, const fan_array *like, size_t *n)
{
    *n = (size_t)PyTuple_GET_SIZE(tuple);
    view *made = *n >= 1 && *n <= MOST ? PyMem_Calloc(*n, sizeof *made) : NULL;
    if (!made) {
        PyErr_SetString(PyExc_ValueError, "expected 1 to 4096 arrays");
        return NULL;
    }
    for (size_t i = 0; i < *n; i++) {
        if (!view_arg(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), &made[i]))
            goto fail;
        if (!fan_array_same_shape(&made[i].array, like)) {
            PyErr_SetString(PyExc_ValueError, "expected arrays of one shape");
            goto fail;
        }
    }
    return made;
fail:
    PyMem_Free(made);
    return NULL;
}

/* read_all: every byte once, and nothing else: the floor under any sum. */
static PyObject *read_all(PyObject *Py_UNUSED(module), PyObject *o)
{
    Py_buffer b;
    uint64_t all;
    if (PyObject_GetBuffer(o, &b, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        all = fan_sum_read(b.buf, (size_t)b.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&b);
    return PyLong_FromUnsignedLongLong(all);
}

static PyObject *sum(PyObject *Py_UNUSED(module), PyObject *args)
{
    view out, *in;
    PyObject *tuple;
    int with_stats = 0;
    int parallel = 1;
    size_t n;
    fan_operand terms[MOST];
    fan_stats stats;
    if (!PyArg_ParseTuple(args, "O&O!|pp:sum", view_arg, &out, &PyTuple_Type, &tuple, &with_stats,
                          &parallel) ||
        !(in = views_arg(tuple, &out.array, &n)))
        return NULL;
    for (size_t i = 0; i < n; i++) {
        terms[i] =
            (fan_operand){.array = &in[i].array, .acc = fan_dtype_accumulate(in[i].array.dtype)};
    }
    Py_BEGIN_ALLOW_THREADS
        fan_sum(&out.array, terms, n,
                &(fan_sum_options){.stats = with_stats ? &stats : NULL, .parallel = parallel});
    Py_END_ALLOW_THREADS
    PyMem_Free(in);
    if (!with_stats)
        Py_RETURN_NONE;
    return Py_BuildValue("{s:K,s:d,s:d,s:K}", "count", (unsigned long long)stats.count, "sumsq",
                         fan_stats_sumsq(&stats), "absmax", stats.absmax, "nonfinite",
                         (unsigned long long)stats.nonfinite);
}

/* exact_sum: in one go, or over a window, `step` arrays at a time. */
static fan_status exact_sum(const fan_array *out, const fan_array *const *in, size_t n, fan_dtype d,
                            const fan_scale *scale, size_t step)
{
    if (step == 0) {
        fan_exact_sum(out, in, n, d, scale);
        return FAN_OK;
    }
    fan_window *sum = fan_window_new(d, out->size);
    fan_status status = sum ? FAN_OK : FAN_ERR_NOMEM;
    for (size_t k = 0; k < n && status == FAN_OK; k += step)
        status = fan_window_add(sum, in + k, n - k < step ? n - k : step, NULL);
    if (status == FAN_OK)
        fan_window_round(out, sum, scale);
    fan_window_free(sum);
    return status;
}

static PyObject *exact(PyObject *Py_UNUSED(module), PyObject *args)
{
    view out, *in;
    PyObject *tuple;
    Py_complex factor = {1, 0};
    Py_ssize_t step = 0;
    size_t n;
    int isa = -1;
    int scaled = 0;
    const fan_array *terms[MOST];
    fan_dtype d = FAN_DT_NONE;
    fan_status status;
    if (!PyArg_ParseTuple(args, "O&O!|pDni:exact", view_arg, &out, &PyTuple_Type, &tuple, &scaled,
                          &factor, &step, &isa) ||
        !(in = views_arg(tuple, &out.array, &n)))
        return NULL;
    for (size_t i = 0; i < n; i++) {
        terms[i] = &in[i].array;
        d = i ? fan_dtype_promote(d, terms[i]->dtype) : terms[i]->dtype;
    }
    if (d == FAN_DT_NONE || !fan_exact_fits(d) ||
        fan_dtype_kind(d) != fan_dtype_kind(out.array.dtype)) {
        PyMem_Free(in);
        PyErr_SetString(PyExc_ValueError, "exact: expected floats");
        return NULL;
    }
    fan_exact_isa(isa);
    status =
        exact_sum(&out.array, terms, n, d,
                  &(fan_scale){.on = scaled, .re = factor.real, .im = factor.imag}, (size_t)step);
    fan_exact_isa(-1);
    PyMem_Free(in);
    return status == FAN_OK ? PyLong_FromLongLong((long long)fan_exact_slow()) : PyErr_NoMemory();
}

/* overlap: the same question `times` times, to see how long one takes. */
static PyObject *overlap(PyObject *Py_UNUSED(module), PyObject *args)
{
    view a, b;
    fan_region one, two;
    fan_verdict v = FAN_OVERLAP_HARD;
    int times;
    if (!PyArg_ParseTuple(args, "O&O&i:overlap", view_arg, &a, view_arg, &b, &times))
        return NULL;
    one = fan_region_of(&a.array);
    two = fan_region_of(&b.array);
    for (int i = 0; i < times; i++)
        (void)fan_overlap(&one, &two, 0, NULL, NULL, &v, NULL);
    return PyUnicode_FromString(fan_verdict_kind(v));
}

static PyObject *fault(PyObject *Py_UNUSED(module), PyObject *o)
{
    const char *name = o == Py_None ? NULL : PyUnicode_AsUTF8(o);
    fan_fault_id id = name ? fan_fault_named(name) : FAN_FAULT_NONE;
    if (o != Py_None && id == FAN_FAULT_NONE) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "no fault is called %R", o);
        return NULL;
    }
    atomic_store(&fan_fault_planted, (int)id);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"read_all", read_all, METH_O, "read_all(buffer, /)\n--\n\nRead every byte once."},
    {"sum", sum, METH_VARARGS,
     "sum(out, sources, stats=False, parallel=True, /)\n--\n\nfan_sum; its statistics if they are "
     "asked for."},
    {"exact", exact, METH_VARARGS,
     "exact(out, sources, scaled=False, scale=1, step=0, isa=-1, /)\n--\n\nThe exact sum into out; "
     "step: over states, "
     "so many arrays at a time. Returns how many elements went the integer path so far."},
    {"overlap", overlap, METH_VARARGS,
     "overlap(a, b, times, /)\n--\n\nThe verdict's kind after a short search, asked for `times` "
     "times."},
    {"fault", fault, METH_O,
     "fault(name, /)\n--\n\nPlants a fault of base/fault.h here; None: takes it away."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "inside", .m_size = 0,
                                    .m_methods = functions};

PyMODINIT_FUNC PyInit_inside(void);

PyMODINIT_FUNC PyInit_inside(void)
{
    PyObject *m = PyModule_Create(&module);
    if (m && PyModule_AddFunctions(m, inside_rules) < 0)
        Py_CLEAR(m);
    return m;
}
