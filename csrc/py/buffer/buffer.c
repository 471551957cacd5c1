/* buffer: the class fanin.InputBuffer, without its methods add, add_many and take.
 *
 * In order: creation, with the list of buffers that are kept for their next lives; deallocation and
 * traversal; explain, repr and counters; the other methods; the type. */
#include "py/arrays/objects.h"
#include "py/buffer/buffer_object.h"

#include "base/mem.h"
#include "base/pool.h"

#include <stdio.h>
#include <string.h>

/* more than a slot takes: so that the product with their number can be counted */
#define MAX_SLOT_BYTES 4096

/* The parameters of InputBuffer, as core.pyi declares them. */
enum {
    SLOTS,
    BUDGET,
    ACCUMULATE,
    STATS,
    STREAM,
    LEAF,
    CREATE_GRAPH,
    NAME,
    PARAMETERS
};

/* slots_arg: a count, or what each slot is declared to be. */
static int slots_arg(PyObject *slots, const char *name, fan_slot_specs *d, PyObject **names)
{
    int64_t n = 0;
    bool is_scalar = PyArray_IsScalar(slots, Integer) || PyArray_IsScalar(slots, Bool);
    if (!PyLong_Check(slots) && !is_scalar)
        return fan_slot_specs_of(slots, name, d, names);
    if (fan_index(slots, "slots", PyExc_ValueError, &n) < 0)
        return -1;
    if (n > PTRDIFF_MAX / MAX_SLOT_BYTES)
        return fan_refuse(PyExc_MemoryError, "out of memory for %lld slots", (long long)n);
    d->n = (size_t)n;
    return 0;
}

/* An engine makes a buffer for each node: a few that are as InputBuffer(n) and
 * InputBuffer([Slot(..)]) make them, and without references, are kept for their next lives.
 * freelist_take: returns one of them, with nothing declared; NULL without an exception: none fits.
 */
static PyObject *freelist_take(PyTypeObject *type, size_t n, uint64_t budget)
{
    fan_state *state = fan_state_get();
    for (unsigned i = state->nfreelist; i-- > 0;) {
        PyObject *o = state->freelist[i];
        if (fan_buffer_self(o)->n != n || Py_TYPE(o) != type)
            continue;
        state->freelist[i] = state->freelist[--state->nfreelist];
        Py_INCREF(type);
        _Py_NewReference(o);
        fan_buffer_reuse(fan_buffer_self(o)->core, budget);
        PyObject_GC_Track(o);
        return o;
    }
    return NULL;
}

/* freelist_put: returns true if the buffer is kept. */
static bool freelist_put(buffer_object *self)
{
#ifdef Py_GIL_DISABLED
    return false;
#endif
    fan_state *state = fan_state_get();
    if (!state || fan_finalizing())
        return false;
    if (self->declared || !self->core)
        return false;
    if (!fan_buffer_empty_for_reuse(self->core))
        return false;
    fan_slot_specs_forget(self);
    /* checked last: dropping the buffer's contents may have filled it */
    if (state->nfreelist == FAN_FREELIST)
        return false;
    state->freelist[state->nfreelist++] = (PyObject *)self;
    return true;
}

void fan_buffer_freelist_free(fan_state *state)
{
    while (state->nfreelist) {
        PyObject *o = state->freelist[--state->nfreelist];
        fan_buffer_free(fan_buffer_self(o)->core);
        PyObject_GC_Del(o);
    }
}

static PyObject *buffer_make(PyTypeObject *type, const fan_buffer_config *config)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    PyObject *reused = NULL;
    if (fan_buffer_reusable(config))
        reused = freelist_take(type, config->slots, config->budget);
    buffer_object *self = fan_buffer_self(reused);
    if (!reused)
        self = fan_buffer_self(type->tp_alloc(type, 0));
    if (!self)
        return NULL;
    fan_error_clear(&err);
    if (reused)
        status = fan_buffer_declare(self->core, config, &err);
    else
        status = fan_buffer_new(config, &self->core, &err);
    self->n = config->slots;
    if (status == FAN_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return fan_raise(status, &err);
}

