/* buffer: fanin.InputBuffer, and add_n. The body of each method converts, calls one core function, converts back. */
#include "py/turn.h"

#include "base/mem.h"
#include "base/pool.h"
#include "base/trace.h"

#include <math.h>
#include <string.h>

#define HAS_COMBINE 1u /* what the slot takes need not be an array */
#define LOW 2u         /* its declared dtype is one that NumPy knows through ml_dtypes alone */
#define DECLARED 4u    /* shape or dtype, in a buffer that records itself (A1): conversions are Python's */

#define MAX_SLOT_BYTES 4096 /* more than a slot takes: so that the product with their number can be counted */

typedef struct buffer_object {
    PyObject_HEAD fan_buffer *core; /* NULL only while it is being made */
    size_t n;                       /* slots */
    unsigned char *flags;           /* of each slot; NULL: all 0 */
    PyObject *names;                /* tuple of str or None; NULL: no slot has a name */
    PyObject *declared;             /* with create_graph: tuple of (shape or None, dtype's name or None); else NULL */
    bool create_graph;
    PyObject *weakrefs;
} buffer_object;

static buffer_object *of(PyObject *o) { return (buffer_object *)o; }

static void clear_error(fan_error *err)
{
    err->status = FAN_OK;
    err->code = 0;
    err->text[0] = '\0';
}

/* name_at: of a tuple of str or None, or NULL; borrowed, NULL: none. */
static PyObject *name_at(PyObject *names, size_t slot)
{
    PyObject *name = names ? PyTuple_GET_ITEM(names, (Py_ssize_t)slot) : NULL;
    return name == Py_None ? NULL : name;
}

static PyObject *slot_name(const buffer_object *self, size_t slot) { return name_at(self->names, slot); }

/* name_words: a name as the core and its messages have it; NULL with an exception. */
static const char *name_words(PyObject *text)
{
    Py_ssize_t n;
    const char *words = PyUnicode_AsUTF8AndSize(text, &n);
    if (!words || strlen(words) == (size_t)n)
        return words;
    fan_refuse(PyExc_ValueError, "name: expected text without a NUL character, got %R", text);
    return NULL;
}

/* slot_arg: S1. */
static int slot_arg(const buffer_object *self, PyObject *o, size_t *out)
{
    fan_where w = {.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
    int64_t i = 0;
    int result;
    fan_where_push(&w);
    result = fan_index(o, "slot", PyExc_IndexError, &i);
    if (result == 0 && (uint64_t)i >= self->n)
        result = self->n ? fan_refuse(PyExc_IndexError, "expected a slot from 0 to %zu, got %lld (S1)", self->n - 1,
                                      (long long)i)
                         : fan_refuse(PyExc_IndexError, "it has no slots, got %lld (S1)", (long long)i);
    fan_where_pop(&w);
    *out = (size_t)i;
    return result;
}

/* ---- making one ---- */

int fan_budget_arg(PyObject *o, uint64_t *out)
{
    PyObject *i;
    int negative;
    if (PyBool_Check(o) || (!PyFloat_Check(o) && !PyIndex_Check(o)))
        return fan_refuse(PyExc_TypeError, "budget: expected a number of bytes, math.inf or None, got %R", o);
    if (PyFloat_Check(o)) {
        double f = PyFloat_AS_DOUBLE(o);
        if (!(f >= 0) || (isfinite(f) && f != floor(f)))
            return fan_refuse(PyExc_ValueError,
                              "budget: expected a whole number of bytes from 0 on, or math.inf, got %R", o);
        *out = f >= 0x1p63 ? UINT64_MAX : (uint64_t)f;
        return 0;
    }
    i = PyNumber_Index(o);
    if (!i)
        return -1;
    *out = PyLong_AsUnsignedLongLong(i);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        negative = PyObject_RichCompareBool(i, fan_state_get()->zero, Py_LT);
        if (negative != 0) {
            if (negative > 0)
                fan_refuse(PyExc_ValueError, "budget: expected a number of bytes from 0 on, got %R", o);
            Py_DECREF(i);
            return -1;
        }
        *out = UINT64_MAX;
    }
    Py_DECREF(i);
    return 0;
}

int fan_buffer_budget_arg(PyObject *o, uint64_t *out)
{
    if (PyBool_Check(o) || (!PyUnicode_Check(o) && !PyFloat_Check(o) && !PyIndex_Check(o)))
        return fan_refuse(PyExc_TypeError, "budget: expected \"auto\", a number of bytes, math.inf or None, got %R", o);
    if (!PyUnicode_Check(o))
        return fan_budget_arg(o, out);
    if (PyUnicode_CompareWithASCIIString(o, "auto") != 0)
        return fan_refuse(PyExc_ValueError, "budget: expected \"auto\", a number of bytes or math.inf, got %R", o);
    *out = FAN_BUDGET_AUTO;
    return 0;
}

PyObject *fan_budget_wrap(uint64_t budget)
{
    if (budget == FAN_BUDGET_AUTO)
        return PyUnicode_FromString("auto");
    return budget == UINT64_MAX ? PyFloat_FromDouble(Py_HUGE_VAL) : PyLong_FromUnsignedLongLong(budget);
}

/* What is gathered of the slots before the core's buffer is made. */
typedef struct draft {
    size_t n;
    fan_slot_spec *specs; /* NULL: nothing declared */
    PyObject **held;      /* of each spec: its combine, which the spec borrows */
} draft;

static void draft_fini(draft *d)
{
    for (size_t i = 0; d->specs && i < d->n; i++) {
        fan_free((void *)d->specs[i].shape);
        fan_device_drop(d->specs[i].device);
        if (d->held)
            Py_XDECREF(d->held[i]);
    }
    fan_free(d->specs);
    fan_free(d->held);
}

static int spec_shape(fan_slot_spec *spec, int ndim, const int64_t *shape)
{
    int64_t *copy = fan_alloc(sizeof *copy * (size_t)(ndim ? ndim : 1));
    if (!copy) {
        PyErr_NoMemory();
        return -1;
    }
    if (ndim)
        memcpy(copy, shape, sizeof *copy * (size_t)ndim);
    spec->has_shape = true;
    spec->ndim = ndim;
    spec->shape = copy;
    return 0;
}

/* spec_of_example: shape, dtype and device of an array, which is not kept. */
static int spec_of_example(PyObject *item, fan_slot_spec *spec)
{
    fan_value v;
    const int64_t *shape = NULL;
    int ndim, result = -1;
    if (PyLong_Check(item) || PyFloat_CheckExact(item) || PyComplex_CheckExact(item) ||
        PyArray_IsScalar(item, Integer) || PyArray_IsScalar(item, Bool))
        return fan_refuse(PyExc_TypeError,
                          "%R is a number, and no example array: for one slot of a shape give [fanin.Slot(shape=(3, "
                          "4))], for so many slots a bare count, "
                          "for a slot of numbers fanin.Slot()",
                          item);
    if (fan_import(item, false, false, &v) < 0)
        return -1;
    ndim = fan_value_shape(&v, &shape);
    if (ndim < 0)
        fan_refuse(PyExc_TypeError,
                   "expected an example array or a fanin.Slot, got a %.200s; fanin.Slot() declares nothing",
                   Py_TYPE(item)->tp_name);
    else
        result = spec_shape(spec, ndim, shape);
    spec->dtype = v.dtype;
    spec->device = v.device ? fan_device_hold(v.device) : NULL;
    fan_value_drop(&fan_python, &v);
    return result;
}

/* accumulate_arg: a dtype, or "exact". */
static int accumulate_arg(PyObject *o, fan_dtype *dtype, bool *exact)
{
    *exact = PyUnicode_Check(o) && PyUnicode_CompareWithASCIIString(o, "exact") == 0;
    *dtype = FAN_DT_NONE;
    return *exact ? 0 : fan_dtype_parse(o, dtype);
}

/* spec_of_slot: a fanin.Slot, which has checked itself. Its name goes to *name. */
static int spec_of_slot(PyObject *item, fan_slot_spec *spec, PyObject **held, PyObject **name)
{
    PyObject *shape = PyObject_GetAttrString(item, "shape"), *dtype = PyObject_GetAttrString(item, "dtype");
    PyObject *device = PyObject_GetAttrString(item, "device"), *accumulate = PyObject_GetAttrString(item, "accumulate");
    PyObject *combine = PyObject_GetAttrString(item, "combine");
    int64_t dims[FAN_MAX_NDIM];
    int result = -1;
    *name = PyObject_GetAttrString(item, "name");
    if (!shape || !dtype || !device || !accumulate || !combine || !*name)
        goto done;
    if (shape != Py_None) {
        Py_ssize_t n = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : FAN_MAX_NDIM + 1;
        if (n > FAN_MAX_NDIM) {
            fan_refuse(PyExc_ValueError, "expected a shape of at most %d axes, got %R", FAN_MAX_NDIM, shape);
            goto done;
        }
        for (Py_ssize_t i = 0; i < n; i++)
            if (fan_index(PyTuple_GET_ITEM(shape, i), "shape", PyExc_ValueError, &dims[i]) < 0)
                goto done;
        if (spec_shape(spec, (int)n, dims) < 0)
            goto done;
    }
    if (fan_dtype_parse(dtype, &spec->dtype) < 0 || fan_device_arg(device, &spec->device) < 0 ||
        accumulate_arg(accumulate, &spec->accumulate, &spec->exact) < 0)
        goto done;
    if (combine != Py_None) {
        *held = Py_NewRef(combine);
        spec->combine = combine;
    }
    result = 0;
done:
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(device);
    Py_XDECREF(accumulate);
    Py_XDECREF(combine);
    return result;
}

/* is_bare: is `o` one array (or Slot, or scalar) where a sequence of them was expected? */
static int is_bare(PyObject *o)
{
    PyObject *arrays, *answer;
    int bare;
    if (PyList_Check(o) || PyTuple_Check(o))
        return 0;
    arrays = fan_arrays();
    answer = arrays ? PyObject_CallMethod(arrays, "is_bare", "O", o) : NULL;
    bare = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return bare;
}

static int draft_of_sequence(PyObject *slots, const char *name, draft *d, PyObject **names)
{
    fan_state *st = fan_state_get();
    PyObject *fast, *type = fan_lazy(&st->slot_type, "fanin.slots", "Slot");
    int bare = type ? is_bare(slots) : -1;
    bool named = false;
    int result = -1;
    if (bare < 0)
        return -1;
    if (bare)
        return fan_refuse(PyExc_TypeError,
                          "slots: expected a count or a sequence of arrays and Slots, got one %.200s: give [array]",
                          Py_TYPE(slots)->tp_name);
    if (PyUnicode_Check(slots) || PyBytes_Check(slots) || PyDict_Check(slots) || PyAnySet_Check(slots) ||
        !Py_TYPE(slots)->tp_iter || !(fast = PySequence_Tuple(slots)))
        return PyErr_Occurred() ? -1
                                : fan_refuse(PyExc_TypeError,
                                             "slots: expected a count or a sequence of arrays and Slots, got a %.200s",
                                             Py_TYPE(slots)->tp_name);
    d->n = (size_t)PyTuple_GET_SIZE(fast);
    *names = PyTuple_New((Py_ssize_t)d->n);
    d->specs = fan_calloc(sizeof *d->specs * (d->n ? d->n : 1));
    d->held = fan_calloc(sizeof *d->held * (d->n ? d->n : 1));
    if (!*names || !d->specs || !d->held) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < d->n; i++)
        d->specs[i].dtype = d->specs[i].accumulate = FAN_DT_NONE;
    for (size_t i = 0; i < d->n; i++) {
        PyObject *item = PyTuple_GET_ITEM(fast, (Py_ssize_t)i), *own = NULL, *text = NULL;
        fan_where w = {.buffer = name, .slot = (Py_ssize_t)i, .key = -1};
        int isslot = PyObject_IsInstance(item, type), bad;
        if (isslot < 0)
            goto done;
        fan_where_push(&w);
        bad = isslot ? spec_of_slot(item, &d->specs[i], &d->held[i], &own) : spec_of_example(item, &d->specs[i]);
        fan_where_pop(&w);
        text = bad < 0 ? NULL : own && own != Py_None ? PyObject_Str(own) : Py_NewRef(Py_None);
        Py_XDECREF(own);
        if (!text)
            goto done;
        PyTuple_SET_ITEM(*names, (Py_ssize_t)i, text);
        if (text != Py_None) {
            named = true;
            d->specs[i].name = name_words(text);
            if (!d->specs[i].name)
                goto done;
        }
    }
    result = 0;
done:
    if (!named && result == 0)
        Py_CLEAR(*names);
    Py_DECREF(fast);
    return result;
}

