/* overlap: which arrays share memory. fanin._overlap has the public functions and classes. */
#include "base/interrupt.h"
#include "base/mem.h"
#include "py/base/args.h"
#include "py/arrays/region.h"

#define CAPSULE "fanin.overlaps"

static void free_list(PyObject *capsule)
{
    fan_overlaps_free(PyCapsule_GetPointer(capsule, CAPSULE));
}

/* verdict_wrap: None: disjoint; the two indices of an overlap; a str: the reason for "unknown". */
static PyObject *verdict_wrap(fan_verdict v, const fan_region *a, const fan_region *b,
                              int64_t (*at)[FAN_MAX_NDIM])
{
    if (v == FAN_OVERLAP_DISJOINT)
        Py_RETURN_NONE;
    return v == FAN_OVERLAP_YES
               ? Py_BuildValue("(NN)", fan_ints(a->ndim, at[0]), fan_ints(b->ndim, at[1]))
               : PyUnicode_FromString(fan_verdict_words(v));
}

/* judge: first a short search; a hard pair is decided without the GIL. b NULL: a itself. */
static PyObject *judge(const fan_region *a, const fan_region *b, uint64_t budget)
{
    FAN_UNINITIALIZED int64_t at[2][FAN_MAX_NDIM];
    FAN_UNINITIALIZED fan_error err;
    fan_verdict v;
    fan_status status;
    err.text[0] = '\0';
    status = b ? fan_overlap(a, b, 0, at[0], at[1], &v, &err)
               : fan_overlap_itself(a, 0, at[0], at[1], &v, &err);
    if (status == FAN_OK && v == FAN_OVERLAP_HARD && budget > 0) {
        Py_BEGIN_ALLOW_THREADS
            status = b ? fan_overlap(a, b, budget, at[0], at[1], &v, &err)
                       : fan_overlap_itself(a, budget, at[0], at[1], &v, &err);
        Py_END_ALLOW_THREADS
    }
    return status == FAN_OK ? verdict_wrap(v, a, b ? b : a, at) : fan_raise(status, &err);
}

static PyObject *overlap(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    FAN_UNINITIALIZED int64_t dims[2][FAN_REGION_DIMS];
    fan_layout_item items[2];
    PyArray_Descr *descr;
    uint64_t budget;
    if (fan_overlap_budget_arg(a[2], &budget) < 0)
        return NULL;
    for (int i = 0; i < 2; i++)
        if (fan_region_read(a[i], "overlap", i, dims[i], &items[i], &descr) < 0)
            return NULL;
    if (fan_regions_one_device(items, 2, "overlap") < 0)
        return NULL;
    return judge(&items[0].region, &items[1].region, budget);
}

static PyObject *overlaps_itself(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    FAN_UNINITIALIZED int64_t dims[FAN_REGION_DIMS];
    fan_layout_item item;
    PyArray_Descr *descr;
    uint64_t budget;
    if (fan_overlap_budget_arg(a[1], &budget) < 0 ||
        fan_region_read(a[0], "overlaps_itself", -1, dims, &item, &descr) < 0)
        return NULL;
    return judge(&item.region, NULL, budget);
}