/* declared_make: a buffer of the slots that `d` declares, named so; the rest is `config`'s. */
static PyObject *declared_make(PyTypeObject *type, const fan_slot_specs *d, PyObject *names,
                               fan_buffer_config *config)
{
    fan_slot_spec *open = NULL;
    if (d->specs && config->create_graph) {
        /* the gradients' own operators bring them to the declared shapes */
        open = fan_alloc(d->n * sizeof *open);
        if (!open)
            return PyErr_NoMemory();
        for (size_t i = 0; i < d->n; i++) {
            open[i] = d->specs[i];
            open[i].has_shape = false;
            open[i].shape = NULL;
            open[i].ndim = 0;
        }
    }
    config->slots = d->n;
    config->specs = d->specs;
    if (open)
        config->specs = open;
    buffer_object *self = (buffer_object *)buffer_make(type, config);
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
    config.frontend = &fan_python;
    return declared_make(fan_state_get()->buffer_type, d, names, &config);
}

/* config_read: reads the arguments after `slots` and `name`. 0, or -1 with an exception. */
static int config_read(PyObject *const *a, fan_buffer_config *config)
{
    PyObject *accumulate = fan_or_none(a[ACCUMULATE]);
    if (fan_given(a[BUDGET]) && fan_buffer_budget_arg(a[BUDGET], &config->budget) < 0)
        return -1;
    if (fan_accumulate_arg(accumulate, &config->accumulate, &config->exact) < 0)
        return -1;
    return fan_stream_arg(fan_or_none(a[STREAM]), &config->stream);
}

static PyObject *buffer_new(PyTypeObject *type, PyObject *const *a)
{
    fan_buffer_config config = {
        .accumulate = FAN_DT_NONE,
        .frontend = &fan_python,
        .budget = fan_state_get()->budget,
        .stats = a[STATS] == Py_True,
        .leaf = a[LEAF] == Py_True,
        .create_graph = a[CREATE_GRAPH] == Py_True,
    };
    fan_error_context w = {
        .slot = -1,
        .key = -1,
        .buffer = "InputBuffer",
    };
    fan_slot_specs d = {0};
    PyObject *text = NULL;
    PyObject *names = NULL;
    PyObject *self = NULL;
    if (fan_given(a[NAME])) {
        text = PyObject_Str(a[NAME]);
        if (text)
            config.name = fan_text_arg(text);
        if (!config.name)
            goto done;
        w.buffer = config.name;
    }
    fan_error_context_push(&w);
    if (config_read(a, &config) == 0 && slots_arg(a[SLOTS], w.buffer, &d, &names) == 0)
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
        .slots = (size_t)n,
        .accumulate = FAN_DT_NONE,
        .budget = budget,
        .frontend = &fan_python,
    };
    return buffer_make(type, &config);
}

PyObject *fan_buffer_plain(size_t n, uint64_t budget)
{
    return made_plain(fan_state_get()->buffer_type, (Py_ssize_t)n, budget);
}

/* budget_read: reads the only argument by name, `budget`, a number. Returns false if it is not
 * that; an exception may be set. */
static bool budget_read(PyObject *kwnames, PyObject *value, uint64_t *budget)
{
    bool only = PyTuple_GET_SIZE(kwnames) == 1;
    if (!only)
        return false;
    if (PyTuple_GET_ITEM(kwnames, 0) != fan_state_get()->str_budget)
        return false;
    if (!PyLong_CheckExact(value) && !PyFloat_CheckExact(value))
        return false;
    return fan_budget_arg(value, "budget", budget) == 0;
}