/* note_flags: what add must know of each slot. */
static int note_flags(buffer_object *self, const draft *d)
{
    if (!d->specs)
        return 0;
    self->flags = fan_calloc(self->n ? self->n : 1);
    if (!self->flags) {
        PyErr_NoMemory();
        return -1;
    }
    if (self->create_graph && !(self->declared = PyTuple_New((Py_ssize_t)self->n)))
        return -1;
    for (size_t i = 0; i < self->n; i++) {
        fan_slot_spec *s = &d->specs[i];
        bool low = s->dtype == FAN_DT_BFLOAT16 || s->dtype == FAN_DT_FLOAT8_E4M3FN || s->dtype == FAN_DT_FLOAT8_E5M2;
        PyObject *shape, *pair;
        if (s->combine)
            self->flags[i] |= HAS_COMBINE;
        if (low)
            self->flags[i] |= LOW;
        if (!self->declared)
            continue;
        if (s->has_shape || s->dtype != FAN_DT_NONE)
            self->flags[i] |= DECLARED;
        shape = s->has_shape ? PyTuple_New(s->ndim) : Py_NewRef(Py_None);
        for (int k = 0; shape && s->has_shape && k < s->ndim; k++) {
            PyObject *extent = PyLong_FromLongLong(s->shape[k]);
            if (!extent)
                Py_CLEAR(shape);
            else
                PyTuple_SET_ITEM(shape, k, extent);
        }
        pair = shape ? Py_BuildValue("(Nz)", shape, s->dtype == FAN_DT_NONE ? NULL : fan_dtype_name(s->dtype)) : NULL;
        if (!pair)
            return -1;
        PyTuple_SET_ITEM(self->declared, (Py_ssize_t)i, pair);
        /* The core must not convert what records itself. */
        fan_free((void *)s->shape);
        s->has_shape = false;
        s->shape = NULL;
        s->ndim = 0;
    }
    return 0;
}

static PyObject *buffer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"slots", "budget", "accumulate", "stats", "stream", "leaf", "create_graph", "name", NULL};
    PyObject *slots, *budget = Py_None, *accumulate = Py_None, *stream = Py_None, *name = Py_None, *text = NULL;
    int leaf = 0, create_graph = 0, stats = 0;
    fan_buffer_config config = {.accumulate = FAN_DT_NONE, .frontend = &fan_python};
    fan_where w = {.slot = -1, .key = -1};
    fan_status status = FAN_OK;
    FAN_RAW fan_error err;
    draft d = {0};
    buffer_object *self = NULL;
    bool made = false;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOpOppO:InputBuffer", names, &slots, &budget, &accumulate,
                                     &stats, &stream, &leaf, &create_graph, &name))
        return NULL;
    text = name == Py_None ? PyUnicode_FromString("InputBuffer") : PyObject_Str(name);
    config.name = text ? name_words(text) : NULL;
    if (!config.name)
        goto out;
    w.buffer = config.name;
    fan_where_push(&w);
    self = (buffer_object *)type->tp_alloc(type, 0);
    if (!self)
        goto done;
    self->create_graph = create_graph;
    config.budget = fan_state_get()->budget;
    if (budget != Py_None && fan_buffer_budget_arg(budget, &config.budget) < 0)
        goto done;
    config.stats = stats;
    if (accumulate_arg(accumulate, &config.accumulate, &config.exact) < 0 || fan_stream_arg(stream, &config.stream) < 0)
        goto done;
    if (PyLong_Check(slots) || PyArray_IsScalar(slots, Integer) || PyArray_IsScalar(slots, Bool)) {
        int64_t n = 0;
        if (fan_index(slots, "slots", PyExc_ValueError, &n) < 0)
            goto done;
        if (n > PTRDIFF_MAX / MAX_SLOT_BYTES) {
            fan_refuse(PyExc_MemoryError, "out of memory for %lld slots", (long long)n);
            goto done;
        }
        d.n = (size_t)n;
    } else if (draft_of_sequence(slots, config.name, &d, &self->names) < 0) {
        goto done;
    }
    self->n = d.n;
    if (note_flags(self, &d) < 0)
        goto done;
    config.slots = d.n;
    config.specs = d.specs;
    config.leaf = leaf;
    config.create_graph = create_graph;
    clear_error(&err);
    status = fan_buffer_new(&config, &self->core, &err);
    if (status != FAN_OK)
        fan_raise(status, &err);
    made = status == FAN_OK;
done:
    fan_where_pop(&w);
out:
    draft_fini(&d);
    fan_stream_drop(config.stream);
    Py_XDECREF(text);
    if (!made)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* An engine makes a buffer for each node: a few that are as InputBuffer(n) makes them, and that nobody has any more,
 * are kept for their next lives. */
static PyObject *spare_take(PyTypeObject *type, size_t n, uint64_t budget)
{
    fan_state *st = fan_state_get();
    for (unsigned i = st->nspares; i-- > 0;) {
        PyObject *o = st->spares[i];
        if (of(o)->n != n || Py_TYPE(o) != type)
            continue;
        st->spares[i] = st->spares[--st->nspares];
        Py_INCREF(type);
        _Py_NewReference(o);
        fan_buffer_reuse(of(o)->core, budget);
        PyObject_GC_Track(o);
        return o;
    }
    return NULL;
}

/* spare_put: true: it is kept. */
static bool spare_put(buffer_object *self)
{
#ifdef Py_GIL_DISABLED
    return false;
#endif
    fan_state *st = fan_state_get();
    if (!st || self->flags || self->names || self->declared || !self->core || fan_finalizing() ||
        !fan_buffer_empty_for_reuse(self->core))
        return false;
    if (st->nspares == FAN_SPARES) /* asked last: what was dropped may have filled it */
        return false;
    st->spares[st->nspares++] = (PyObject *)self;
    return true;
}

void fan_buffer_spares_free(fan_state *st)
{
    while (st->nspares) {
        PyObject *o = st->spares[--st->nspares];
        fan_buffer_free(of(o)->core);
        PyObject_GC_Del(o);
    }
}

/* made_plain: InputBuffer(n), or InputBuffer(n, budget=..). */
static PyObject *made_plain(PyTypeObject *type, Py_ssize_t n, uint64_t budget)
{
    PyObject *spare = spare_take(type, (size_t)n, budget);
    if (spare)
        return spare;
    fan_buffer_config config = {
        .slots = (size_t)n, .accumulate = FAN_DT_NONE, .budget = budget, .frontend = &fan_python};
    FAN_RAW fan_error err;
    buffer_object *self = (buffer_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    clear_error(&err);
    fan_status status = fan_buffer_new(&config, &self->core, &err);
    self->n = (size_t)n;
    if (status == FAN_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return fan_raise(status, &err);
}

/* fan_buffer_call: the type's vectorcall. */
PyObject *fan_buffer_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    Py_ssize_t n = nargs == 1 && PyLong_CheckExact(args[0]) ? PyLong_AsSsize_t(args[0]) : -1;
    PyObject *list, *kwargs = NULL, *self = NULL;
    uint64_t budget = fan_state_get()->budget;
    bool plain = n >= 0 && n <= INT32_MAX;
    if (plain && kwnames) {
        PyObject *value = args[nargs];
        plain = PyTuple_GET_SIZE(kwnames) == 1 && PyTuple_GET_ITEM(kwnames, 0) == fan_state_get()->str_budget &&
                (PyLong_CheckExact(value) || PyFloat_CheckExact(value)) && fan_budget_arg(value, &budget) == 0;
    }
    if (plain)
        return made_plain((PyTypeObject *)type, n, budget);
    PyErr_Clear(); /* said again below, with the buffer's name */
    list = PyTuple_New(nargs);
    for (Py_ssize_t i = 0; list && i < nargs; i++)
        PyTuple_SET_ITEM(list, i, Py_NewRef(args[i]));
    kwargs = list && kwnames ? PyDict_New() : NULL;
    for (Py_ssize_t i = 0; kwargs && i < PyTuple_GET_SIZE(kwnames); i++)
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(kwnames, i), args[nargs + i]) < 0)
            Py_CLEAR(kwargs);
    if (list && (kwargs || !kwnames))
        self = buffer_new((PyTypeObject *)type, list, kwargs);
    Py_XDECREF(list);
    Py_XDECREF(kwargs);
    return self;
}

static int buffer_clear_refs(PyObject *o)
{
    buffer_object *self = of(o);
    if (self->core)
        fan_buffer_abandon(self->core);
    return 0;
}

static void buffer_dealloc(PyObject *o)
{
    buffer_object *self = of(o);
    PyTypeObject *type = Py_TYPE(o);
    PyObject *live;
    bool kept;
    PyObject_GC_UnTrack(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    live = PyErr_Occurred() ? fan_exception_take() : NULL;
    kept = spare_put(self);
    if (!kept && self->core)
        fan_buffer_free(self->core);
    if (live)
        fan_exception_put(live);
    if (kept) {
        Py_DECREF(type);
        return;
    }
    fan_free(self->flags);
    Py_XDECREF(self->names);
    Py_XDECREF(self->declared);
    type->tp_free(o);
    Py_DECREF(type);
}

typedef struct visitor {
    visitproc visit;
    void *arg;
} visitor;

static int visit_object(void *object, const fan_value *value, void *arg)
{
    const visitor *v = arg;
    int answer = v->visit((PyObject *)object, v->arg);
    return answer ? answer : fan_visit_behind(object, value, v->visit, v->arg);
}

static int buffer_traverse(PyObject *o, visitproc visit, void *arg)
{
    visitor v = {visit, arg};
    Py_VISIT(Py_TYPE(o));
    return of(o)->core ? fan_buffer_visit(of(o)->core, visit_object, &v) : 0;
}

/* ---- methods ---- */

/* parse_call: the arguments of a method, as they come, into values[]: the first `by_place`, in words `placed`, may be
 * given by position. NULL: not given. */
static int parse_call(const char *call, const char *const *names, size_t n, Py_ssize_t by_place, const char *placed,
                      PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **values)
{
    Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    if (nargs > by_place) {
        PyErr_Format(PyExc_TypeError, "%s() takes %s by position, and the rest by name; got %zd by position", call,
                     placed, nargs);
        return -1;
    }
    for (size_t i = 0; i < n; i++)
        values[i] = (Py_ssize_t)i < nargs ? args[i] : NULL;
    for (Py_ssize_t k = 0; k < named; k++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, k);
        size_t i = 0;
        while (i < n && PyUnicode_CompareWithASCIIString(name, names[i]) != 0)
            i++;
        if (i == n || values[i]) {
            PyErr_Format(PyExc_TypeError, i < n ? "%s() got '%U' twice" : "%s() has no argument '%U'", call, name);
            return -1;
        }
        values[i] = args[nargs + k];
    }
    return 0;
}

static int truth(PyObject *o, bool *out)
{
    int t = !o || o == Py_False || o == Py_None ? 0 : o == Py_True ? 1 : PyObject_IsTrue(o);
    *out = t > 0;
    return t < 0 ? -1 : 0;
}

/* ways_of: donate= and copy=: one gives the array away, the other keeps it the caller's. */
static int ways_of(const buffer_object *self, PyObject *donate, PyObject *copy, bool *donated, bool *copied)
{
    if (truth(donate, donated) < 0 || truth(copy, copied) < 0)
        return -1;
    if (!*donated || !*copied)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: donate=True gives the array away, copy=True keeps it yours: give one of them",
                 fan_buffer_name(self->core));
    return -1;
}

/* conformed: A9 and A10 by the array's own operators, for a slot of a buffer that records itself; new reference. */
static PyObject *conformed(const buffer_object *self, size_t slot, PyObject *gradient)
{
    PyObject *arrays = fan_arrays(), *pair = PyTuple_GET_ITEM(self->declared, (Py_ssize_t)slot), *answer,
             *result = NULL;
    answer = arrays ? PyObject_CallMethod(arrays, "conform", "OOO", gradient, PyTuple_GET_ITEM(pair, 0),
                                          PyTuple_GET_ITEM(pair, 1))
                    : NULL;
    if (!answer)
        return NULL;
    if (PyTuple_GET_SIZE(answer) == 1) /* Conformed or Refused (_interop/records.py) */
        result = Py_NewRef(PyTuple_GET_ITEM(answer, 0));
    else
        fan_refuse(PyTuple_GET_ITEM(answer, 0), "%U", PyTuple_GET_ITEM(answer, 1));
    Py_DECREF(answer);
    return result;
}

/* showable: could the sum be shown? A low float in NumPy's arrays only with ml_dtypes: said here, where nothing is lost
 * yet. */
static int showable(const fan_value *v)
{
    if ((v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE) && v->origin < FAN_FROM_FOREIGN &&
        v->device == fan_cpu() && fan_dtype_needs_ml_dtypes(FAN_DT_BFLOAT16))
        return fan_refuse(
            PyExc_TypeError,
            "the slot is declared of a dtype that NumPy knows through ml_dtypes alone: import ml_dtypes first");
    return 0;
}

/* Whether nobody watches: a trace and debug=True want the general path. */
static bool unwatched(void)
{
    return !fan_get_debug() && (atomic_load_explicit(&fan_traces, memory_order_relaxed) == 0 || !fan_trace_on());
}

/* small_index: a plain int from 0 on; -1: something else, or an exception's matter. */
static Py_ssize_t small_index(PyObject *o)
{
    Py_ssize_t i;
    if (!PyLong_CheckExact(o))
        return -1;
    i = PyLong_AsSsize_t(o);
    if (i == -1 && PyErr_Occurred())
        PyErr_Clear();
    return i;
}

/* gives_memory: whether the first term of a sum is reusable, but for what it may share with other terms (A6). */
static bool gives_memory(const fan_fast_sum *sum)
{
    const fan_fast *first = &sum->terms[0];
    if (sum->kind->scalar)
        return false;
    if (sum->ours)
        return true;
    if (first->donated)
        return sum->kind->late || PyArray_ISWRITEABLE((PyArrayObject *)first->object);
    return first->ours || fan_unshared(first->object, 1);
}

