/* overlap: fanin.overlap, overlaps, overlaps_itself. */
#include "py/verdict.h"

#include "py/region.h"

/* ---- arguments ---- */

/* budget_of: budget=None is the default. */
static int budget_of(PyObject *o, uint64_t *out)
{
    *out = FAN_OVERLAP_BUDGET;
    return o == Py_None ? 0 : fan_budget_arg(o, out);
}

/* arguments: `n` positional ones and budget=. -1 with an exception. */
static int arguments(const char *who, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, Py_ssize_t n,
                     uint64_t *budget)
{
    Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    *budget = FAN_OVERLAP_BUDGET;
    if (nargs != n) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd positional argument%s but %zd were given", who, n,
                     n == 1 ? "" : "s", nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        if (PyUnicode_CompareWithASCIIString(name, "budget") != 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", who, name);
            return -1;
        }
        if (budget_of(args[nargs + i], budget) < 0)
            return -1;
    }
    return 0;
}

static PyObject *overlap(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    FAN_UNINITIALIZED int64_t dims[2][FAN_REGION_DIMS];
    fan_layout_item items[2];
    PyArray_Descr *descr;
    uint64_t budget;
    if (arguments("overlap", args, nargs, kwnames, 2, &budget) < 0)
        return NULL;
    for (int i = 0; i < 2; i++)
        if (fan_region_read(args[i], "overlap", i, dims[i], &items[i], &descr) < 0)
            return NULL;
    if (fan_regions_one_device(items, 2, "overlap") < 0)
        return NULL;
    return fan_verdict_judge(&items[0].region, &items[1].region, budget);
}

static PyObject *overlaps_itself(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames)
{
    FAN_UNINITIALIZED int64_t dims[FAN_REGION_DIMS];
    fan_layout_item item;
    PyArray_Descr *descr;
    uint64_t budget;
    if (arguments("overlaps_itself", args, nargs, kwnames, 1, &budget) < 0 ||
        fan_region_read(args[0], "overlaps_itself", -1, dims, &item, &descr) < 0)
        return NULL;
    return fan_verdict_judge(&item.region, NULL, budget);
}

static PyObject *overlaps(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    uint64_t budget;
    return arguments("overlaps", args, nargs, kwnames, 1, &budget) < 0 ? NULL : fan_overlaps_of(args[0], budget);
}

PyMethodDef fan_overlap_functions[] = {
    {"overlap", (PyCFunction)(void (*)(void))overlap, METH_FASTCALL | METH_KEYWORDS,
     "overlap(a, b, /, *, budget=None)\n--\n\n"
     "Whether arrays a and b share a byte of memory: exactly, for any shapes, strides and dtypes.\n\n"
     "Only addresses, shapes and strides are compared; a file that is mapped twice at different addresses counts\n"
     "as disjoint. Most pairs are decided in a fraction of a microsecond.\n\n"
     "Parameters\n"
     "----------\n"
     "a, b : array\n"
     "    An ndarray, a torch or JAX tensor, an array on a device of fanin, or any object with a buffer or\n"
     "    DLPack.\n"
     "budget : int or math.inf\n"
     "    Bytes of a table that a few hard pairs need; beyond it the verdict is \"unknown\". Default: 256 MiB.\n\n"
     "Returns\n"
     "-------\n"
     "Verdict\n"
     "    With a witness if they overlap.\n\n"
     "Raises\n"
     "------\n"
     "TypeError\n"
     "    An object that is no single array in memory (sparse, masked, a tracer).\n"
     "ValueError\n"
     "    Arrays of different devices.\n\n"
     "Examples\n"
     "--------\n"
     ">>> m = np.zeros((6, 9))\n"
     ">>> fanin.overlap(m[0:4, 0:4], m[2:6, 0:4])\n"
     "<fanin.Verdict: overlap, at (2, 0) and (0, 0)>\n"
     ">>> bool(fanin.overlap(m[:, 0], m[:, 1]))\n"
     "False"},
    {"overlaps", (PyCFunction)(void (*)(void))overlaps, METH_FASTCALL | METH_KEYWORDS,
     "overlaps(arrays, /, *, budget=None)\n--\n\n"
     "Which of several arrays share memory: the pairs, their components, the indices of all that take part.\n\n"
     "Near-linear in the number of arrays for pieces, columns, blocks, step slices and heads of common arrays;\n"
     "only `pairs`, which is made at its first use, takes as long as there are pairs. Raises the errors of\n"
     "`overlap`, with the name of the array.\n\n"
     "Parameters\n"
     "----------\n"
     "arrays : sequence of arrays\n"
     "    As for `overlap`.\n"
     "budget : int or math.inf\n"
     "    For each pair, as for `overlap`.\n\n"
     "Examples\n"
     "--------\n"
     ">>> flat = np.zeros(100)\n"
     ">>> w, b = flat[:90].reshape(9, 10), flat[90:]\n"
     ">>> fanin.overlaps([w, b, flat[85:95], np.zeros(3)]).components\n"
     "((0, 1, 2),)\n"
     ">>> fanin.overlaps([w[:, i] for i in range(10)]).pairs\n"
     "()"},
    {"overlaps_itself", (PyCFunction)(void (*)(void))overlaps_itself, METH_FASTCALL | METH_KEYWORDS,
     "overlaps_itself(a, /, *, budget=None)\n--\n\n"
     "Whether two different elements of array a share a byte of memory, so that writing one changes the other.\n\n"
     "Exact like `overlap`, with the same parameters and errors; the witness is the two indices.\n\n"
     ">>> fanin.overlaps_itself(np.broadcast_to(np.zeros(3), (2, 3)))\n"
     "<fanin.Verdict: overlap, at (1, 0) and (0, 0)>\n"
     ">>> windows = np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3)\n"
     ">>> fanin.overlaps_itself(windows).kind\n"
     "'overlap'"},
    {NULL, NULL, 0, NULL},
};