/* buffer_new_fast: InputBuffer(n), InputBuffer(n, budget=..) and InputBuffer(slots). */
static int buffer_new_fast(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames,
                           PyObject **result)
{
    bool single = PyVectorcall_NARGS(nargsf) == 1;
    bool counted = single && PyLong_CheckExact(args[0]);
    Py_ssize_t n = -1;
    if (counted)
        n = PyLong_AsSsize_t(args[0]);
    uint64_t budget = fan_state_get()->budget;
    bool plain = n >= 0 && n <= INT32_MAX;
    if (plain && kwnames)
        plain = budget_read(kwnames, args[1], &budget);
    if (plain) {
        *result = made_plain((PyTypeObject *)type, n, budget);
        return 1;
    }
    if (single && !counted && !kwnames) {
        PyObject *const a[PARAMETERS] = {args[0]};
        *result = buffer_new((PyTypeObject *)type, a);
        return 1;
    }
    PyErr_Clear(); /* raised again by the parsed call, with the buffer's name */
    return 0;
}

static int buffer_clear_refs(PyObject *o)
{
    buffer_object *self = fan_buffer_self(o);
    if (self->core)
        fan_buffer_abandon(self->core);
    return 0;
}

static void buffer_dealloc(PyObject *o)
{
    buffer_object *self = fan_buffer_self(o);
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    PyObject *live = NULL;
    if (PyErr_Occurred())
        live = fan_exception_take();
    bool kept = freelist_put(self);
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
    if (fan_is_unboxed(object))
        return 0;
    int answer = v->visit((PyObject *)object, v->arg);
    if (answer)
        return answer;
    return fan_visit_behind(object, value, v->visit, v->arg);
}

static int buffer_traverse(PyObject *o, visitproc visit, void *arg)
{
    visitor v = {visit, arg};
    fan_buffer *core = fan_buffer_self(o)->core;
    Py_VISIT(Py_TYPE(o));
    if (!core)
        return 0;
    return fan_buffer_visit(core, visit_object, &v);
}

/* ---- explain, repr, counters ---- */

static const char *form_word(fan_form f)
{
    static const char *const words[] = {"undefined", "zero",   "dense",
                                        "sparse",    "object", "partial"};
    return words[f];
}

/* put_object: takes the reference to `value` and sets (*dict)[name]. If that fails, or `value` is
 * NULL, *dict becomes NULL, with an exception; a NULL *dict stays. */
static void put_object(PyObject **dict, const char *name, PyObject *value)
{
    bool good = *dict && value && PyDict_SetItemString(*dict, name, value) == 0;
    Py_XDECREF(value);
    if (!good)
        Py_CLEAR(*dict);
}

static void put_flag(PyObject **dict, const char *name, bool flag)
{
    put_object(dict, name, PyBool_FromLong(flag));
}

static void put_number(PyObject **dict, const char *name, int64_t number)
{
    put_object(dict, name, PyLong_FromLongLong(number));
}

/* put_unsigned: bytes, bits of rules, and handles of streams. */
static void put_unsigned(PyObject **dict, const char *name, uint64_t number)
{
    put_object(dict, name, PyLong_FromUnsignedLongLong(number));
}

static void put_text(PyObject **dict, const char *name, const char *text)
{
    put_object(dict, name, Py_BuildValue("z", text));
}

static PyObject *item_describe(const fan_item_view *item)
{
    PyObject *dict = PyDict_New();
    put_number(&dict, "key", item->key);
    put_text(&dict, "form", form_word(item->form));
    put_text(&dict, "dtype", fan_dtype_name(item->dtype));
    put_unsigned(&dict, "producer", item->producer);
    put_flag(&dict, "event", item->event);
    put_flag(&dict, "donated", item->donated);
    put_flag(&dict, "ready", item->ready);
    return dict;
}