/* target_of: where a sum of plain terms goes: into the first, where that is nobody else's (A6, A14), or into a fresh
 * array; new reference. */
static PyObject *target_of(const buffer_object *self, size_t slot, const fan_fast_sum *sum, const fan_take *how)
{
    PyObject *first = sum->terms[0].object;
    char *data = sum->terms[0].data;
    if (sum->n == 1 && !how->scale.on && (!how->writable || gives_memory(sum)))
        return Py_NewRef(first);
    if (sum->kind->scalar) {
        _Alignas(16) char value[16];
        fan_buffer_plain_fold(self->core, slot, how, value, NULL);
        return fan_fast_scalar(sum->kind, value);
    }
    bool alone =
        sum->n > 1 && !how->scale.on && gives_memory(sum) && fan_buffer_plain_may_keep(self->core, slot, how->one);
    size_t bytes = !alone            ? 0
                   : sum->kind->late ? (size_t)fan_fast_bytes(sum->kind)
                                     : (size_t)PyArray_NBYTES((PyArrayObject *)first);
    for (size_t k = 1; k < sum->n && alone; k++)
        alone = sum->terms[k].data + bytes <= data || data + bytes <= sum->terms[k].data;
    return alone ? Py_NewRef(first) : fan_fast_fresh(first, sum->kind);
}

/* sound_terms: what is to be summed is what it was when it came, and what was not looked at then is looked at now. */
static bool sound_terms(const fan_fast_sum *sum)
{
    for (size_t k = 0; k < sum->n; k++)
        if ((sum->kind->late && !fan_fast_sound(sum->terms[k].object)) ||
            !fan_fast_still(sum->terms[k].object, sum->kind, sum->terms[k].data))
            return false;
    return true;
}

#define AWAY_BYTES (UINT64_C(256) << 10) /* bytes of terms from which on others may run while they are summed */

/* merge_plain: what is due in a slot of plain gradients, by the fast path. False: not for this way, and nothing
 * happened. */
static bool merge_plain(buffer_object *self, size_t slot)
{
    static const fan_take nothing = {.one = true};
    FAN_RAW fan_merge m;
    PyObject *to = NULL;
    char *data = NULL;
    if (!unwatched() || !fan_buffer_merge_begin(self->core, slot, &m))
        return false;
    /* A fresh ndarray of such a size is made in recycled memory, by the general path; a tensor comes from torch. */
    if (sound_terms(&m.sum) && (m.sum.kind->late || fan_fast_bytes(m.sum.kind) < FAN_POOL_FROM || gives_memory(&m.sum)))
        to = target_of(self, slot, &m.sum, &nothing);
    if (to) {
        data = fan_fast_data(to, m.sum.kind);
        if (m.sum.n * fan_fast_bytes(m.sum.kind) > AWAY_BYTES) {
            Py_BEGIN_ALLOW_THREADS fan_buffer_merge_sum(&m, data);
            Py_END_ALLOW_THREADS
        } else {
            fan_buffer_merge_sum(&m, data);
        }
        if (to == m.sum.terms[0].object)
            Py_DECREF(to); /* the buffer has one */
    }
    PyErr_Clear(); /* the general path says it, if there is anything to say */
    fan_buffer_merge_end(self->core, &m, to, data);
    return to != NULL;
}

/* What add is told by name, as far as the fast path knows it. */
typedef struct by_name {
    Py_ssize_t key; /* -1: none */
    bool donate, copy;
} by_name;

/* told_by_name: false: something else is there, or what must be said is an error: for the general path. */
static bool told_by_name(PyObject *const *values, PyObject *kwnames, by_name *t)
{
    const fan_state *st = fan_state_get();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i), *value = values[i];
        bool flag = value == Py_True || value == Py_False;
        if (name == st->str_key && value != Py_None) {
            t->key = small_index(value);
            if (t->key < 0 || t->key > FAN_PLAIN_KEY_MAX)
                return false;
        } else if (name == st->str_donate && flag) {
            t->donate = value == Py_True;
        } else if (name == st->str_copy && flag) {
            t->copy = value == Py_True;
        } else if (value != Py_None || (name != st->str_key && name != st->str_stream)) {
            return false;
        }
    }
    return !(t->donate && t->copy);
}

/* fold_due: after a gradient was parked by the fast path, and perhaps the budget passed. */
static int fold_due(buffer_object *self, size_t slot, PyObject *gradient, bool alone)
{
    FAN_RAW fan_error err;
    if (!fan_buffer_over(self->core, slot, gradient, alone) || merge_plain(self, slot))
        return 0;
    clear_error(&err);
    fan_status status = fan_buffer_fold_due(self->core, slot, &err);
    if (status == FAN_OK)
        return 0;
    fan_raise(status, &err);
    return -1;
}

/* add_plain: 1: added; 0: not for this way, and nothing happened; -1 with an exception. */
static int add_plain(buffer_object *self, PyObject *const *args, PyObject *kwnames)
{
    FAN_RAW fan_fast_kind kind;
    FAN_RAW fan_at_once at_once;
    Py_ssize_t slot = small_index(args[0]);
    PyObject *gradient = args[1];
    by_name t = {.key = -1};
    fan_fast one;
    char *data = NULL;
    bool due;
    if (slot < 0 || (size_t)slot >= self->n || self->create_graph || (kwnames && !told_by_name(args + 2, kwnames, &t)))
        return 0;
    if (gradient == Py_None) {
        one = fan_fast_one(NULL, NULL, t.key, false, false);
        return unwatched() && fan_buffer_add_plain(self->core, (size_t)slot, NULL, &one, &due);
    }
    if (!fan_import_plain(gradient, &kind, &data) || !unwatched())
        return 0;
    bool alone = t.copy || fan_alone(gradient, 1);
    if (!t.copy && fan_buffer_adds_at_once(self->core, (size_t)slot, &kind, data, t.key, alone, &at_once)) {
        fan_buffer_add_at_once(self->core, &at_once);
        return 1;
    }
    if (t.copy && kind.scalar)
        return 0;
    gradient = t.copy ? fan_fast_copy(gradient, &kind, &data) : Py_NewRef(gradient);
    one = fan_fast_one(gradient, data, t.key, t.donate, t.copy);
    if (!one.object || !fan_buffer_add_plain(self->core, (size_t)slot, &kind, &one, &due)) {
        Py_XDECREF(gradient);
        return 0;
    }
    if (!due)
        return 1;
    fan_call_acted();
    return fold_due(self, (size_t)slot, gradient, alone) < 0 ? -1 : 1;
}

/* stream_of: the producer's stream, as it was given for a slot. */
static int stream_of(const buffer_object *self, size_t slot, PyObject *stream, fan_stream **out)
{
    fan_where w = {
        .buffer = fan_buffer_name(self->core), .slot = (Py_ssize_t)slot, .slot_name = slot_name(self, slot), .key = -1};
    int result;
    if (!stream || stream == Py_None)
        return 0;
    fan_where_push(&w);
    result = fan_stream_arg(stream, out);
    fan_where_pop(&w);
    return result;
}

/* contribution_of: one gradient as the core takes it, but for its stream. */
static int contribution_of(buffer_object *self, size_t slot, PyObject *gradient, PyObject *key, fan_contribution *c)
{
    fan_where w = {.buffer = fan_buffer_name(self->core),
                   .slot = (Py_ssize_t)slot,
                   .slot_name = slot_name(self, slot),
                   .key = -1,
                   .stream = c->stream};
    unsigned flags = self->flags ? self->flags[slot] : 0;
    PyObject *own = NULL;
    int bad;
    c->key = -1;
    fan_where_push(&w);
    bad = key && key != Py_None && fan_index(key, "key", PyExc_ValueError, &c->key) < 0;
    w.key = c->key;
    if (!bad)
        own = (flags & DECLARED) ? conformed(self, slot, gradient) : Py_NewRef(gradient);
    bad = !own || fan_import(own, self->create_graph, (flags & HAS_COMBINE) != 0, &c->value) < 0;
    if (!bad && (flags & LOW))
        bad = showable(&c->value) < 0;
    fan_where_pop(&w);
    Py_XDECREF(own);
    return bad ? -1 : 0;
}

/* add_on: fan_buffer_add, with the current stream of the gradient's library as that of the device, where the caller
 * made none the current one (S4, S5). */
static int add_on(fan_buffer *core, size_t slot, fan_contribution *c)
{
    FAN_RAW fan_error err;
    fan_status status = FAN_OK;
    fan_stream *library = NULL;
    if (fan_library_stream(&c->value, &library) < 0)
        return -1;
    clear_error(&err);
    if (library)
        status = fan_stream_push(library, &err);
    if (status == FAN_OK) {
        status = fan_buffer_add(core, slot, c, &err);
        if (library)
            fan_stream_pop(library);
    }
    fan_stream_drop(library);
    if (status != FAN_OK)
        fan_raise(status, &err);
    return status == FAN_OK ? 0 : -1;
}

static PyObject *add_any(buffer_object *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"slot", "gradient", "key", "stream", "donate", "copy"};
    struct {
        PyObject *slot, *gradient, *key, *stream, *donate, *copy;
    } a;
    fan_contribution c = {.key = -1, .value = {.dtype = FAN_DT_NONE}};
    size_t slot;
    int bad;
    if (parse_call("add", names, 6, 2, "slot and gradient", args, nargs, kwnames, &a.slot) < 0)
        return NULL;
    if (!a.slot || !a.gradient)
        return PyErr_Format(PyExc_TypeError, "add() needs '%s'", a.slot ? "gradient" : "slot");
    if (slot_arg(self, a.slot, &slot) < 0 || ways_of(self, a.donate, a.copy, &c.donate, &c.copy) < 0)
        return NULL;
    if (stream_of(self, slot, a.stream, &c.stream) < 0)
        return NULL;
    c.alone = fan_alone(a.gradient, 1);
    bad = contribution_of(self, slot, a.gradient, a.key, &c) < 0 || add_on(self->core, slot, &c) < 0;
    if (c.value.form != FAN_FORM_UNDEFINED)
        fan_value_drop(&fan_python, &c.value);
    fan_stream_drop(c.stream);
    if (bad)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *buffer_add(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (nargs == 2) {
        int added = add_plain(of(o), args, kwnames);
        if (added)
            return added > 0 ? Py_NewRef(Py_None) : NULL;
    }
    return add_any(of(o), args, nargs, kwnames);
}

/* ---- add_many ---- */

/* The arguments of add_many: sequences of one length. */
typedef struct batch {
    PyObject *slots, *gradients, *keys; /* tuples, held; keys may be NULL */
    Py_ssize_t n;
} batch;

#define ITEM(tuple, i) PyTuple_GET_ITEM(tuple, i)

static int sequence_arg(PyObject *o, const char *what, PyObject **out)
{
    if (PyUnicode_Check(o) || PyBytes_Check(o) || PyDict_Check(o) || PyAnySet_Check(o) || !Py_TYPE(o)->tp_iter)
        return fan_refuse(PyExc_TypeError, "%s: expected a sequence, got a %.200s", what, Py_TYPE(o)->tp_name);
    *out = PySequence_Tuple(o);
    return *out ? 0 : -1;
}

static int batch_begin(batch *t, PyObject *slots, PyObject *gradients, PyObject *keys)
{
    int bare = is_bare(gradients);
    if (bare < 0)
        return -1;
    if (bare)
        return fan_refuse(PyExc_TypeError, "gradients: expected a sequence of gradients, got one %.200s: give [x, ..]",
                          Py_TYPE(gradients)->tp_name);
    /* Tuples of our own: nobody changes them meanwhile. */
    if (sequence_arg(slots, "slots", &t->slots) < 0 || sequence_arg(gradients, "gradients", &t->gradients) < 0 ||
        (keys && keys != Py_None && sequence_arg(keys, "keys", &t->keys) < 0))
        return -1;
    t->n = PyTuple_GET_SIZE(t->slots);
    Py_ssize_t other =
        PyTuple_GET_SIZE(t->gradients) != t->n || !t->keys ? PyTuple_GET_SIZE(t->gradients) : PyTuple_GET_SIZE(t->keys);
    if (other != t->n)
        return fan_refuse(PyExc_ValueError, "expected as many slots as gradients%s, got %zd slot%s and %zd %s%s",
                          t->keys ? " and keys" : "", t->n, FAN_PLURAL(t->n), other,
                          PyTuple_GET_SIZE(t->gradients) != t->n ? "gradient" : "key", FAN_PLURAL(other));
    return 0;
}

#define AHEAD 8
#define FAR 500 /* slots that no near cache holds */

/* fetch_ahead: of a batch that no cache holds, what is needed AHEAD gradients later. */
static void fetch_ahead(const buffer_object *self, const batch *t, Py_ssize_t k)
{
    if (k + 2 * AHEAD < t->n) {
        __builtin_prefetch(ITEM(t->gradients, k + 2 * AHEAD), 1);
        __builtin_prefetch((const char *)ITEM(t->gradients, k + 2 * AHEAD) + 64);
    }
    if (k + AHEAD < t->n) {
        PyObject *o = ITEM(t->gradients, k + AHEAD);
        if (PyArray_CheckExact(o))
            __builtin_prefetch(PyArray_DIMS((PyArrayObject *)o));
        fan_buffer_plain_soon(self->core, (size_t)small_index(ITEM(t->slots, k + AHEAD)));
    }
}

