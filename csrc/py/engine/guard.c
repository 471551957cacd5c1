/* guard: a function must not write a sum that has other references (E4).
 *
 * An ndarray is read-only while the function runs: its WRITEABLE flag is cleared and set again
 * afterwards. If several functions have one array, in nested passes or on several threads, the last
 * one that ends sets it. A torch tensor's version counter shows afterwards whether it was written.
 * A sum without other references may be written. */
#include "py/arrays/dlpack.h"
#include "py/engine/node_object.h"

#include "base/fault.h"
#include "base/mem.h"

fan_guard *fan__guards;

/* of_tensor: one of torch's own attributes; new reference, or NULL with an exception. */
static PyObject *of_tensor(PyObject *o, PyObject **descriptor, const char *name)
{
    if (!*descriptor)
        *descriptor = PyObject_GetAttrString((PyObject *)Py_TYPE(o), name);
    if (!*descriptor)
        return NULL;
    if (Py_TYPE(*descriptor) != &PyGetSetDescr_Type)
        return PyObject_GetAttrString(o, name);
    const PyGetSetDef *def = ((PyGetSetDescrObject *)*descriptor)->d_getset;
    return def->get(o, def->closure);
}

static bool is_version(PyObject *o, long long *version)
{
    static PyObject *descriptor; /* of torch's type, as long as the process */
    PyObject *now = of_tensor(o, &descriptor, "_version");
    *version = now ? PyLong_AsLongLong(now) : -1;
    Py_XDECREF(now);
    PyErr_Clear(); /* inference mode has no version counter */
    return *version >= 0;
}

static bool is_view(PyObject *tensor)
{
    static PyObject *descriptor;
    PyObject *base = of_tensor(tensor, &descriptor, "_base");
    bool view = base && base != Py_None;
    Py_XDECREF(base);
    PyErr_Clear();
    return view;
}

/* is_unique: whether an array and its memory have only the caller's reference. */
static bool is_unique(PyObject *o)
{
    if (fan_alone(o, 1))
        return true;
    PyObject *base = PyArray_BASE((PyArrayObject *)o);
    if (Py_REFCNT(o) != 1 || !base || Py_REFCNT(base) != 1)
        return false;
    if (!PyCapsule_IsValid(base, FAN_ARRAY_CAPSULE))
        return false;
    return fan_unboxed_is_unique(fan_unboxed(PyCapsule_GetPointer(base, FAN_ARRAY_CAPSULE)));
}

static fan_guard *other_of(PyObject *array)
{
    fan_guard *g = fan__guards;
    while (g && g->object != array)
        g = g->outer;
    return g;
}

static void guard_push(fan_guard *g, PyArrayObject *a, bool gives_back)
{
    PyArray_CLEARFLAGS(a, NPY_ARRAY_WRITEABLE);
    g->object = (PyObject *)a;
    g->tensor = false;
    g->gives_back = gives_back;
    g->outer = fan__guards;
    fan__guards = g;
}

void fan__guard_array(fan_guards *all, PyArrayObject *a)
{
    guard_push(&all->inside[0], a, true);
    all->more = NULL;
    all->n = 1;
}

/* begin_one: false: it needs no guard. */
static bool begin_one(fan_guard *g, PyObject *o)
{
    if (PyArray_Check(o)) {
        bool writable = PyArray_ISWRITEABLE((PyArrayObject *)o);
        if (writable && is_unique(o))
            return false;
        if (!writable && !other_of(o))
            return false;
        guard_push(g, (PyArrayObject *)o, writable);
        return true;
    }
    if (!fan_is_tensor(o))
        return false;
    if (Py_REFCNT(o) == 1 && !is_view(o))
        return false;
    long long version;
    if (!is_version(o, &version))
        return false;
    *g = (fan_guard){.object = o, .tensor = true, .version = version};
    return true;
}

/* guard_at: NULL: it lies in all->more, for which there is no memory yet. */
static fan_guard *guard_at(fan_guards *all, uint32_t i)
{
    if (i < FAN_GUARDS_INSIDE)
        return &all->inside[i];
    if (!all->more)
        return NULL;
    return &all->more[i - FAN_GUARDS_INSIDE];
}

int fan__guards_begin(fan_guards *all, void *const *sums, uint32_t n)
{
    all->n = 0;
    all->more = NULL;
    if (FAN_FAULT(SUM_UNGUARDED))
        return 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!sums[i] || fan_is_unboxed(sums[i])) /* functions in C check fan_unboxed_is_unique */
            continue;
        fan_guard *next = guard_at(all, all->n);
        if (!next) {
            all->more = fan_alloc(n * sizeof *all->more);
            if (!all->more) {
                PyErr_NoMemory();
                (void)fan_guards_end(all, NULL);
                return -1;
            }
            next = all->more;
        }
        if (begin_one(next, sums[i])) {
            next->slot = i;
            all->n++;
        }
    }
    return 0;
}

PyObject *fan_guards_shared(const fan_guards *all)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < all->n; i++) {
        const fan_guard *guard;
        if (i < FAN_GUARDS_INSIDE)
            guard = &all->inside[i];
        else
            guard = &all->more[i - FAN_GUARDS_INSIDE];
        fan_list_add(&list, Py_NewRef(guard->object));
    }
    return list;
}

/* tensor_written: -1 with an exception if the tensor was written and no exception is live. */
static int tensor_written(const fan_guard *g, const fan_node *n)
{
    PyObject *live = fan_exception_take();
    long long version;
    bool written = is_version(g->object, &version) && version != g->version;
    fan_exception_put(live);
    if (live || !written || !n)
        return 0;
    return fan_set_error(PyExc_RuntimeError,
                         "%s wrote into the sum of its slot %u, which has other references, so "
                         "their values changed: return a new "
                         "tensor, g * 2 instead of g.mul_(2) (E4)",
                         fan_node_name(n).text, g->slot);
}

/* guard_pop: gives the array its flag back, or leaves that to another guard of the same array. */
static void guard_pop(const fan_guard *g)
{
    fan_guard **at = &fan__guards;
    while (*at != g)
        at = &(*at)->outer;
    *at = g->outer;
    if (!g->gives_back)
        return;
    fan_guard *other = other_of(g->object);
    if (other)
        other->gives_back = true;
    else
        PyArray_ENABLEFLAGS((PyArrayObject *)g->object, NPY_ARRAY_WRITEABLE);
}

int fan__guards_end(fan_guards *all, const fan_node *n)
{
    int bad = 0;
    while (all->n) {
        const fan_guard *g = guard_at(all, --all->n);
        if (!g->tensor)
            guard_pop(g);
        else if (tensor_written(g, n) < 0)
            bad = -1;
    }
    fan_free(all->more);
    return bad;
}