/* slot_describe: the keys that fanin._trace.explain reads, but for the slot's names and items. */
static PyObject *slot_describe(const fan_slot_view *view)
{
    const char how[] = {view->how, 0};
    unsigned long long alone = view->limits.alone;
    unsigned long long held = view->limits.held;
    PyObject *dict = PyDict_New();
    put_text(&dict, "how", how);
    put_unsigned(&dict, "rules", view->rules);
    put_unsigned(&dict, "consumer", view->consumer);
    put_unsigned(&dict, "accum", view->accum);
    put_unsigned(&dict, "ready", view->ready);
    put_flag(&dict, "event", view->event);
    put_flag(&dict, "has_value", view->has_value);
    put_flag(&dict, "value_ours", view->value_owned);
    put_text(&dict, "value_form", form_word(view->value_form));
    put_text(&dict, "poisoned", view->poisoned);
    put_text(&dict, "dtype", fan_dtype_name(view->dtype));
    put_text(&dict, "accumulate", fan_dtype_name(view->accumulate));
    put_number(&dict, "count", view->count);
    put_number(&dict, "expected", view->expected);
    put_number(&dict, "next_key", view->next_key);
    put_text(&dict, "next_action", fan_action_word(view->next.action));
    put_unsigned(&dict, "next_rules", view->next.rules);
    put_text(&dict, "reuse", fan_reuse_words(view->next.reuse));
    put_object(&dict, "budget", fan_budget_wrap(view->budget));
    put_object(&dict, "limits", Py_BuildValue("(KK)", alone, held));
    put_unsigned(&dict, "parked_bytes", view->parked);
    put_unsigned(&dict, "alone_bytes", view->alone);
    return dict;
}

fan_status fan_slot_look(fan_buffer *core, size_t slot, fan_slot_view *v, fan_item_view **items,
                         fan_error *err)
{
    size_t cap = 0;
    *items = NULL;
    for (;;) { /* others may add meanwhile: until the room suffices */
        memset(v, 0, sizeof *v);
        fan_status status = fan_buffer_look(core, slot, v, *items, cap, err);
        if (status == FAN_OK && v->items <= cap)
            return FAN_OK;
        fan_free(*items);
        *items = NULL;
        FAN_TRY(status);
        cap = v->items + 8;
        *items = fan_calloc(cap * sizeof **items);
        if (!*items)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    }
}

PyObject *fan_slot_text(const char *buffer, size_t slot, PyObject *name, const fan_slot_view *v,
                        const fan_item_view *items)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < v->items; i++)
        fan_list_add(&list, item_describe(&items[i]));
    PyObject *view = slot_describe(v);
    put_text(&view, "buffer", buffer);
    put_unsigned(&view, "slot", slot);
    put_object(&view, "name", Py_NewRef(fan_or_none(name)));
    put_object(&view, "items", list);
    if (!view)
        return NULL;
    PyObject *text = fan_call("fanin._trace.explain", "explain", "(O)", view);
    Py_DECREF(view);
    return text;
}

static PyObject *buffer_explain(PyObject *o, PyObject *which)
{
    const buffer_object *self = fan_buffer_self(o);
    fan_slot_view v;
    fan_item_view *items;
    size_t slot;
    if (fan_slot_arg(self, which, &slot) < 0)
        return NULL;
    fan_buffer_seen_parked(self->core);
    if (FAN_CHECK(fan_slot_look(self->core, slot, &v, &items, &err)) < 0)
        return NULL;
    const char *name = fan_buffer_name(self->core);
    PyObject *text = fan_slot_text(name, slot, fan_slot_name(self, slot), &v, items);
    fan_free(items);
    return text;
}

static PyObject *buffer_repr(PyObject *o)
{
    const buffer_object *self = fan_buffer_self(o);
    const char *name = fan_buffer_name(self->core);
    fan_sketch sketch;
    char named[64] = "";
    char parked[64] = "";
    char sums[40] = "";
    char lost[40] = "";
    fan_buffer_sketch(self->core, &sketch);
    if (strcmp(name, "InputBuffer") != 0)
        snprintf(named, sizeof named, " '%.58s'", name);
    if (sketch.parked) {
        snprintf(parked, sizeof parked, ", %zu parked, %llu B", sketch.parked,
                 (unsigned long long)sketch.bytes);
    } else if (!sketch.sums && !sketch.poisoned)
        snprintf(parked, sizeof parked, ", empty");
    if (sketch.sums)
        snprintf(sums, sizeof sums, ", %zu sum%s begun", sketch.sums, FAN_PLURAL(sketch.sums));
    if (sketch.poisoned)
        snprintf(lost, sizeof lost, ", %zu poisoned", sketch.poisoned);
    return PyUnicode_FromFormat("<fanin.InputBuffer%s: %zu slot%s%s%s%s>", named, self->n,
                                FAN_PLURAL(self->n), parked, sums, lost);
}