/* batch_at_once: true: all went straight into their sums; false: one is not for that, and nothing happened. */
static bool batch_at_once(buffer_object *self, const batch *t)
{
    FAN_RAW fan_fast_kind kind;
    Py_ssize_t last = -1, k = 0;
    FAN_RAW fan_at_once one;
    fan_at_once *all = NULL; /* made once there is one */
    for (char *data; k < t->n; k++) {
        Py_ssize_t slot = small_index(ITEM(t->slots, k)), key = -1;
        if (self->n >= FAR)
            fetch_ahead(self, t, k);
        if (slot <= last || (size_t)slot >= self->n || (t->keys && (key = small_index(ITEM(t->keys, k))) < 0) ||
            !fan_import_plain(ITEM(t->gradients, k), &kind, &data) ||
            !fan_buffer_adds_at_once(self->core, (size_t)slot, &kind, data, key, false, &one) ||
            (!all && !(all = fan_alloc((size_t)t->n * sizeof *all))))
            break;
        all[k] = one;
        last = slot; /* ascending, so that what was asked still holds when it is done */
    }
    bool good = all && k == t->n;
    for (k = 0; good && k < t->n; k++) {
        if (k + AHEAD < t->n) {
            __builtin_prefetch(all[k + AHEAD].pass, 1);
            __builtin_prefetch(all[k + AHEAD].sum, 1);
            __builtin_prefetch(all[k + AHEAD].data);
        }
        fan_buffer_add_at_once(self->core, &all[k]);
    }
    fan_free(all);
    return good;
}

/* batch_plain: 1: all are parked by the fast path; 0: one is not for it, and nothing happened. -1 with an exception: a
 * fold failed. */
static int batch_plain(buffer_object *self, const batch *t, bool donate)
{
    FAN_RAW fan_fast_kind kind;
    Py_ssize_t k = 0;
    bool due, any_due = false;
    if (self->create_graph || fan_buffer_learns(self->core) ||
        !unwatched()) /* what is known of the last sum must be known again, were one taken back */
        return 0;
    if (t->n && batch_at_once(self, t))
        return 1;
    fan_fast_peaks peaks = fan_buffer_plain_peaks(self->core);
    for (; k < t->n; k++) {
        Py_ssize_t slot = small_index(ITEM(t->slots, k)), key = -1;
        PyObject *gradient = ITEM(t->gradients, k);
        char *data = NULL;
        if (self->n >= FAR)
            fetch_ahead(self, t, k);
        if (slot < 0 || (size_t)slot >= self->n ||
            (t->keys && ((key = small_index(ITEM(t->keys, k))) < 0 || key > FAN_PLAIN_KEY_MAX)))
            break;
        if (gradient == Py_None)
            gradient = NULL;
        else if (!fan_import_plain(gradient, &kind, &data))
            break;
        fan_fast one = fan_fast_one(gradient, data, key, gradient && donate, false);
        if (!fan_buffer_add_plain(self->core, (size_t)slot, gradient ? &kind : NULL, &one, &due))
            break;
        Py_XINCREF(gradient);
        any_due = any_due || due;
    }
    if (k < t->n) {
        while (k-- > 0) {
            PyObject *gradient = ITEM(t->gradients, k) == Py_None ? NULL : ITEM(t->gradients, k);
            fan_buffer_unadd_plain(self->core, (size_t)small_index(ITEM(t->slots, k)), gradient,
                                   t->keys ? small_index(ITEM(t->keys, k)) : -1);
            Py_XDECREF(gradient);
        }
        fan_buffer_plain_peaks_back(self->core, &peaks);
        return 0;
    }
    if (any_due)
        fan_call_acted();
    for (k = 0; k < t->n && any_due; k++)
        if (ITEM(t->gradients, k) != Py_None &&
            fold_due(self, (size_t)small_index(ITEM(t->slots, k)), ITEM(t->gradients, k), false) < 0)
            return -1;
    return 1;
}

typedef struct placed {
    size_t slot, at;
} placed;

static int by_slot(const void *a, const void *b)
{
    const placed *x = a, *y = b;
    return x->slot != y->slot ? (x->slot > y->slot) - (x->slot < y->slot) : (x->at > y->at) - (x->at < y->at);
}

/* batch_push: as add_on: each gradient is ready on its library's current stream, and the first of a device names that
 * of the device. */
static fan_status batch_push(fan_contribution *c, fan_stream **own, size_t n, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = n; i-- > 0;) {
        if (!own[i])
            continue;
        if (!c[i].stream)
            c[i].stream = own[i];
        status = status == FAN_OK ? fan_stream_push(own[i], err) : status;
    }
    return status;
}

static int batch_any(buffer_object *self, const batch *t, fan_stream *stream, bool donate, bool copy)
{
    size_t n = (size_t)t->n, made = 0;
    fan_contribution *c = fan_calloc((n ? n : 1) * sizeof *c);
    size_t *slots = fan_alloc((n ? n : 1) * 2 * sizeof *slots), *order = slots + n;
    placed *sorted = fan_alloc((n ? n : 1) * sizeof *sorted);
    fan_stream **own = fan_calloc((n ? n : 1) * sizeof *own); /* current streams of the gradients' libraries */
    FAN_RAW fan_error err;
    int result = -1;
    if (!c || !slots || !sorted || !own) {
        PyErr_NoMemory();
        goto done;
    }
    for (; made < n; made++) {
        Py_ssize_t k = (Py_ssize_t)made;
        PyObject *gradient = NULL;
        if (slot_arg(self, ITEM(t->slots, k), &slots[made]) < 0)
            goto done;
        c[made] = (fan_contribution){
            .key = -1, .stream = stream, .donate = donate, .copy = copy, .value = {.dtype = FAN_DT_NONE}};
        gradient = Py_NewRef(ITEM(t->gradients, k));
        int bad = contribution_of(self, slots[made], gradient, t->keys ? ITEM(t->keys, k) : NULL, &c[made]);
        Py_DECREF(gradient);
        sorted[made] = (placed){slots[made], made};
        if (bad || fan_library_stream(&c[made].value, &own[made]) < 0) {
            made++;
            goto done;
        }
    }
    qsort(sorted, n, sizeof *sorted, by_slot);
    for (size_t i = 0; i < n; i++)
        order[i] = sorted[i].at;
    clear_error(&err);
    fan_status status = batch_push(c, own, n, &err);
    if (status == FAN_OK)
        status = fan_buffer_add_many(self->core, c, slots, order, n, &err);
    if (status == FAN_OK)
        result = 0;
    else
        fan_raise(status, &err);
done:
    for (size_t i = 0; i < made; i++) {
        if (c[i].value.form != FAN_FORM_UNDEFINED)
            fan_value_drop(&fan_python, &c[i].value);
        if (own[i])
            fan_stream_pop(own[i]);
        fan_stream_drop(own[i]);
    }
    fan_free(c);
    fan_free(slots);
    fan_free(sorted);
    fan_free(own);
    return result;
}

static PyObject *buffer_add_many(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"slots", "gradients", "keys", "stream", "donate", "copy"};
    buffer_object *self = of(o);
    struct {
        PyObject *slots, *gradients, *keys, *stream, *donate, *copy;
    } a;
    batch t = {NULL};
    fan_stream *stream = NULL;
    fan_where w = {.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
    bool donate, copy;
    int done = -1;
    if (parse_call("add_many", names, 6, 2, "slots and gradients", args, nargs, kwnames, &a.slots) < 0)
        return NULL;
    if (!a.slots || !a.gradients)
        return PyErr_Format(PyExc_TypeError, "add_many() needs '%s'", a.slots ? "gradients" : "slots");
    if (ways_of(self, a.donate, a.copy, &donate, &copy) < 0)
        return NULL;
    fan_where_push(&w);
    if (batch_begin(&t, a.slots, a.gradients, a.keys) == 0 &&
        fan_stream_arg(a.stream ? a.stream : Py_None, &stream) == 0) {
        done = stream || copy ? 0 : batch_plain(self, &t, donate);
        if (done == 0)
            done = batch_any(self, &t, stream, donate, copy) == 0 ? 1 : -1;
    }
    fan_where_pop(&w);
    fan_stream_drop(stream);
    Py_XDECREF(t.slots);
    Py_XDECREF(t.gradients);
    Py_XDECREF(t.keys);
    return done > 0 ? Py_NewRef(Py_None) : NULL;
}

fan_buffer *fan_buffer_of(PyObject *o) { return of(o)->core; }

static PyObject *buffer_target(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"slot", "key", "stream"};
    buffer_object *self = of(o);
    struct {
        PyObject *slot, *key, *stream;
    } a;
    fan_where w = {.buffer = fan_buffer_name(self->core), .key = -1};
    fan_stream *stream = NULL;
    PyObject *target = NULL;
    int64_t key = -1;
    size_t slot;
    if (parse_call("target", names, 3, 1, "slot", args, nargs, kwnames, &a.slot) < 0)
        return NULL;
    if (!a.slot)
        return PyErr_Format(PyExc_TypeError, "target() needs 'slot'");
    if (slot_arg(self, a.slot, &slot) < 0)
        return NULL;
    w.slot = (Py_ssize_t)slot;
    w.slot_name = slot_name(self, slot);
    fan_where_push(&w);
    if (self->create_graph)
        fan_refuse(PyExc_ValueError, "target() lends memory, and a buffer with create_graph sums by the arrays' own +");
    else if ((!a.key || a.key == Py_None || fan_index(a.key, "key", PyExc_ValueError, &key) == 0) &&
             (!a.stream || a.stream == Py_None || fan_stream_arg(a.stream, &stream) == 0))
        target = fan_target_new(o, slot, key, stream);
    fan_where_pop(&w);
    fan_stream_drop(stream);
    return target;
}

static PyObject *buffer_expect(PyObject *o, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"slot", "n", NULL};
    buffer_object *self = of(o);
    PyObject *which, *count;
    fan_where w = {.buffer = fan_buffer_name(self->core), .key = -1};
    FAN_RAW fan_error err;
    fan_status status;
    int64_t n = 0;
    size_t slot;
    int bad;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:expect", names, &which, &count) ||
        slot_arg(self, which, &slot) < 0)
        return NULL;
    w.slot = (Py_ssize_t)slot;
    w.slot_name = slot_name(self, slot);
    fan_where_push(&w);
    bad = fan_index(count, "n", PyExc_ValueError, &n);
    fan_where_pop(&w);
    if (bad)
        return NULL;
    clear_error(&err);
    status = fan_buffer_expect(self->core, slot, n, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    Py_RETURN_NONE;
}

static PyObject *buffer_ready(PyObject *o, PyObject *which)
{
    FAN_RAW fan_error err;
    fan_status status;
    bool ready = false;
    size_t slot;
    if (slot_arg(of(o), which, &slot) < 0)
        return NULL;
    clear_error(&err);
    status = fan_buffer_ready(of(o)->core, slot, &ready, &err);
    if (status == FAN_OK && !ready && fan_watched())
        fan_call_idle();
    return status == FAN_OK ? PyBool_FromLong(ready) : fan_raise(status, &err);
}

static PyObject *buffer_snapshot(PyObject *o, PyObject *which)
{
    fan_value v = {.dtype = FAN_DT_NONE};
    FAN_RAW fan_error err;
    fan_status status;
    size_t slot;
    if (slot_arg(of(o), which, &slot) < 0)
        return NULL;
    clear_error(&err);
    status = fan_buffer_snapshot(of(o)->core, slot, NULL, &v, &err);
    return status == FAN_OK ? fan_export(&v) : fan_raise(status, &err);
}

/* parse_scale: D10: a number; what it may be for which dtype is the core's to say. */
static int parse_scale(PyObject *o, fan_take *how)
{
    PyObject *number = NULL;
    fan_scale *s = &how->scale;
    int overflow = 0;
    how->real = true;
    if (o == Py_None)
        return 0;
    s->on = true;
    if (PyComplex_Check(o) || PyArray_IsScalar(o, ComplexFloating)) {
        Py_complex c = PyComplex_AsCComplex(o);
        if (c.real == -1.0 && PyErr_Occurred())
            return -1;
        s->re = c.real;
        s->im = c.imag;
        how->real = false;
    } else if (PyFloat_Check(o) || PyBool_Check(o) || PyArray_IsScalar(o, Bool)) {
        s->re = PyFloat_Check(o) ? PyFloat_AS_DOUBLE(o) : (double)PyObject_IsTrue(o);
    } else if (PyIndex_Check(o) && !PyArray_Check(o)) {
        number = PyNumber_Index(o);
        s->i = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : 0;
        s->re = number ? PyLong_AsDouble(number) : 0;
        Py_XDECREF(number);
        if (!PyErr_Occurred()) {
            how->integral = !overflow;
            return 0;
        }
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
        return fan_refuse(PyExc_ValueError, "scale: %R is more than a float can hold", o);
    } else if ((PyArray_Check(o) && PyArray_NDIM((PyArrayObject *)o) > 0) || PyUnicode_Check(o) || PyBytes_Check(o) ||
               !Py_TYPE(o)->tp_as_number || !Py_TYPE(o)->tp_as_number->nb_float) {
        return fan_refuse(PyExc_TypeError, "scale: expected a number, got a %.200s", Py_TYPE(o)->tp_name);
    } else {
        number = PyNumber_Float(o);
        s->re = number ? PyFloat_AS_DOUBLE(number) : 0;
        Py_XDECREF(number);
        if (!number)
            return -1;
    }
    how->integral = how->real && s->re == floor(s->re) && s->re >= -0x1p63 && s->re < 0x1p63;
    if (how->integral)
        s->i = (int64_t)s->re;
    return 0;
}

