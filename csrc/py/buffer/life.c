/* buffer_life: InputBuffers are made, kept for their next lives, shown to the collector, and end. */
#include "py/buffer/buffer_object.h"
#include "py/arrays/objects.h"

#include "base/mem.h"

#include <string.h>

#define MAX_SLOT_BYTES 4096 /* more than a slot takes: so that the product with their number can be counted */

/* The parameters of InputBuffer, as core.pyi declares them. */
enum { SLOTS, BUDGET, ACCUMULATE, STATS, STREAM, LEAF, CREATE_GRAPH, NAME, PARAMETERS };

/* slots_arg: a count, or what each slot is declared to be. */
static int slots_arg(PyObject *slots, const char *name, fan_slot_specs *d, PyObject **names)
{
    int64_t n = 0;
    if (!PyLong_Check(slots) && !PyArray_IsScalar(slots, Integer) && !PyArray_IsScalar(slots, Bool))
        return fan_slot_specs_of(slots, name, d, names);
    if (fan_index(slots, "slots", PyExc_ValueError, &n) < 0)
        return -1;
    if (n > PTRDIFF_MAX / MAX_SLOT_BYTES)
        return fan_refuse(PyExc_MemoryError, "out of memory for %lld slots", (long long)n);
    d->n = (size_t)n;
    return 0;
}

/* An engine makes a buffer for each node: a few that are as InputBuffer(n) and InputBuffer([Slot(..)]) make them, and
 * without references, are kept for their next lives. freelist_take: one of them, with nothing declared. */
static PyObject *freelist_take(PyTypeObject *type, size_t n, uint64_t budget)
{
    fan_state *st = fan_state_get();
    for (unsigned i = st->nfreelist; i-- > 0;) {
        PyObject *o = st->freelist[i];
        if (fan_buffer_self(o)->n != n || Py_TYPE(o) != type)
            continue;
        st->freelist[i] = st->freelist[--st->nfreelist];
        Py_INCREF(type);
        _Py_NewReference(o);
        fan_buffer_reuse(fan_buffer_self(o)->core, budget);
        PyObject_GC_Track(o);
        return o;
    }
    return NULL;
}

/* freelist_put: true: it is kept. */
static bool freelist_put(buffer_object *self)
{
#ifdef Py_GIL_DISABLED
    return false;
#endif
    fan_state *st = fan_state_get();
    if (!st || self->declared || !self->core || fan_finalizing() || !fan_buffer_empty_for_reuse(self->core))
        return false;
    fan_slot_specs_forget(self);
    if (st->nfreelist == FAN_FREELIST) /* checked last: dropping the buffer's contents may have filled it */
        return false;
    st->freelist[st->nfreelist++] = (PyObject *)self;
    return true;
}

void fan_buffer_freelist_free(fan_state *st)
{
    while (st->nfreelist) {
        PyObject *o = st->freelist[--st->nfreelist];
        fan_buffer_free(fan_buffer_self(o)->core);
        PyObject_GC_Del(o);
    }
}