/* counters_of: an object of a class of fanin.options, whose fields are these numbers. */
static PyObject *counters_of(PyObject **cache, const char *name, const void *numbers, size_t size)
{
    PyObject *type = fan_lazy(cache, "fanin.options", name);
    if (!type)
        return NULL;
    PyObject *fields = fan_ints((int)(size / sizeof(int64_t)), numbers);
    if (!fields)
        return NULL;
    PyObject *made = PyObject_CallObject(type, fields);
    Py_DECREF(fields);
    return made;
}

PyObject *fan_process_counters(void)
{
    fan_pool_counts pool = fan_pool_get();
    struct {
        fan_counters own;
        uint64_t pool[4];
    } all = {.pool = {pool.held, pool.peak, pool.hits, pool.misses}};
    fan_counters_total(&all.own);
    return counters_of(&fan_state_get()->process_counters_type, "ProcessCounters", &all,
                       sizeof all);
}

/* ---- methods ---- */

static PyObject *buffer_target(PyObject *o, PyObject *const *a)
{
    enum {
        SLOT,
        KEY,
        ON,
        WEIGHT
    };
    buffer_object *self = fan_buffer_self(o);
    fan_stream *stream = NULL;
    fan_weight weight = {.on = false};
    PyObject *target = NULL;
    int64_t key = -1;
    size_t slot;
    int bad = 0;
    if (fan_slot_arg(self, a[SLOT], &slot) < 0)
        return NULL;
    fan_error_context w = fan_slot_context(self, slot);
    fan_error_context_push(&w);
    if (self->create_graph) {
        bad = fan_refuse(
            PyExc_ValueError,
            "target() lends memory, and a buffer with create_graph sums by the arrays' own +");
    }
    if (!bad && fan_given(a[KEY]))
        bad = fan_index(a[KEY], "key", PyExc_ValueError, &key);
    if (!bad && a[ON])
        bad = fan_stream_arg(a[ON], &stream);
    if (!bad && fan_given(a[WEIGHT]))
        bad = fan_weight_arg(a[WEIGHT], "weight", &weight);
    if (!bad)
        target = fan_target_new(o, slot, key, stream, weight);
    fan_error_context_pop(&w);
    fan_stream_drop(stream);
    return target;
}

static PyObject *buffer_expect(PyObject *o, PyObject *const *a)
{
    enum {
        SLOT,
        N
    };
    buffer_object *self = fan_buffer_self(o);
    int64_t n = 0;
    size_t slot;
    if (fan_slot_arg(self, a[SLOT], &slot) < 0)
        return NULL;
    fan_error_context w = fan_slot_context(self, slot);
    fan_error_context_push(&w);
    int bad = fan_index(a[N], "n", PyExc_ValueError, &n);
    fan_error_context_pop(&w);
    if (bad)
        return NULL;
    return FAN_DONE(fan_buffer_expect(self->core, slot, n, &err));
}

static PyObject *buffer_ready(PyObject *o, PyObject *which)
{
    buffer_object *self = fan_buffer_self(o);
    bool ready = false;
    size_t slot;
    if (fan_slot_arg(self, which, &slot) < 0)
        return NULL;
    if (FAN_CHECK(fan_buffer_ready(self->core, slot, &ready, &err)) < 0)
        return NULL;
    if (!ready && fan_sched_active())
        fan_sched_not_ready();
    return PyBool_FromLong(ready);
}