/* import_out: an entry of out=, an array or None; the value is the caller's to drop. */
static int import_out(PyObject *item, const char *name, PyObject *slot_names, size_t slot, fan_stream *ready,
                      fan_value *value)
{
    fan_where w = {
        .buffer = name, .slot_name = name_at(slot_names, slot), .slot = (Py_ssize_t)slot, .key = -1, .stream = ready};
    int bad = 0;
    Py_INCREF(item);
    fan_where_push(&w);
    if (item != Py_None)
        bad = fan_import_out(item, value);
    fan_where_pop(&w);
    Py_DECREF(item);
    return bad;
}

/* parse_out: a list as long as the buffer, of arrays and None. */
static int parse_out(PyObject *out, const char *name, PyObject *slot_names, size_t n, fan_stream *ready,
                     fan_value *values)
{
    int bare = is_bare(out);
    if (bare < 0)
        return -1;
    if (!PyList_Check(out) && !PyTuple_Check(out))
        return fan_refuse(PyExc_TypeError, "out: expected a list of %zu arrays or Nones, got a %.200s%s", n,
                          Py_TYPE(out)->tp_name, bare ? ": give [array]" : "");
    if ((size_t)PySequence_Fast_GET_SIZE(out) != n)
        return fan_refuse(PyExc_ValueError, "out: expected %zu entr%s, one for each slot, got %zd", n,
                          n == 1 ? "y" : "ies", PySequence_Fast_GET_SIZE(out));
    for (size_t i = 0; i < n; i++) {
        if ((size_t)PySequence_Fast_GET_SIZE(out) != n)
            return fan_refuse(PyExc_RuntimeError, "out: the list changed its length meanwhile");
        if (import_out(PySequence_Fast_GET_ITEM(out, (Py_ssize_t)i), name, slot_names, i, ready, &values[i]) < 0)
            return -1;
    }
    return 0;
}

static fan_value *new_values(size_t n)
{
    fan_value *v = fan_calloc(sizeof *v * (n ? n : 1));
    for (size_t i = 0; v && i < n; i++)
        v[i].dtype = FAN_DT_NONE;
    if (!v)
        PyErr_NoMemory();
    return v;
}

static void free_values(fan_value *v, size_t n)
{
    PyObject *live = fan_exception_take();
    for (size_t i = 0; v && i < n; i++)
        fan_value_drop(&fan_python, &v[i]);
    fan_free(v);
    fan_exception_put(live);
}

/* What becomes of the sums while the core holds them still: whatever Python says then, none is lost. */
typedef struct shown {
    PyObject *list;
    const fan_value *outs; /* NULL: none */
} shown;

static fan_status show(void *ctx, size_t slot, const fan_value *sum, fan_error *err)
{
    const shown *to = ctx;
    fan_value copy;
    if (!sum) { /* libraries that count writes to their arrays are told of ours */
        const fan_value *out = &to->outs[slot];
        PyObject *arrays = out->origin >= FAN_FROM_FOREIGN ? fan_arrays() : NULL;
        PyObject *told = arrays ? PyObject_CallMethod(arrays, "wrote", "O", (PyObject *)out->object) : NULL;
        Py_XDECREF(told);
        return told || out->origin < FAN_FROM_FOREIGN ? FAN_OK : fan_from_python(err);
    }
    FAN_TRY(fan_value_copy(&fan_python, sum, &copy, err));
    PyObject *item = fan_export(&copy);
    if (!item)
        return fan_from_python(err);
    PyList_SET_ITEM(to->list, (Py_ssize_t)slot, item);
    return FAN_OK;
}

/* take_all: the sums as a list, of `only`, where that is not NULL, of this slot alone. What comes back as it is shown
 * is made before the slots are emptied; what was written into out= needs nothing that can fail. */
static PyObject *take_all(fan_buffer *core, const size_t *only, PyObject *slot_names, fan_stream *stream, PyObject *out,
                          PyObject *scale, bool writable)
{
    size_t n = only ? 1 : fan_buffer_slots(core);
    fan_value *outs = NULL, *results = new_values(n);
    PyObject *list = results ? PyList_New((Py_ssize_t)n) : NULL;
    shown to = {.list = list};
    fan_take how = {.one = only != NULL,
                    .slot = only ? *only : 0,
                    .stream = stream,
                    .writable = writable,
                    .show = show,
                    .ctx = &to};
    FAN_RAW fan_error err;
    fan_status status = FAN_OK;
    bool done = false;
    if (!list || parse_scale(scale, &how) < 0)
        goto done;
    if (only && (PyList_Check(out) || PyTuple_Check(out))) {
        fan_refuse(PyExc_TypeError,
                   "out: expected the array for slot %zu, got a %.200s: with slot= give the array itself", *only,
                   Py_TYPE(out)->tp_name);
        goto done;
    }
    if (out != Py_None) {
        to.outs = outs = new_values(n);
        if (!outs || (only ? import_out(out, fan_buffer_name(core), slot_names, *only, stream, outs)
                           : parse_out(out, fan_buffer_name(core), slot_names, n, stream, outs)) < 0)
            goto done;
        how.out = outs;
    }
    clear_error(&err);
    status = fan_buffer_take(core, &how, results, &err);
    if (status != FAN_OK) {
        fan_raise(status, &err);
        goto done;
    }
    for (size_t i = 0; i < n; i++)
        if (!PyList_GET_ITEM(list, (Py_ssize_t)i)) /* the caller's own array, or None */
            PyList_SET_ITEM(list, (Py_ssize_t)i, fan_export(&results[i]));
    done = true;
done:
    free_values(outs, n);
    free_values(results, n);
    if (!done)
        Py_CLEAR(list);
    return list;
}

/* objects_ahead, memory_ahead: fetched AHEAD slots before it is looked at. */
static void objects_ahead(const buffer_object *self, size_t i)
{
    fan_fast_sum soon = fan_buffer_plain_at(self->core, i + AHEAD < self->n ? i + AHEAD : i);
    fan_buffer_plain_soon(self->core, i + 2 * AHEAD);
    for (size_t k = 0; k < soon.n; k++)
        __builtin_prefetch(soon.terms[k].object);
}

static void memory_ahead(const buffer_object *self, size_t i)
{
    fan_fast_sum soon = fan_buffer_plain_at(self->core, i + AHEAD < self->n ? i + AHEAD : i);
    fan_buffer_plain_soon(self->core, i + 2 * AHEAD);
    for (size_t k = 0; k < soon.n; k++)
        __builtin_prefetch(soon.terms[k].data);
}

/* adds_up: whether a sum of Python ints stays in int64. */
static bool adds_up(const fan_fast_sum *sum, const fan_take *how)
{
    int64_t total = 0, n;
    bool over = how->scale.on;
    for (size_t k = 0; k < sum->n && !over; k++) {
        memcpy(&n, fan_fast_at(sum->kind, &sum->terms[k]), sizeof n);
        over = __builtin_add_overflow(total, n, &total);
    }
    return !over;
}

/* all_sound: what is read is what it was when it came, and what was not looked at then is looked at now. */
static bool all_sound(const buffer_object *self, fan_span span, const fan_take *how, bool out)
{
    bool reads = out || how->scale.on || how->writable || fan_buffer_learns(self->core);
    for (size_t i = span.first; i < span.end; i++) {
        fan_fast_sum sum = fan_buffer_plain_at(self->core, i);
        if (span.end - span.first >= FAR)
            objects_ahead(self, i);
        if (sum.n && sum.kind->weak && sum.kind->dtype == FAN_DT_INT64 && !adds_up(&sum, how))
            return false;
        for (size_t k = 0; k < sum.n; k++) {
            const fan_fast *one = &sum.terms[k];
            if (sum.kind->late && !one->ours && !fan_fast_sound(one->object))
                return false;
            if ((sum.n > 1 || reads) && !fan_fast_still(one->object, sum.kind, one->data))
                return false;
        }
    }
    return true;
}

static bool all_still(const fan_fast_sum *sum)
{
    for (size_t k = 0; k < sum->n; k++)
        if (!fan_fast_still(sum->terms[k].object, sum->kind, sum->terms[k].data))
            return false;
    return true;
}

/* part: gives up a hold that is not the last: nothing is called back. */
static bool part(void *object)
{
    if (Py_REFCNT((PyObject *)object) == 1)
        return false;
    Py_DECREF((PyObject *)object);
    return true;
}

/* writable_plain: `o` is an array that the fast path may write. */
static bool writable_plain(PyObject *o, fan_fast_kind *kind, char **data)
{
    if (PyArray_CheckExact(o))
        return fan_import_plain(o, kind, data) && PyArray_ISWRITEABLE((PyArrayObject *)o);
    return fan_import_plain(o, kind, data) && kind->late && fan_fast_sound(o) && fan_fast_still(o, kind, *data);
}

/* out_item: where slot i goes: of a take of one slot `out` is the array itself. */
static PyObject *out_item(PyObject *out, bool one, size_t i)
{
    return !out ? Py_None : one ? out : PySequence_Fast_GET_ITEM(out, (Py_ssize_t)i);
}

/* outs_of: the entries of out= that are arrays, if each is one for the fast path; *late: some are of a library that is
 * to be told (told_writes). */
static bool outs_of(const buffer_object *self, fan_span span, PyObject *out, bool one, fan_fast_out *outs, size_t *n,
                    bool *late)
{
    FAN_RAW fan_fast_kind kind;
    char *data;
    *n = 0;
    *late = false;
    for (size_t i = span.first; i < span.end; i++) {
        PyObject *o = out_item(out, one, i);
        if (o == Py_None)
            continue;
        fan_fast_sum sum = fan_buffer_plain_at(self->core, i);
        if (!writable_plain(o, &kind, &data) || (sum.n && !fan_fast_same(&kind, sum.kind)))
            return false;
        *late = *late || kind.late;
        outs[(*n)++] =
            (fan_fast_out){data, kind.late ? fan_fast_bytes(&kind) : (uint64_t)PyArray_NBYTES((PyArrayObject *)o), i};
    }
    return true;
}

/* fold_plain: makes the sum of a slot in `to`, without the interpreter where that pays; of numbers `to` is one already.
 */
static void fold_plain(const buffer_object *self, size_t slot, const fan_fast_sum *sum, const fan_take *how,
                       PyObject *to, bool is_out)
{
    _Alignas(16) char value[16];
    FAN_RAW fan_stats known;
    fan_stats *stats = fan_buffer_learns(self->core) ? &known : NULL;
    bool first = !sum->kind->scalar && to == sum->terms[0].object; /* numbers may be the same object by chance */
    bool handed = sum->n == 1 && !how->scale.on && (first || (sum->kind->scalar && !how->writable));
    if (handed && !stats)
        return;
    char *data = sum->kind->scalar ? value : fan_fast_data(to, sum->kind);
    if (fan_fast_bytes(sum->kind) > FAN_PLAIN_BYTES) {
        Py_BEGIN_ALLOW_THREADS fan_buffer_plain_fold(self->core, slot, how, data, stats);
        Py_END_ALLOW_THREADS if (fan_watched()) /* others may have come in meanwhile: so they do */
            fan_buffer_plain_meanwhile(self->core);
    } else if (stats || !sum->kind->scalar) {
        fan_buffer_plain_fold(self->core, slot, how, data, stats);
    }
    if (stats)
        fan_buffer_plain_learn(self->core, slot, stats);
    if (!handed)
        fan_buffer_plain_folded(self->core, slot, first && !is_out, sum->n == 1 && !is_out);
}

/* told_writes: libraries that count writes to their arrays are told of ours, before they happen. As Python is called,
 * everything is looked at once more then. */
static bool told_writes(const buffer_object *self, fan_span span, PyObject *list, const fan_fast_out *outs, size_t n)
{
    PyObject *arrays = fan_arrays();
    bool good = arrays != NULL;
    for (size_t i = 0; i < n && good; i++) {
        PyObject *to = PyList_GET_ITEM(list, (Py_ssize_t)(outs[i].slot - span.first));
        PyObject *told = to == Py_None || PyArray_CheckExact(to) ? Py_NewRef(Py_None)
                                                                 : PyObject_CallMethod(arrays, "wrote", "O", to);
        good = told != NULL;
        Py_XDECREF(told);
    }
    for (size_t i = 0; i < n && good; i++) {
        fan_fast_sum sum = fan_buffer_plain_at(self->core, outs[i].slot);
        good = !sum.n || (fan_fast_still(PyList_GET_ITEM(list, (Py_ssize_t)(outs[i].slot - span.first)), sum.kind,
                                         outs[i].data) &&
                          all_still(&sum));
    }
    return good;
}

/* named_out: out=, where it is the only argument by name (values: those by name); else NULL. */
static PyObject *named_out(PyObject *const *values, PyObject *kwnames)
{
    bool only = kwnames && PyTuple_GET_SIZE(kwnames) == 1 &&
                PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "out") == 0;
    return only ? values[0] : NULL;
}

