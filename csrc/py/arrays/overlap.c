/* overlap: which arrays share memory. fanin._overlap has the public functions and classes. In this
 * order: one pair; the components of many arrays, and verdicts and pairs of these. */
#include "base/interrupt.h"
#include "base/mem.h"
#include "py/base/args.h"
#include "py/arrays/arrays.h"
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
    if (v != FAN_OVERLAP_YES)
        return PyUnicode_FromString(fan_verdict_words(v));
    return Py_BuildValue("(NN)", fan_ints(a->ndim, at[0]), fan_ints(b->ndim, at[1]));
}

/* search: fan_overlap of a and b; b NULL: fan_overlap_itself of a. */
static fan_status search(const fan_region *a, const fan_region *b, uint64_t budget,
                         int64_t (*at)[FAN_MAX_NDIM], fan_verdict *v, fan_error *err)
{
    if (b)
        return fan_overlap(a, b, budget, at[0], at[1], v, err);
    return fan_overlap_itself(a, budget, at[0], at[1], v, err);
}

/* judge: first a short search; a hard pair is decided without the GIL. b NULL: a itself. */
static PyObject *judge(const fan_region *a, const fan_region *b, uint64_t budget)
{
    FAN_UNINITIALIZED int64_t at[2][FAN_MAX_NDIM];
    fan_verdict v;
    if (FAN_CHECK(search(a, b, 0, at, &v, &err)) < 0)
        return NULL;
    if (v == FAN_OVERLAP_HARD && budget > 0 &&
        FAN_CHECK_UNLOCKED(search(a, b, budget, at, &v, &err)) < 0)
        return NULL;
    return verdict_wrap(v, a, b ? b : a, at);
}

static PyObject *overlap(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    FAN_UNINITIALIZED int64_t dims[2][FAN_REGION_DIMS];
    fan_layout_item items[2];
    PyArray_Descr *descr;
    uint64_t budget;
    if (fan_overlap_budget_arg(a[2], &budget) < 0)
        return NULL;
    for (int i = 0; i < 2; i++) {
        if (fan_region_read(a[i], "overlap", i, dims[i], &items[i], &descr) < 0)
            return NULL;
    }
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
    if (fan_overlap_budget_arg(a[1], &budget) < 0)
        return NULL;
    if (fan_region_read(a[0], "overlaps_itself", -1, dims, &item, &descr) < 0)
        return NULL;
    return judge(&item.region, NULL, budget);
}

/* components_find: the list of n regions, and the label of the component of each. */
static fan_status components_find(const fan_region *regions, size_t n, uint64_t budget,
                                  fan_overlaps **list, uint32_t *labels, size_t *components,
                                  bool *exact, fan_error *err)
{
    fan_interrupt interrupt;
    fan_interrupt_begin(&interrupt, fan_check_signals, err);
    fan_status status = fan_overlaps_new(regions, n, list, err);
    if (status == FAN_OK)
        status = fan_overlaps_components(*list, budget, labels, components, exact, err);
    return fan_interrupt_end(&interrupt, status);
}

static PyObject *overlaps(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_regions r = {.n = 0};
    fan_region *regions = NULL;
    uint32_t *labels = NULL;
    fan_overlaps *list = NULL;
    PyObject *made = NULL;
    uint64_t budget;
    if (fan_overlap_budget_arg(a[1], &budget) < 0)
        return NULL;
    if (fan_regions_read(a[0], "overlaps", &r) < 0)
        return NULL;
    if (fan_regions_one_device(r.items, r.n, "overlaps") < 0)
        goto done;
    regions = fan_layout_regions(r.items, r.n);
    labels = fan_alloc(r.n * sizeof *labels);
    if (!regions || !labels) {
        PyErr_NoMemory();
        goto done;
    }
    size_t components;
    bool exact;
    if (FAN_CHECK_UNLOCKED(
            components_find(regions, r.n, budget, &list, labels, &components, &exact, &err)) < 0)
        goto done;
    PyObject *numbers = PyList_New(0);
    for (size_t i = 0; numbers && i < r.n; i++)
        fan_list_add(&numbers, PyLong_FromUnsignedLong(labels[i]));
    bool easy = fan_overlaps_are_easy(list);
    PyObject *capsule = PyCapsule_New(list, CAPSULE, free_list);
    if (capsule)
        list = NULL;
    made = Py_BuildValue("(NNnOO)", capsule, fan_tuple_of(numbers), (Py_ssize_t)components,
                         fan_py_bool(exact), fan_py_bool(easy));
done:
    fan_overlaps_free(list);
    fan_free(regions);
    fan_free(labels);
    fan_regions_fini(&r);
    return made;
}

static PyObject *overlaps_verdict(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const fan_overlaps *list = PyCapsule_GetPointer(a[0], CAPSULE);
    const fan_region *region[2];
    uint64_t budget;
    if (!list)
        return NULL;
    if (fan_overlap_budget_arg(a[3], &budget) < 0)
        return NULL;
    for (int i = 0; i < 2; i++) {
        Py_ssize_t at = fan_region_number(a[1 + i], fan_overlaps_count(list), "verdict");
        if (at < 0)
            return NULL;
        region[i] = fan_overlaps_region(list, (size_t)at);
    }
    return judge(region[0], region[1], budget);
}

/* pairs_find: fan_overlaps_pairs that polls for Ctrl-C. */
static fan_status pairs_find(const fan_overlaps *list, uint64_t budget, fan_pair **pairs, size_t *n,
                             fan_error *err)
{
    fan_interrupt interrupt;
    fan_interrupt_begin(&interrupt, fan_check_signals, err);
    return fan_interrupt_end(&interrupt, fan_overlaps_pairs(list, budget, pairs, n, err));
}

/* overlaps_pairs: a list of the pairs that overlap or are undecided, and one of the undecided. */
static PyObject *overlaps_pairs(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const fan_overlaps *list = PyCapsule_GetPointer(a[0], CAPSULE);
    fan_pair *pairs = NULL;
    size_t n = 0;
    uint64_t budget;
    if (!list)
        return NULL;
    if (fan_overlap_budget_arg(a[1], &budget) < 0)
        return NULL;
    if (FAN_CHECK_UNLOCKED(pairs_find(list, budget, &pairs, &n, &err)) < 0) {
        fan_free(pairs);
        return NULL;
    }
    PyObject *all = PyList_New(0);
    PyObject *undecided = PyList_New(0);
    for (size_t i = 0; all && undecided && i < n; i++) {
        PyObject *pair = Py_BuildValue("(II)", pairs[i].one, pairs[i].two);
        if (pairs[i].verdict != FAN_OVERLAP_YES)
            fan_list_add(&undecided, Py_XNewRef(pair));
        fan_list_add(&all, pair);
    }
    fan_free(pairs);
    return Py_BuildValue("(NN)", all, undecided);
}

static PyObject *address(PyObject *Py_UNUSED(module), PyObject *a)
{
    return PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject *)a));
}

#include "py/declared/overlap.h"