static PyObject *buffer_getitem(PyObject *o, PyObject *which)
{
    buffer_object *self = fan_buffer_self(o);
    fan_value sum = {.dtype = FAN_DT_NONE};
    size_t slot;
    if (fan_slot_arg(self, which, &slot) < 0)
        return NULL;
    if (FAN_CHECK(fan_buffer_snapshot(self->core, slot, NULL, &sum, &err)) < 0)
        return NULL;
    return fan_export(&sum);
}

static PyObject *buffer_stats(PyObject *o, PyObject *which)
{
    buffer_object *self = fan_buffer_self(o);
    size_t slot;
    if (fan_slot_arg(self, which, &slot) < 0)
        return NULL;
    return fan_stats_wrap(self->core, slot);
}

static PyObject *buffer_clear(PyObject *o, PyObject *Py_UNUSED(none))
{
    return FAN_DONE(fan_buffer_clear(fan_buffer_self(o)->core, &err));
}

static PyObject *buffer_reduce_ex(PyObject *o, PyObject *Py_UNUSED(protocol))
{
    return PyErr_Format(PyExc_TypeError,
                        "cannot pickle or copy %R: what it holds is ordered by streams of this "
                        "process; take() the sums",
                        o);
}

static Py_ssize_t buffer_length(PyObject *o)
{
    return (Py_ssize_t)fan_buffer_self(o)->n;
}

static PyObject *buffer_get_name(PyObject *o, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(fan_buffer_name(fan_buffer_self(o)->core));
}

static PyObject *buffer_get_counters(PyObject *o, void *Py_UNUSED(closure))
{
    fan_counters n;
    fan_buffer_counters(fan_buffer_self(o)->core, &n);
    return counters_of(&fan_state_get()->counters_type, "Counters", &n, sizeof n);
}

static PyObject *buffer_get_budget(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_budget_wrap(fan_buffer_budget(fan_buffer_self(o)->core));
}

/* Methods of other files. */
static int buffer_add_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                           PyObject **result)
{
    return fan_buffer_add_fast(o, args, nargs, kwnames, result);
}
static int buffer_take_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                            PyObject **result)
{
    return fan_buffer_take_fast(o, args, nargs, kwnames, result);
}
static PyObject *buffer_add(PyObject *o, PyObject *const *a)
{
    return fan_buffer_add_one(o, a);
}
static PyObject *buffer_add_many(PyObject *o, PyObject *const *a)
{
    return fan_buffer_add_batch(o, a);
}
static PyObject *buffer_take(PyObject *o, PyObject *const *a)
{
    return fan_buffer_take_sums(o, a);
}

#include "py/declared/InputBuffer.h"

PyObject *fan_buffer_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    return buffer_new_vector_step(type, args, nargsf, kwnames);
}

/* buffer_item: For iteration, which ends at the IndexError of the first index without a slot. */
static PyObject *buffer_item(PyObject *o, Py_ssize_t i)
{
    PyObject *slot = PyLong_FromSsize_t(i);
    PyObject *sum = NULL;
    if (slot)
        sum = buffer_getitem_step(o, slot);
    if (!sum && i < buffer_length(o)) {
        fan_iteration_failed("iteration over a buffer", PyExc_IndexError);
        fan_iteration_failed("iteration over a buffer", PyExc_StopIteration);
    }
    Py_XDECREF(slot);
    return sum;
}

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(buffer_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)buffer_doc},
    {Py_tp_new, buffer_new_door},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_traverse, buffer_traverse},
    {Py_tp_clear, buffer_clear_refs},
    {Py_tp_repr, buffer_repr_step},
    {Py_tp_methods, buffer_methods},
    {Py_tp_members, members},
    {Py_tp_getset, buffer_getset},
    {Py_mp_length, buffer_length},
    {Py_mp_subscript, buffer_getitem_step},
    {Py_sq_item, buffer_item},
    {0, NULL},
};

PyType_Spec fan_buffer_spec = {
    .name = "fanin.InputBuffer",
    .basicsize = sizeof(buffer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