/* named_slot: slot=, and *out=, where nothing else is given by name; else NULL. */
static PyObject *named_slot(PyObject *const *values, PyObject *kwnames, PyObject **out)
{
    PyObject *slot = NULL;
    Py_ssize_t n = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    *out = NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        if (PyUnicode_CompareWithASCIIString(name, "slot") == 0)
            slot = values[i];
        else if (PyUnicode_CompareWithASCIIString(name, "out") == 0)
            *out = values[i];
        else
            return NULL;
    }
    return slot;
}

#define FEW_OUTS 8

/* take_plain: *list gets the sums of the span, in `out` where that is not NULL. False: not for this way, and nothing
 * happened. */
static bool take_plain(buffer_object *self, fan_span span, const fan_take *how, PyObject *out, PyObject **list)
{
    fan_fast_out few[FEW_OUTS], *outs = few;
    size_t n = span.end - span.first, nouts = 0;
    bool ours, late = false;
    *list = NULL;
    if (!unwatched())
        return false;
    /* Made before a slot is claimed: this may collect garbage, which may do anything, add for one. */
    *list = PyList_New((Py_ssize_t)n);
    if (!*list || (out && !how->one && (size_t)PySequence_Fast_GET_SIZE(out) != n) ||
        !fan_buffer_take_plain(self->core, span, how)) {
        Py_CLEAR(*list);
        PyErr_Clear();
        return false;
    }
    if (out && n > FEW_OUTS)
        outs = fan_alloc(n * sizeof *outs);
    ours = *list && outs && all_sound(self, span, how, out != NULL);
    if (ours && out)
        ours = (how->one || (size_t)PySequence_Fast_GET_SIZE(out) == n) &&
               outs_of(self, span, out, how->one, outs, &nouts, &late) &&
               fan_buffer_plain_apart(self->core, span, outs, nouts);
    for (size_t i = span.first; i < span.end && ours; i++) {
        fan_fast_sum sum = fan_buffer_plain_at(self->core, i);
        PyObject *to = out_item(out, how->one, i), *item;
        item = sum.n == 0 ? Py_NewRef(Py_None) : to != Py_None ? Py_NewRef(to) : target_of(self, i, &sum, how);
        ours = item != NULL;
        if (item)
            PyList_SET_ITEM(*list, (Py_ssize_t)(i - span.first), item);
    }
    ours = ours && (!late || told_writes(self, span, *list, outs, nouts));
    if (!ours) {
        fan_buffer_plain_done(self->core, span, false, part);
        Py_CLEAR(*list);
        PyErr_Clear(); /* the general path says it, if there is anything to say */
    }
    for (size_t i = span.first; i < span.end && ours; i++) {
        fan_fast_sum sum = fan_buffer_plain_at(self->core, i);
        if (n >= FAR)
            memory_ahead(self, i);
        if (sum.n == 0 && fan_buffer_learns(self->core))
            fan_buffer_plain_learn(self->core, i, NULL);
        if (sum.n > 0)
            fold_plain(self, i, &sum, how, PyList_GET_ITEM(*list, (Py_ssize_t)(i - span.first)),
                       out_item(out, how->one, i) != Py_None);
    }
    if (outs != few)
        fan_free(outs);
    if (ours)
        fan_buffer_plain_done(self->core, span, true, part);
    return ours;
}

/* wishes_of: what take is told by name, as far as the fast path knows it; false: something else is there, or what must
 * be said is an error. */
static bool wishes_of(PyObject *const *values, PyObject *kwnames, PyObject **out, fan_take *how)
{
    const fan_state *st = fan_state_get();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i), *value = values[i];
        if (name == st->str_writable && (value == Py_True || value == Py_False)) {
            how->writable = value == Py_True;
        } else if (name == st->str_out) {
            *out = value == Py_None ? NULL : value;
        } else if (name == st->str_slot && value != Py_None) {
            Py_ssize_t slot = small_index(value);
            if (slot < 0)
                return false;
            how->one = true;
            how->slot = (size_t)slot;
        } else if (name == st->str_scale &&
                   (PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyComplex_CheckExact(value))) {
            if (parse_scale(value, how) < 0) {
                PyErr_Clear();
                return false;
            }
        } else if (value != Py_None || (name != st->str_slot && name != st->str_scale && name != st->str_stream)) {
            return false;
        }
    }
    return how->one || !*out || PyList_CheckExact(*out) || PyTuple_CheckExact(*out);
}

static PyObject *only_item(PyObject *list)
{
    PyObject *item = list ? Py_NewRef(PyList_GET_ITEM(list, 0)) : NULL;
    Py_XDECREF(list);
    return item;
}

static PyObject *take_any(buffer_object *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"stream", "slot", "out", "scale", "writable"};
    struct {
        PyObject *stream, *slot, *out, *scale, *writable;
    } a;
    fan_where w = {.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
    fan_stream *s = NULL;
    PyObject *list = NULL;
    bool writable;
    size_t slot = 0;
    if (parse_call("take", names, 5, 1, "stream", args, nargs, kwnames, &a.stream) < 0 ||
        truth(a.writable, &writable) < 0)
        return NULL;
    bool one = a.slot && a.slot != Py_None;
    if (one && slot_arg(self, a.slot, &slot) < 0)
        return NULL;
    fan_where_push(&w);
    if (fan_stream_arg(a.stream ? a.stream : Py_None, &s) == 0)
        list = take_all(self->core, one ? &slot : NULL, self->names, s, a.out ? a.out : Py_None,
                        a.scale ? a.scale : Py_None, writable);
    fan_where_pop(&w);
    fan_stream_drop(s);
    return one ? only_item(list) : list;
}

static PyObject *buffer_take(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *list, *out = NULL;
    fan_take how = {.stream = NULL};
    if (nargs == 0 && (!kwnames || wishes_of(args, kwnames, &out, &how)) && (!how.one || how.slot < of(o)->n)) {
        fan_span span = how.one ? (fan_span){how.slot, how.slot + 1} : (fan_span){0, of(o)->n};
        if (take_plain(of(o), span, &how, out, &list))
            return how.one ? only_item(list) : list;
    }
    return take_any(of(o), args, nargs, kwnames);
}