static PyObject *overlaps(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_regions r = {.n = 0};
    fan_region *regions = NULL;
    uint32_t *labels = NULL;
    fan_overlaps *list = NULL;
    PyObject *numbers = NULL, *capsule = NULL, *made = NULL;
    fan_interrupt interrupt;
    fan_error err = {0};
    fan_status status;
    uint64_t budget;
    size_t components;
    bool exact, easy;
    if (fan_overlap_budget_arg(a[1], &budget) < 0 || fan_regions_read(a[0], "overlaps", &r) < 0)
        return NULL;
    if (fan_regions_one_device(r.items, r.n, "overlaps") < 0)
        goto done;
    regions = fan_alloc(r.n * sizeof *regions);
    labels = fan_alloc(r.n * sizeof *labels);
    if (!regions || !labels) {
        PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < r.n; i++)
        regions[i] = r.items[i].region;
    Py_BEGIN_ALLOW_THREADS
        fan_interrupt_begin(&interrupt, fan_check_signals, &err);
        status = fan_overlaps_new(regions, r.n, &list, &err);
        if (status == FAN_OK)
            status = fan_overlaps_components(list, budget, labels, &components, &exact, &err);
        status = fan_interrupt_end(&interrupt, status);
    Py_END_ALLOW_THREADS;
    if (status != FAN_OK) {
        fan_raise(status, &err);
        goto done;
    }
    numbers = PyList_New(0);
    for (size_t i = 0; numbers && i < r.n; i++)
        fan_list_add(&numbers, PyLong_FromUnsignedLong(labels[i]));
    numbers = fan_tuple_of(numbers);
    capsule = numbers ? PyCapsule_New(list, CAPSULE, free_list) : NULL;
    if (capsule) {
        easy = fan_overlaps_are_easy(list);
        list = NULL;
        made = Py_BuildValue("(OOnOO)", capsule, numbers, (Py_ssize_t)components,
                             exact ? Py_True : Py_False, easy ? Py_True : Py_False);
    }
done:
    Py_XDECREF(capsule);
    Py_XDECREF(numbers);
    fan_overlaps_free(list);
    fan_free(regions);
    fan_free(labels);
    fan_regions_fini(&r);
    return made;
}

static PyObject *overlaps_verdict(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const fan_overlaps *list = PyCapsule_GetPointer(a[0], CAPSULE);
    uint64_t budget;
    int64_t at[2];
    if (!list || fan_overlap_budget_arg(a[3], &budget) < 0)
        return NULL;
    for (int i = 0; i < 2; i++) {
        if (fan_index(a[1 + i], "verdict", PyExc_IndexError, &at[i]) < 0)
            return NULL;
        if ((uint64_t)at[i] >= fan_overlaps_count(list))
            return PyErr_Format(PyExc_IndexError,
                                "verdict: there is no array %lld: expected 0 to %zd",
                                (long long)at[i], (Py_ssize_t)fan_overlaps_count(list) - 1);
    }
    return judge(fan_overlaps_region(list, (size_t)at[0]), fan_overlaps_region(list, (size_t)at[1]),
                 budget);
}

static PyObject *overlaps_pairs(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *lists[2], *made = NULL;
    fan_pair *pairs = NULL;
    size_t n = 0;
    fan_error err = {0};
    fan_status status;
    fan_interrupt interrupt;
    const fan_overlaps *list = PyCapsule_GetPointer(a[0], CAPSULE);
    uint64_t budget;
    if (!list || fan_overlap_budget_arg(a[1], &budget) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        fan_interrupt_begin(&interrupt, fan_check_signals, &err);
        status = fan_interrupt_end(&interrupt, fan_overlaps_pairs(list, budget, &pairs, &n, &err));
    Py_END_ALLOW_THREADS;
    lists[0] = PyList_New(0);
    lists[1] = PyList_New(0);
    bool good = status == FAN_OK && lists[0] && lists[1];
    for (size_t i = 0; good && i < n; i++) {
        PyObject *pair = Py_BuildValue("(II)", pairs[i].one, pairs[i].two);
        good = pair && PyList_Append(lists[0], pair) == 0 &&
               (pairs[i].verdict == FAN_OVERLAP_YES || PyList_Append(lists[1], pair) == 0);
        Py_XDECREF(pair);
    }
    if (good)
        made = PyTuple_Pack(2, lists[0], lists[1]);
    else if (status != FAN_OK)
        fan_raise(status, &err);
    Py_XDECREF(lists[0]);
    Py_XDECREF(lists[1]);
    fan_free(pairs);
    return made;
}

static PyObject *address(PyObject *Py_UNUSED(module), PyObject *a)
{
    return PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject *)a));
}

#include "py/declared/overlap.h"