static PyObject *buffer_make(PyTypeObject *type, const fan_buffer_config *config)
{
    PyObject *reused = fan_buffer_reusable(config) ? freelist_take(type, config->slots, config->budget) : NULL;
    buffer_object *self = fan_buffer_self(reused ? reused : type->tp_alloc(type, 0));
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    if (!self)
        return NULL;
    fan_error_clear(&err);
    status = reused ? fan_buffer_declare(self->core, config, &err) : fan_buffer_new(config, &self->core, &err);
    self->n = config->slots;
    if (status == FAN_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return fan_raise(status, &err);
}

/* open_specs: those of a buffer that records itself: it conforms what comes by its own operators. */
static fan_slot_spec *open_specs(const fan_slot_specs *d)
{
    fan_slot_spec *specs = fan_alloc(d->n * sizeof *specs);
    for (size_t i = 0; specs && i < d->n; i++) {
        specs[i] = d->specs[i];
        specs[i].has_shape = false;
        specs[i].shape = NULL;
        specs[i].ndim = 0;
    }
    if (!specs)
        PyErr_NoMemory();
    return specs;
}

/* declared_make: a buffer of the slots that `d` declares, named so; the rest is `config`'s. */
static PyObject *declared_make(PyTypeObject *type, const fan_slot_specs *d, PyObject *names, fan_buffer_config *config)
{
    fan_slot_spec *open = NULL;
    buffer_object *self;
    if (d->specs && config->create_graph && !(open = open_specs(d)))
        return NULL;
    config->slots = d->n;
    config->specs = open ? open : d->specs;
    self = (buffer_object *)buffer_make(type, config);
    if (self) {
        self->names = Py_XNewRef(names);
        self->create_graph = config->create_graph;
        if (fan_slot_specs_note(self, d) < 0)
            Py_CLEAR(self);
    }
    fan_free(open);
    return (PyObject *)self;
}

PyObject *fan_buffer_declared(const fan_slot_specs *d, PyObject *names, fan_buffer_config config)
{
    config.accumulate = FAN_DT_NONE;
    config.budget = fan_state_get()->budget;
    config.frontend = &fan_python;
    return declared_make(fan_state_get()->buffer_type, d, names, &config);
}

/* config_of: *d is the caller's to end, and *names and config->stream to drop. */
static int config_of(PyObject *const *a, fan_buffer_config *config, fan_slot_specs *d, PyObject **names)
{
    config->budget = fan_state_get()->budget;
    config->stats = a[STATS] == Py_True;
    config->leaf = a[LEAF] == Py_True;
    config->create_graph = a[CREATE_GRAPH] == Py_True;
    return (a[BUDGET] && a[BUDGET] != Py_None && fan_buffer_budget_arg(a[BUDGET], &config->budget) < 0) ||
                   fan_accumulate_arg(a[ACCUMULATE] ? a[ACCUMULATE] : Py_None, &config->accumulate, &config->exact) <
                       0 ||
                   fan_stream_arg(a[STREAM] ? a[STREAM] : Py_None, &config->stream) < 0 ||
                   slots_arg(a[SLOTS], config->name ? config->name : "InputBuffer", d, names) < 0
               ? -1
               : 0;
}

PyObject *fan_buffer_new_object(PyTypeObject *type, PyObject *const *a)
{
    fan_buffer_config config = {.accumulate = FAN_DT_NONE, .frontend = &fan_python};
    fan_error_context w = {.slot = -1, .key = -1, .buffer = "InputBuffer"};
    fan_slot_specs d = {0};
    bool named = a[NAME] && a[NAME] != Py_None;
    PyObject *text = named ? PyObject_Str(a[NAME]) : NULL, *names = NULL, *self = NULL;
    if (named && !(w.buffer = config.name = text ? fan_text_arg(text) : NULL))
        goto done;
    fan_error_context_push(&w);
    if (config_of(a, &config, &d, &names) == 0)
        self = declared_make(type, &d, names, &config);
    fan_error_context_pop(&w);
    fan_slot_specs_fini(&d);
    fan_stream_drop(config.stream);
done:
    Py_XDECREF(names);
    Py_XDECREF(text);
    return self;
}

/* made_plain: InputBuffer(n), or InputBuffer(n, budget=..). */
static PyObject *made_plain(PyTypeObject *type, Py_ssize_t n, uint64_t budget)
{
    PyObject *reused = freelist_take(type, (size_t)n, budget);
    if (reused)
        return reused;
    const fan_buffer_config config = {
        .slots = (size_t)n, .accumulate = FAN_DT_NONE, .budget = budget, .frontend = &fan_python};
    return buffer_make(type, &config);
}

PyObject *fan_buffer_plain(size_t n)
{
    return made_plain(fan_state_get()->buffer_type, (Py_ssize_t)n, fan_state_get()->budget);
}

/* fan_buffer_new_fast: InputBuffer(n), InputBuffer(n, budget=..) and InputBuffer(slots). */
int fan_buffer_new_fast(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames, PyObject **result)
{
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    Py_ssize_t n = nargs == 1 && PyLong_CheckExact(args[0]) ? PyLong_AsSsize_t(args[0]) : -1;
    uint64_t budget = fan_state_get()->budget;
    bool plain = n >= 0 && n <= INT32_MAX;
    if (plain && kwnames) {
        PyObject *value = args[nargs];
        plain = PyTuple_GET_SIZE(kwnames) == 1 && PyTuple_GET_ITEM(kwnames, 0) == fan_state_get()->str_budget &&
                (PyLong_CheckExact(value) || PyFloat_CheckExact(value)) && fan_budget_arg(value, &budget) == 0;
    }
    if (plain) {
        *result = made_plain((PyTypeObject *)type, n, budget);
        return 1;
    }
    if (nargs == 1 && !kwnames && !PyLong_CheckExact(args[0])) {
        PyObject *const a[PARAMETERS] = {args[0]};
        *result = fan_buffer_new_object((PyTypeObject *)type, a);
        return 1;
    }
    PyErr_Clear(); /* raised again by the parsed call, with the buffer's name */
    return 0;
}

int fan_buffer_clear_refs(PyObject *o)
{
    buffer_object *self = fan_buffer_self(o);
    if (self->core)
        fan_buffer_abandon(self->core);
    return 0;
}

void fan_buffer_dealloc(PyObject *o)
{
    buffer_object *self = fan_buffer_self(o);
    PyTypeObject *type = Py_TYPE(o);
    PyObject *live;
    bool kept;
    PyObject_GC_UnTrack(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    live = PyErr_Occurred() ? fan_exception_take() : NULL;
    kept = freelist_put(self);
    if (!kept && self->core)
        fan_buffer_free(self->core);
    if (live)
        fan_exception_put(live);
    if (kept) {
        Py_DECREF(type);
        return;
    }
    fan_slot_specs_forget(self);
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
    int answer = fan_is_unboxed(object) ? 0 : v->visit((PyObject *)object, v->arg);
    return answer || fan_is_unboxed(object) ? answer : fan_visit_behind(object, value, v->visit, v->arg);
}

int fan_buffer_traverse(PyObject *o, visitproc visit, void *arg)
{
    visitor v = {visit, arg};
    Py_VISIT(Py_TYPE(o));
    return fan_buffer_self(o)->core ? fan_buffer_visit(fan_buffer_self(o)->core, visit_object, &v) : 0;
}