/* stats_of: a fanin.Stats, or None of a sum that is undefined or no array. */
static PyObject *stats_of(fan_buffer *core, size_t slot)
{
    PyObject *type = fan_lazy(&fan_state_get()->stats_type, "fanin.slots", "Stats"), *key;
    bool some, bad;
    fan_stats s;
    int64_t bad_key;
    FAN_RAW fan_error err;
    fan_status status;
    if (!type)
        return NULL;
    clear_error(&err);
    status = fan_buffer_stats(core, slot, &some, &s, &bad, &bad_key, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    if (!some)
        Py_RETURN_NONE;
    key = bad && bad_key >= 0 ? PyLong_FromLongLong(bad_key) : Py_NewRef(Py_None);
    return key ? PyObject_CallFunction(type, "KddKN", (unsigned long long)s.count, s.sumsq, s.absmax,
                                       (unsigned long long)s.nonfinite, key)
               : NULL;
}

static PyObject *buffer_stats(PyObject *o, PyObject *which)
{
    size_t slot;
    return slot_arg(of(o), which, &slot) < 0 ? NULL : stats_of(of(o)->core, slot);
}

static PyObject *buffer_clear(PyObject *o, PyObject *Py_UNUSED(none))
{
    FAN_RAW fan_error err;
    fan_status status;
    clear_error(&err);
    status = fan_buffer_clear(of(o)->core, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    Py_RETURN_NONE;
}

/* put: d[name] = value, which is taken; value NULL: the exception is there already. */
static int put(PyObject *d, const char *name, PyObject *value)
{
    int result = value ? PyDict_SetItemString(d, name, value) : -1;
    Py_XDECREF(value);
    return result;
}

static const char *form_word(fan_form f)
{
    static const char *const words[] = {"undefined", "zero", "dense", "sparse", "object"};
    return words[f];
}

static PyObject *view_of_item(const fan_item_view *v)
{
    return Py_BuildValue("{s:L,s:s,s:s,s:K,s:N,s:N,s:N}", "key", (long long)v->key, "form", form_word(v->form), "dtype",
                         fan_dtype_name(v->dtype), "P", (unsigned long long)v->producer, "event",
                         PyBool_FromLong(v->event), "donated", PyBool_FromLong(v->donated), "ready",
                         PyBool_FromLong(v->ready));
}

/* view_of: what a slot looks like now, as a dict for _trace.explain. */
static PyObject *view_of(const buffer_object *self, size_t slot)
{
    fan_slot_view v;
    fan_item_view *items = NULL;
    FAN_RAW fan_error err;
    fan_status status;
    size_t cap = 0;
    PyObject *d = NULL, *list = NULL, *name = slot_name(self, slot);
    /* Others may add meanwhile: until the room suffices. */
    for (;;) {
        clear_error(&err);
        memset(&v, 0, sizeof v);
        status = fan_buffer_look(self->core, slot, &v, items, cap, &err);
        if (status != FAN_OK) {
            fan_raise(status, &err);
            goto done;
        }
        if (v.items <= cap)
            break;
        fan_free(items);
        cap = v.items + 8;
        items = fan_calloc(cap * sizeof *items);
        if (!items) {
            PyErr_NoMemory();
            goto done;
        }
    }
    list = PyList_New((Py_ssize_t)v.items);
    for (size_t i = 0; list && i < v.items; i++) {
        PyObject *item = view_of_item(&items[i]);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    if (!list)
        goto done;
    d = Py_BuildValue("{s:s,s:K,s:O,s:K,s:K,s:K,s:K,s:N,s:N,s:N,s:z}", "buffer", fan_buffer_name(self->core), "slot",
                      (unsigned long long)slot, "name", name ? name : Py_None, "rules", (unsigned long long)v.rules,
                      "C", (unsigned long long)v.consumer, "A", (unsigned long long)v.accum, "R",
                      (unsigned long long)v.ready, "event", PyBool_FromLong(v.event), "has_value",
                      PyBool_FromLong(v.has_value), "value_ours", PyBool_FromLong(v.value_ours), "poisoned",
                      v.poisoned);
    if (d && (put(d, "budget", fan_budget_wrap(v.budget)) < 0 ||
              put(d, "limits",
                  Py_BuildValue("(KK)", (unsigned long long)v.limits.alone, (unsigned long long)v.limits.held)) < 0 ||
              put(d, "parked_bytes", PyLong_FromUnsignedLongLong(v.parked)) < 0 ||
              put(d, "alone_bytes", PyLong_FromUnsignedLongLong(v.alone)) < 0))
        Py_CLEAR(d);
    if (!d || put(d, "how", v.how ? PyUnicode_FromStringAndSize(&v.how, 1) : PyUnicode_FromString("")) < 0 ||
        put(d, "value_form", PyUnicode_FromString(form_word(v.value_form))) < 0 ||
        put(d, "dtype", PyUnicode_FromString(fan_dtype_name(v.dtype))) < 0 ||
        put(d, "accumulate", PyUnicode_FromString(fan_dtype_name(v.accumulate))) < 0 ||
        put(d, "count", PyLong_FromLongLong(v.count)) < 0 || put(d, "expected", PyLong_FromLongLong(v.expected)) < 0 ||
        put(d, "next_key", PyLong_FromLongLong(v.next_key)) < 0 ||
        put(d, "next_action", PyUnicode_FromString(fan_action_word(v.next.action))) < 0 ||
        put(d, "next_rules", PyLong_FromUnsignedLongLong(v.next.rules)) < 0 ||
        put(d, "reuse", PyUnicode_FromString(fan_reuse_words(v.reuse))) < 0 || put(d, "items", Py_NewRef(list)) < 0)
        Py_CLEAR(d);
done:
    Py_XDECREF(list);
    fan_free(items);
    return d;
}

static PyObject *buffer_explain(PyObject *o, PyObject *which)
{
    PyObject *module, *view, *text;
    size_t slot;
    if (slot_arg(of(o), which, &slot) < 0)
        return NULL;
    view = view_of(of(o), slot);
    module = view ? PyImport_ImportModule("fanin._trace.explain") : NULL;
    text = module ? PyObject_CallMethod(module, "explain", "O", view) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(view);
    return text;
}

static PyObject *buffer_reduce(PyObject *o, PyObject *Py_UNUSED(protocol))
{
    return PyErr_Format(
        PyExc_TypeError,
        "cannot pickle or copy %R: what it holds is ordered by streams of this process; take() the sums", o);
}

static PyObject *buffer_repr(PyObject *o)
{
    const buffer_object *self = of(o);
    const char *name = fan_buffer_name(self->core);
    fan_sketch s;
    char said[64] = "", sums[40] = "", lost[40] = "";
    fan_buffer_sketch(self->core, &s);
    if (strcmp(name, "InputBuffer") != 0)
        snprintf(said, sizeof said, " '%.58s'", name);
    if (s.sums)
        snprintf(sums, sizeof sums, ", %zu sum%s begun", s.sums, FAN_PLURAL(s.sums));
    if (s.poisoned)
        snprintf(lost, sizeof lost, ", %zu poisoned", s.poisoned);
    if (!s.parked)
        return PyUnicode_FromFormat("<fanin.InputBuffer%s: %zu slot%s%s%s%s>", said, self->n, FAN_PLURAL(self->n),
                                    s.sums || s.poisoned ? "" : ", empty", sums, lost);
    return PyUnicode_FromFormat("<fanin.InputBuffer%s: %zu slot%s, %zu parked, %llu B%s%s>", said, self->n,
                                FAN_PLURAL(self->n), s.parked, (unsigned long long)s.bytes, sums, lost);
}

static Py_ssize_t buffer_length(PyObject *o) { return (Py_ssize_t)of(o)->n; }

static PyObject *buffer_name(PyObject *o, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(fan_buffer_name(of(o)->core));
}

/* offset_of: where objects of a class keep the slot of this name; -1 with an exception. */
static Py_ssize_t offset_of(PyObject *type, const char *name)
{
    PyObject *member = PyObject_GetAttrString(type, name);
    Py_ssize_t at = -1;
    if (member && Py_IS_TYPE(member, &PyMemberDescr_Type))
        at = ((PyMemberDescrObject *)member)->d_member->offset;
    else if (member)
        PyErr_Format(PyExc_SystemError, "%R has no slot %s", type, name);
    Py_XDECREF(member);
    return at;
}

/* filled: an object of a class of slots, of which the first n become these numbers. */
static PyObject *filled(PyObject *type, const Py_ssize_t *offsets, const uint64_t *numbers, size_t n)
{
    PyObject *made = ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    for (size_t i = 0; made && i < n; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (!number) {
            Py_CLEAR(made);
            break;
        }
        *(PyObject **)(void *)((char *)made + offsets[i]) = number;
    }
    return made;
}

/* learn_offsets: of fanin.Counters and fanin.options.ProcessCounters, which has those of the former and four more. */
static int learn_offsets(fan_state *st)
{
    static const char *const names[] = {
#define X(field) #field,
        FAN_COUNTER_LIST(X)
#undef X
            "pool_bytes",
        "pool_peak_bytes", "pool_hits", "pool_misses"};
    _Static_assert(sizeof names / sizeof *names == FAN_COUNTERS_ALL, "as many as there are");
    PyObject *all = fan_lazy(&st->process_counters_type, "fanin.options", "ProcessCounters");
    if (!all || !fan_lazy(&st->counters_type, "fanin.options", "Counters"))
        return -1;
    for (size_t i = 0; i < FAN_COUNTERS_ALL; i++)
        if ((st->counter_offsets[i] = offset_of(all, names[i])) < 0)
            return -1;
    st->counters_known = true;
    return 0;
}

#define FAN_COUNTERS_OWN (sizeof(fan_counters) / sizeof(uint64_t))

PyObject *fan_counters_wrap(const fan_counters *n)
{
    fan_state *st = fan_state_get();
    uint64_t numbers[FAN_COUNTERS_OWN];
    if (!st->counters_known && learn_offsets(st) < 0)
        return NULL;
    memcpy(numbers, n, sizeof numbers);
    return filled(st->counters_type, st->counter_offsets, numbers, FAN_COUNTERS_OWN);
}

PyObject *fan_process_counters(void)
{
    fan_state *st = fan_state_get();
    uint64_t numbers[FAN_COUNTERS_ALL];
    fan_counters n;
    fan_pool_counts pool = fan_pool_get();
    if (!st->counters_known && learn_offsets(st) < 0)
        return NULL;
    fan_counters_total(&n);
    memcpy(numbers, &n, sizeof n);
    numbers[FAN_COUNTERS_OWN] = pool.held;
    numbers[FAN_COUNTERS_OWN + 1] = pool.peak;
    numbers[FAN_COUNTERS_OWN + 2] = pool.hits;
    numbers[FAN_COUNTERS_OWN + 3] = pool.misses;
    return filled(st->process_counters_type, st->counter_offsets, numbers, FAN_COUNTERS_ALL);
}

static PyObject *buffer_counters(PyObject *o, void *Py_UNUSED(closure))
{
    fan_counters n;
    fan_buffer_counters(of(o)->core, &n);
    return fan_counters_wrap(&n);
}

/* ---- what each does to what threads share, where it takes no lock (turn.h) ---- */

static size_t slot_seen(PyObject *o)
{
    Py_ssize_t i = o ? small_index(o) : -1;
    return i < 0 ? SIZE_MAX : (size_t)i;
}

static void seen_adding(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen(of(o)->core, slot_seen(nargs > 0 ? args[0] : NULL), FAN_TOUCH_WRITES);
}

static void seen_reading(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen(of(o)->core, slot_seen(nargs > 0 ? args[0] : NULL), FAN_TOUCH_READS);
}

static void seen_adding_many(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *Py_UNUSED(kwnames))
{
    PyObject *slots = nargs > 0 && (PyList_CheckExact(args[0]) || PyTuple_CheckExact(args[0])) ? args[0] : NULL;
    if (!slots)
        fan_buffer_seen(of(o)->core, SIZE_MAX, FAN_TOUCH_WRITES);
    for (Py_ssize_t i = 0; slots && i < PySequence_Fast_GET_SIZE(slots); i++)
        fan_buffer_seen(of(o)->core, slot_seen(PySequence_Fast_GET_ITEM(slots, i)), FAN_TOUCH_WRITES);
}

static void seen_taking(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *out, *slot = named_slot(args + nargs, kwnames, &out);
    fan_buffer_seen(of(o)->core, slot_seen(slot), FAN_TOUCH_WRITES);
    fan_touch_thing(FAN_THING_HOST_MEMORY, 0,
                    kwnames && (out || !slot) ? FAN_TOUCH_WRITES : FAN_TOUCH_READS); /* out= */
}

static void seen_explaining(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    seen_reading(o, args, nargs, kwnames);
    fan_buffer_seen_parked(of(o)->core);
}

static void seen_all(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                     PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen(of(o)->core, SIZE_MAX, FAN_TOUCH_READS);
    fan_buffer_seen_parked(of(o)->core);
}

static void seen_counters(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                          PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen_counters(of(o)->core);
}

FAN_TURN_FAST(buffer_add, seen_adding)
FAN_TURN_FAST(buffer_add_many, seen_adding_many)
FAN_TURN_FAST(buffer_take, seen_taking)
FAN_TURN_NAMED(buffer_expect, seen_adding)
FAN_TURN_ONE(buffer_ready, seen_reading)
FAN_TURN_ONE(buffer_snapshot, seen_reading)
FAN_TURN_ONE(buffer_stats, seen_reading)
FAN_TURN_ONE(buffer_explain, seen_explaining)
FAN_TURN_NONE(buffer_clear, seen_taking)
FAN_TURN_REPR(buffer_repr, seen_all)
FAN_TURN_GET(buffer_counters, seen_counters)

/* buffer_item: for iteration alone: buf[slot] is asked by buffer_snapshot, which knows no negative slots either. */
static PyObject *buffer_item(PyObject *o, Py_ssize_t i)
{
    PyObject *slot = PyLong_FromSsize_t(i), *made = slot ? buffer_snapshot_turn(o, slot) : NULL;
    Py_XDECREF(slot);
    return made;
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))buffer_add_turn, METH_FASTCALL | METH_KEYWORDS,
     "add($self, slot, gradient, *, key=None, stream=None, donate=False, copy=False)\n--\n\n"
     "Add one gradient to a slot.\n\n"
     "The gradient is an array (ndarray, torch.Tensor, jax.Array, SciPy sparse, fanin.Sparse, an array of a simulated "
     "device),\n"
     "a number, fanin.Zero, an object with its own `+`, or None: undefined, which counts and adds nothing.\n"
     "Leave it as it is until the sum is taken: the buffer may keep a reference. `copy=True` lifts that. Without "
     "`donate` it is\n"
     "never written into; with it, nobody else touches it until take(), and the sum may be written there.\n\n"
     "key: an integer from 0 on, one per edge: the sum is the left fold in key order, whoever came first. stream: the "
     "one that\n"
     "the gradient was made on. donate and copy exclude each other.\n\n"
     "Raises IndexError (slot), TypeError (no array, no stream), ValueError (shape, dtype, key, count), OverflowError "
     "(a Python int\n"
     "that does not fit int64), BufferError (an array that cannot be imported), RuntimeError (the slot is poisoned). "
     "Then all is as before.\n\n"
     ">>> buf = fanin.InputBuffer(1)\n"
     ">>> buf.add(0, np.array([1.0, 2.0]))\n"
     ">>> buf.add(0, np.array([10.0, 20.0]))\n"
     ">>> buf.take()\n"
     "[array([11., 22.])]\n"},
    {"add_many", (PyCFunction)(void (*)(void))buffer_add_many_turn, METH_FASTCALL | METH_KEYWORDS,
     "add_many($self, slots, gradients, *, keys=None, stream=None, donate=False, copy=False)\n--\n\n"
     "Add gradients[i] to slots[i] for each i, in one call: all of them or, with an error, none.\n\n"
     "slots: a sequence of ints; one slot may be there more than once. gradients: as many of what `add` takes. keys: "
     "as many ints\n"
     "(or None for each), stream, donate, copy: as `add` has them, for all.\n\n"
     "Raises what `add` raises, and ValueError where the lengths differ; then no gradient was added.\n\n"
     ">>> buf = fanin.InputBuffer(2)\n"
     ">>> buf.add_many([0, 1, 0], [np.ones(2), np.ones(3), np.ones(2)])\n"
     ">>> buf.take()\n"
     "[array([2., 2.]), array([1., 1., 1.])]\n"},
    {"target", (PyCFunction)(void (*)(void))buffer_target, METH_FASTCALL | METH_KEYWORDS,
     "target($self, slot, *, key=None, stream=None)\n--\n\n"
     "A context that lends an array, in the accumulation dtype, for a producer that adds into the slot by itself.\n\n"
     "It is the running sum where that is safe: where it is the buffer's own, `key` comes next, and the producer's "
     "stream is the\n"
     "one that sums; the slot then waits for the end. Else it holds zeros, and counts as a contribution at the end. "
     "The slot must\n"
     "declare its shape and dtype. If the body raises, zeros that were lent are dropped; a slot whose running sum was "
     "lent answers\n"
     "every call but clear() with a RuntimeError. What was lent is not to be written after the block.\n\n"
     "Raises IndexError (slot), TypeError (stream), ValueError (an undeclared slot, key, count).\n\n"
     ">>> buf = fanin.InputBuffer([np.empty(3, np.float16)])\n"
     ">>> with buf.target(0) as out:\n"
     "...     out += np.float32([1, 2, 3])\n"
     ">>> buf.take()\n"
     "[array([1., 2., 3.], dtype=float16)]\n"},
    {"expect", (PyCFunction)(void (*)(void))buffer_expect_turn, METH_VARARGS | METH_KEYWORDS,
     "expect($self, slot, n)\n--\n\n"
     "Say that each pass brings `n` contributions to a slot; this stays after take().\n\n"
     "One too many is then a ValueError at add, a missing one at take.\n\n"
     ">>> buf = fanin.InputBuffer(1)\n"
     ">>> buf.expect(0, 2)\n"
     ">>> buf.add(0, 1.0)\n"
     ">>> buf.ready(0)\n"
     "False\n"},
    {"ready", buffer_ready_turn, METH_O,
     "ready($self, slot, /)\n--\n\n"
     "Whether all contributions that were told to `expect` have come; ValueError without expect."},
    {"take", (PyCFunction)(void (*)(void))buffer_take_turn, METH_FASTCALL | METH_KEYWORDS,
     "take($self, stream=None, *, slot=None, out=None, scale=None, writable=False)\n--\n\n"
     "All sums, as a list with an entry for each slot, None where it is undefined; the buffer is then empty.\n\n"
     "slot: of this one alone the sum comes back, bare, and only it is empty then: one buffer can serve a whole graph. "
     "`out` is one array.\n"
     "The sums are ready to be used on `stream` (default: the buffer's). A single contribution comes back as the very "
     "object\n"
     "that was added; `writable=True` copies what is not the buffer's alone. out: a list of arrays (or None) to write "
     "the sums into.\n"
     "scale: a number that multiplies the sums in the same pass, before the one rounding.\n\n"
     "Raises ValueError (out, scale, a contribution missing), BufferError (out cannot be written), OverflowError (a "
     "sum of Python ints\n"
     "that does not fit), RuntimeError (poisoned; from within a target of a slot).\n\n"
     ">>> buf = fanin.InputBuffer(2)\n"
     ">>> buf.add(0, np.float32([1, 2]))\n"
     ">>> buf.add(0, np.float32([3, 4]))\n"
     ">>> buf.take(scale=0.5)\n"
     "[array([2., 3.], dtype=float32), None]\n"
     ">>> buf.add(0, 1.0); buf.add(1, 2.0)\n"
     ">>> buf.take(slot=1), buf.take()\n"
     "(2.0, [1.0, None])\n"},
    {"stats", buffer_stats_turn, METH_O,
     "stats($self, slot, /)\n--\n\n"
     "What is known of the sum that was taken of a slot, until something is added to it again: a fanin.Stats; None "
     "where the sum is\n"
     "undefined, or an object. Gathered in the same pass over memory as the sum, where there is one.\n\n"
     "On a device with streams the sum leaves them there: the first call waits for the stream that summed, and "
     "blocks.\n\n"
     "Raises ValueError if the buffer was made without stats=True, or no sum was taken; CaptureError while that stream "
     "is captured, and\n"
     "of a sum that was made while it was.\n\n"
     ">>> buf = fanin.InputBuffer(1, stats=True)\n"
     ">>> buf.add(0, np.array([3.0, np.inf]), key=0)\n"
     ">>> buf.add(0, np.array([1.0, 1.0]), key=1)\n"
     ">>> _ = buf.take()\n"
     ">>> buf.stats(0)\n"
     "Stats(count=2, sumsq=16.0, absmax=4.0, nonfinite=1, first_bad_key=0)\n"},
    {"clear", buffer_clear_turn, METH_NOARGS,
     "clear($self, /)\n--\n\nEmpty it, also when it is poisoned; for passes that failed."},
    {"explain", buffer_explain_turn, METH_O,
     "explain($self, slot, /)\n--\n\n"
     "What was and will be decided for a slot, in sentences with the numbers of the rules.\n\n"
     ">>> buf = fanin.InputBuffer(1, name=\"w1\")\n"
     ">>> print(buf.explain(0))\n"
     "w1: slot 0: nothing has come yet.\n"},
    {"__reduce_ex__", buffer_reduce, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *buffer_budget(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_budget_wrap(fan_buffer_budget(of(o)->core));
}

static PyGetSetDef getset[] = {
    {"budget", buffer_budget, NULL,
     "Bytes of contributions that may wait to be summed: \"auto\", a number, or math.inf.", NULL},
    {"name", buffer_name, NULL, "Its name in messages, traces and pictures.", NULL},
    {"counters", buffer_counters_turn, NULL, "What it has done so far: a fanin.Counters.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(buffer_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "InputBuffer(slots, *, budget=None, accumulate=None, stats=False, stream=None, leaf=False, create_graph=False, "
     "name=None)\n--\n\n"
     "Gradients are added to its slots, from any thread and any stream; their sums are taken.\n\n"
     "slots: a count; or a sequence of example arrays, whose shape, dtype and device are taken, and of fanin.Slot.\n"
     "budget: bytes of contributions that may wait to be summed; 0 sums at each arrival, math.inf only when asked. "
     "\"auto\": what the\n"
     "buffer alone keeps alive, for whoever made it has dropped it, counts against a part of the second-level cache, "
     "and what somebody\n"
     "else holds against 64 MiB. None is what fanin.set_options says: \"auto\" at first. The bits of the sums do not "
     "depend on it.\n"
     "accumulate: the dtype in which sums run; by default float32 for float16, bfloat16 and float8, else the dtype "
     "itself. \"exact\":\n"
     "sums of floats are those of real numbers, rounded once, whatever the order. stats: `stats()` tells norms, "
     "largest elements and\n"
     "non-finite ones of what was taken, and waits for it on a device with streams. stream: the consumer's. leaf: the "
     "consumer accumulates into `.grad`. create_graph: sums are made by the arrays' own `+`, so\n"
     "that they can be differentiated. name: for messages, traces and pictures.\n\n"
     ">>> buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype=\"float32\", name=\"b1\")])\n"
     ">>> buf.add(0, np.ones((5, 2), np.float32))   # summed to the declared shape\n"
     ">>> buf.take()\n"
     "[array([5., 5.], dtype=float32)]\n"},
    {Py_tp_new, buffer_new},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_traverse, buffer_traverse},
    {Py_tp_clear, buffer_clear_refs},
    {Py_tp_repr, buffer_repr_turn},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {Py_mp_length, buffer_length},
    {Py_mp_subscript, buffer_snapshot_turn},
    {Py_sq_item, buffer_item},
    {0, NULL},
};

PyType_Spec fan_buffer_spec = {
    .name = "fanin.InputBuffer",
    .basicsize = sizeof(buffer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

/* ---- add_n ---- */

/* note: says of the live exception which array it was. */
static void note(Py_ssize_t i)
{
    PyObject *e = fan_exception_take(), *done = NULL;
    if (e)
        done = PyObject_CallMethod(e, "add_note", "N", PyUnicode_FromFormat("it was arrays[%zd] of add_n", i));
    if (!done)
        PyErr_Clear();
    Py_XDECREF(done);
    fan_exception_put(e);
}

static int add_all(fan_buffer *core, PyObject *arrays, PyObject *keys)
{
    Py_ssize_t n = PyTuple_GET_SIZE(arrays);
    for (Py_ssize_t i = 0; i < n; i++) {
        fan_contribution c = {.key = -1};
        int bad = keys && fan_index(PyTuple_GET_ITEM(keys, i), "key", PyExc_ValueError, &c.key) < 0;
        bad = bad || fan_import(PyTuple_GET_ITEM(arrays, i), false, false, &c.value) < 0 || add_on(core, 0, &c) < 0;
        if (c.value.form != FAN_FORM_UNDEFINED)
            fan_value_drop(&fan_python, &c.value);
        if (bad) {
            note(i);
            return -1;
        }
    }
    return 0;
}

/* sum_plain: the sum of src into `to`, without the interpreter where that pays; the objects are held meanwhile, for
 * their list may change. */
static void sum_plain(const fan_fast_kind *kind, PyObject *const *items, const char *const *src, size_t n, char *to)
{
    uint64_t bytes = fan_fast_bytes(kind);
    if (bytes <= FAN_PLAIN_BYTES) {
        fan_fast_sum_of(kind, src, n, to);
    } else {
        FAN_RAW PyObject *held[FAN_PLAIN_MOST];
        for (size_t i = 0; i < n; i++)
            held[i] = Py_NewRef(items[i]);
        Py_BEGIN_ALLOW_THREADS fan_fast_sum_of(kind, src, n, to);
        Py_END_ALLOW_THREADS for (size_t i = 0; i < n; i++) Py_DECREF(held[i]);
    }
    fan_fast_summed(bytes, n);
}

/* add_plain_n: the sum of a few small arrays of one kind, in `out` where that is not NULL; NULL without an exception:
 * not for this way. */
static PyObject *add_plain_n(PyObject *arrays, PyObject *out)
{
    FAN_RAW const char *src[FAN_PLAIN_MOST];
    FAN_RAW fan_fast_kind kind, other;
    Py_ssize_t n = PyList_CheckExact(arrays) || PyTuple_CheckExact(arrays) ? PySequence_Fast_GET_SIZE(arrays) : 0;
    PyObject **items = n ? PySequence_Fast_ITEMS(arrays) : NULL;
    char *data, *to;
    if (n < 2 || n > FAN_PLAIN_MOST || !fan_import_plain(items[0], &kind, &data) || kind.late || kind.scalar ||
        !fan_fast_fits(kind.dtype, fan_dtype_accumulate(kind.dtype), fan_fast_bytes(&kind), (size_t)n) || !unwatched())
        return NULL;
    src[0] = data;
    for (Py_ssize_t i = 1; i < n; i++) {
        if (!fan_import_plain(items[i], &other, &data) || !fan_fast_same(&kind, &other))
            return NULL;
        src[i] = data;
    }
    if (out) {
        if (!writable_plain(out, &other, &to) || !fan_fast_same(&kind, &other))
            return NULL;
        uint64_t bytes = (uint64_t)PyArray_NBYTES((PyArrayObject *)out);
        for (Py_ssize_t i = 0; i < n; i++)
            if (src[i] != to && src[i] < to + bytes && to < src[i] + bytes)
                return NULL;
    }
    PyObject *sum = out ? Py_NewRef(out) : fan_fast_fresh(items[0], &kind);
    if (sum)
        sum_plain(&kind, items, src, (size_t)n, fan_fast_data(sum, &kind));
    return sum;
}

static PyObject *pair_of(PyObject *sum, PyObject *stats)
{
    PyObject *pair = stats ? PyTuple_Pack(2, sum, stats) : NULL;
    Py_XDECREF(stats);
    return pair;
}

static PyObject *add_n_any(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"arrays", "out", "keys", "accumulate", "scale", "stats"};
    struct {
        PyObject *arrays, *out, *keys, *accumulate, *scale, *stats;
    } a;
    PyObject *items = NULL, *numbers = NULL, *outs = NULL, *list = NULL, *sum = NULL;
    fan_buffer_config config = {
        .slots = 1, .budget = UINT64_MAX, .accumulate = FAN_DT_NONE, .frontend = &fan_python, .name = "add_n"};
    fan_where w = {.buffer = "add_n", .slot = -1, .key = -1};
    fan_buffer *core = NULL;
    FAN_RAW fan_error err;
    fan_status status;
    bool stats;
    int bare;
    if (parse_call("add_n", names, 6, 1, "the arrays", args, nargs, kwnames, &a.arrays) < 0)
        return NULL;
    if (!a.arrays) {
        PyErr_SetString(PyExc_TypeError, "add_n() needs a sequence of arrays");
        return NULL;
    }
    if (truth(a.stats, &stats) < 0)
        return NULL;
    PyObject *arrays = a.arrays, *out = a.out ? a.out : Py_None, *keys = a.keys ? a.keys : Py_None;
    fan_where_push(&w);
    bare = is_bare(arrays);
    if (bare > 0 || PyUnicode_Check(arrays) || PyBytes_Check(arrays) || PyDict_Check(arrays) ||
        !Py_TYPE(arrays)->tp_iter)
        fan_refuse(PyExc_TypeError, "expected a sequence of arrays, got one %.200s%s", Py_TYPE(arrays)->tp_name,
                   bare > 0 ? ": give list(x) or [x, ..]" : "");
    config.stats = stats;
    if (PyErr_Occurred() ||
        accumulate_arg(a.accumulate ? a.accumulate : Py_None, &config.accumulate, &config.exact) < 0 ||
        !(items = PySequence_Tuple(arrays)))
        goto done;
    if (PyTuple_GET_SIZE(items) == 0) {
        fan_refuse(PyExc_ValueError, "expected at least one array: the sum of none has no shape and no dtype");
        goto done;
    }
    if (keys != Py_None) {
        numbers = PySequence_Tuple(keys);
        if (numbers && PyTuple_GET_SIZE(numbers) != PyTuple_GET_SIZE(items))
            fan_refuse(PyExc_ValueError, "expected as many keys as arrays, %zd, got %zd", PyTuple_GET_SIZE(items),
                       PyTuple_GET_SIZE(numbers));
        if (PyErr_Occurred())
            goto done;
    }
    clear_error(&err);
    status = fan_buffer_new(&config, &core, &err);
    if (status != FAN_OK) {
        fan_raise(status, &err);
        goto done;
    }
    if (add_all(core, items, numbers) < 0)
        goto done;
    outs = out == Py_None ? Py_NewRef(Py_None) : PyTuple_Pack(1, out);
    list = outs ? take_all(core, NULL, NULL, NULL, outs, a.scale ? a.scale : Py_None, true) : NULL;
    if (list)
        sum = stats ? pair_of(PyList_GET_ITEM(list, 0), stats_of(core, 0)) : Py_NewRef(PyList_GET_ITEM(list, 0));
done:
    fan_where_pop(&w);
    if (core) {
        PyObject *live = fan_exception_take();
        fan_buffer_free(core);
        fan_exception_put(live);
    }
    Py_XDECREF(items);
    Py_XDECREF(numbers);
    Py_XDECREF(outs);
    Py_XDECREF(list);
    return sum;
}

static PyObject *add_n(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (nargs == 1) {
        PyObject *out = named_out(args + 1, kwnames), *sum;
        sum = kwnames && !out ? NULL : add_plain_n(args[0], out == Py_None ? NULL : out);
        if (sum || PyErr_Occurred())
            return sum;
    }
    return add_n_any(args, nargs, kwnames);
}

static void seen_summing(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                         PyObject *kwnames)
{
    fan_touch_thing(FAN_THING_HOST_MEMORY, 0, kwnames ? FAN_TOUCH_WRITES : FAN_TOUCH_READS);
    fan_touch_thing(FAN_THING_COUNTERS, 0, FAN_TOUCH_COUNTS);
}

FAN_TURN_FAST(add_n, seen_summing)

PyMethodDef fan_buffer_functions[] = {
    {"add_n", (PyCFunction)(void (*)(void))add_n_turn, METH_FASTCALL | METH_KEYWORDS,
     "add_n(arrays, *, out=None, keys=None, accumulate=None, scale=None, stats=False)\n--\n\n"
     "The sum of arrays of one shape, in one pass and with one rounding.\n\n"
     "arrays: a sequence of at least one array or number (None adds nothing). The sum is the left fold in their order, "
     "or in that\n"
     "of `keys`, one integer each. It is in fresh memory, or in `out`. accumulate: the dtype in which it runs; by "
     "default float32\n"
     "for float16, bfloat16 and float8, else the promotion of all. scale: a number that multiplies it before the "
     "rounding.\n"
     "stats: the answer is a pair: the sum and its fanin.Stats (None of an object).\n\n"
     "Raises TypeError (no array), ValueError (shapes, dtypes, keys, an empty sequence), BufferError (`out` cannot be "
     "written),\n"
     "OverflowError (a sum of Python ints that does not fit int64).\n\n"
     ">>> fanin.add_n([np.float16([1, 2]), np.float16([3, 4]), np.float16([5, 6])])\n"
     "array([ 9., 12.], dtype=float16)\n"},
    {NULL, NULL, 0, NULL},
};
