/* buffer_fast: the fast path of InputBuffer (buffer/fast.h): arguments become what the core takes, one call of the core
 * does it all, and what comes back becomes Python's. What is not for this way is left to the general one, which also
 * knows what to say of it. */
#include "py/buffer_part.h"

#define AHEAD 8
#define FAR 500 /* slots that no near cache holds */

/* ---- add ---- */

/* What add is told by name, as far as the fast path knows it. */
typedef struct add_options {
    Py_ssize_t key; /* -1: none */
    bool donate, copy;
} add_options;

/* add_options_of: false: something else is there, or what must be said is an error: for the general path. */
static bool add_options_of(PyObject *const *values, PyObject *kwnames, add_options *t)
{
    const fan_state *st = fan_state_get();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i), *value = values[i];
        bool flag = value == Py_True || value == Py_False;
        if (name == st->str_key && value != Py_None) {
            t->key = fan_small_index(value);
            if (t->key < 0 || t->key > FAN_FAST_KEY_MAX)
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

int fan_buffer_fast_add(buffer_object *self, PyObject *const *args, PyObject *kwnames)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    FAN_UNINITIALIZED fan_error err;
    Py_ssize_t slot = fan_small_index(args[0]);
    PyObject *gradient = args[1] == Py_None ? NULL : args[1], *copy = NULL;
    add_options t = {.key = -1};
    char *data = NULL;
    bool added;
    if (slot < 0 || (size_t)slot >= self->n || self->create_graph ||
        (kwnames && !add_options_of(args + 2, kwnames, &t)) || (gradient && !fan_fast_import(gradient, &kind, &data)))
        return 0;
    if (t.copy && gradient) {
        if (kind.scalar || !fan_fast_allowed() || !fan_fast_fits(kind.dtype, kind.dtype, fan_fast_bytes(&kind)) ||
            !(copy = fan_fast_copy(gradient, &kind, &data)))
            return 0; /* the general path copies what is too large for this one */
        gradient = copy;
    }
    fan_fast_term one = fan_fast_term_of(gradient, data, t.key, gradient && t.donate, copy != NULL);
    fan_error_clear(&err);
    fan_status status = fan_fast_add(self->core, (size_t)slot, gradient ? &kind : NULL, &one,
                                     copy || (gradient && fan_alone(gradient, 1)), &added, &err);
    Py_XDECREF(copy);
    if (status == FAN_OK)
        return added;
    fan_raise(status, &err);
    return -1;
}

int fan_fast_add_only(fan_buffer *core, PyObject *gradient, int64_t key)
{
    FAN_UNINITIALIZED fan_fast_kind kind;
    FAN_UNINITIALIZED fan_error err;
    PyObject *defined = gradient == Py_None ? NULL : gradient;
    char *data = NULL;
    bool added;
    if (key > FAN_FAST_KEY_MAX || (defined && !fan_fast_import(defined, &kind, &data)))
        return 0;
    fan_fast_term one = fan_fast_term_of(defined, data, key, false, false);
    fan_error_clear(&err);
    fan_status status = fan_fast_add(core, 0, defined ? &kind : NULL, &one, false, &added, &err);
    if (status == FAN_OK)
        return added;
    fan_raise(status, &err);
    return -1;
}

/* ---- add_many ---- */

typedef struct batch_source {
    const fan_batch_args *args;
    const buffer_object *self;
    bool donate;
} batch_source;

static bool source_read(void *ctx, size_t k, size_t *slot, fan_fast_kind *kind, fan_fast_term *one)
{
    const batch_source *m = ctx;
    Py_ssize_t at = fan_small_index(PyTuple_GET_ITEM(m->args->slots, (Py_ssize_t)k)), key = -1;
    PyObject *gradient = PyTuple_GET_ITEM(m->args->gradients, (Py_ssize_t)k);
    char *data = NULL;
    if (at < 0 || (m->args->keys && ((key = fan_small_index(PyTuple_GET_ITEM(m->args->keys, (Py_ssize_t)k))) < 0 ||
                                     key > FAN_FAST_KEY_MAX)))
        return false;
    if (gradient == Py_None)
        gradient = NULL;
    else if (!fan_fast_import(gradient, kind, &data))
        return false;
    *slot = (size_t)at;
    *one = fan_fast_term_of(gradient, data, key, gradient && m->donate, false);
    return true;
}

static void *source_again(void *ctx, size_t k, size_t *slot)
{
    const fan_batch_args *args = ((const batch_source *)ctx)->args;
    PyObject *gradient = PyTuple_GET_ITEM(args->gradients, (Py_ssize_t)k);
    *slot = (size_t)fan_small_index(PyTuple_GET_ITEM(args->slots, (Py_ssize_t)k));
    return gradient == Py_None ? NULL : gradient;
}

/* source_prefetch: what is needed AHEAD gradients later. */
static void source_prefetch(void *ctx, size_t at)
{
    const batch_source *m = ctx;
    Py_ssize_t k = (Py_ssize_t)at, n = m->args->n;
    if (k + 2 * AHEAD < n) {
        PyObject *o = PyTuple_GET_ITEM(m->args->gradients, k + 2 * AHEAD);
        __builtin_prefetch(o, 1);
        __builtin_prefetch((const char *)o + 64);
    }
    if (k + AHEAD < n) {
        PyObject *o = PyTuple_GET_ITEM(m->args->gradients, k + AHEAD);
        if (PyArray_CheckExact(o))
            __builtin_prefetch(PyArray_DIMS((PyArrayObject *)o));
        fan_fast_prefetch(m->self->core, (size_t)fan_small_index(PyTuple_GET_ITEM(m->args->slots, k + AHEAD)));
    }
}

int fan_buffer_fast_add_many(buffer_object *self, const fan_batch_args *args, bool donate)
{
    FAN_UNINITIALIZED fan_error err;
    batch_source m = {args, self, donate};
    fan_fast_batch batch = {(size_t)args->n, self->n >= FAR, source_read, source_again, source_prefetch, &m};
    bool added;
    if (self->create_graph)
        return 0;
    fan_error_clear(&err);
    fan_status status = fan_fast_add_many(self->core, &batch, &added, &err);
    if (status == FAN_OK)
        return added;
    fan_raise(status, &err);
    return -1;
}

/* ---- take ---- */

bool fan_fast_writable_now(PyObject *o, fan_fast_kind *kind, char **data)
{
    if (!fan_fast_import(o, kind, data))
        return false;
    if (!kind->check_at_use)
        return PyArray_CheckExact(o) && PyArray_ISWRITEABLE((PyArrayObject *)o);
    Py_INCREF(o);                                                     /* its library is asked, and may do anything */
    bool good = fan_fast_is_detached(o) && fan_fast_has_own_value(o); /* before it is written it is looked at again */
    Py_DECREF(o);
    return good;
}

/* out=: of a take of one slot the array itself. */
typedef struct out_args {
    PyObject *out;
    bool one;
} out_args;

static fan_fast_where outs_at(void *ctx, size_t slot, const fan_fast_kind *kind, void **object, char **data,
                              uint64_t *bytes)
{
    const out_args *to = ctx;
    FAN_UNINITIALIZED fan_fast_kind is;
    if (!to->one && (Py_ssize_t)slot >= PySequence_Fast_GET_SIZE(to->out)) /* it became shorter meanwhile */
        return FAN_FAST_REFUSED;
    PyObject *o = to->one ? to->out : PySequence_Fast_GET_ITEM(to->out, (Py_ssize_t)slot);
    if (o == Py_None)
        return FAN_FAST_NOWHERE;
    Py_INCREF(o); /* its library is asked, which may take it out of the list */
    if (!fan_fast_writable_now(o, &is, data) || (kind && !fan_fast_same(&is, kind))) {
        Py_DECREF(o);
        return FAN_FAST_REFUSED;
    }
    *object = o;
    *bytes = fan_fast_bytes(&is);
    return FAN_FAST_THERE;
}

/* scale_of: false: it must be asked for its value, or what must be said is an error. */
static bool scale_of(PyObject *value, fan_take *how)
{
    if (value == Py_None)
        return true;
    if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value) && !PyComplex_CheckExact(value))
        return false;
    if (fan_scale_arg(value, how) == 0)
        return true;
    PyErr_Clear();
    return false;
}

/* take_options_of: what take is told by name, as far as the fast path knows it; false: something else is there, or what
 * must be said is an error. */
static bool take_options_of(PyObject *const *values, PyObject *kwnames, PyObject **out, fan_take *how)
{
    const fan_state *st = fan_state_get();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i), *value = values[i];
        if (name == st->str_writable && (value == Py_True || value == Py_False)) {
            how->writable = value == Py_True;
        } else if (name == st->str_out) {
            *out = value == Py_None ? NULL : value;
        } else if (name == st->str_slot && value != Py_None) {
            Py_ssize_t slot = fan_small_index(value);
            if (slot < 0)
                return false;
            how->one = true;
            how->slot = (size_t)slot;
        } else if (name == st->str_scale) {
            if (!scale_of(value, how))
                return false;
        } else if (value != Py_None || (name != st->str_slot && name != st->str_stream)) {
            return false;
        }
    }
    return how->one || !*out || PyList_CheckExact(*out) || PyTuple_CheckExact(*out);
}

static PyObject *take_one(fan_buffer *core, const fan_take *how, const fan_fast_outs *places)
{
    void *sum = NULL;
    if (!fan_fast_take(core, (fan_span){how->slot, how->slot + 1}, how, places, &sum))
        return NULL;
    return sum ? sum : Py_NewRef(Py_None);
}

static PyObject *take_each(buffer_object *self, const fan_take *how, const fan_fast_outs *places)
{
    /* Made before a slot is claimed: this may collect garbage, which may do anything, add for one. */
    PyObject *list = PyList_New((Py_ssize_t)self->n);
    PyObject **items = list ? PySequence_Fast_ITEMS(list) : NULL;
    if (!list || !fan_fast_take(self->core, (fan_span){0, self->n}, how, places, (void **)items)) {
        Py_XDECREF(list);
        return NULL;
    }
    for (size_t i = 0; i < self->n; i++)
        if (!items[i])
            items[i] = Py_NewRef(Py_None);
    return list;
}

PyObject *fan_buffer_fast_take(buffer_object *self, PyObject *const *args, PyObject *kwnames)
{
    PyObject *out = NULL;
    fan_take how = {.stream = NULL};
    if ((kwnames && !take_options_of(args, kwnames, &out, &how)) || (how.one && how.slot >= self->n) ||
        (out && !how.one && (size_t)PySequence_Fast_GET_SIZE(out) != self->n))
        return NULL;
    out_args to = {out, how.one};
    fan_fast_outs places = {outs_at, &to};
    PyObject *sums =
        how.one ? take_one(self->core, &how, out ? &places : NULL) : take_each(self, &how, out ? &places : NULL);
    if (!sums && PyErr_Occurred())
        PyErr_Clear(); /* the general path says it, if there is anything to say */
    return sums;
}

PyObject *fan_fast_take_only(fan_buffer *core, PyObject *out, PyObject *scale)
{
    fan_take how = {.one = true, .writable = true};
    out_args to = {out, true};
    fan_fast_outs places = {outs_at, &to};
    PyObject *sum = scale_of(scale, &how) ? take_one(core, &how, out == Py_None ? NULL : &places) : NULL;
    if (!sum && PyErr_Occurred())
        PyErr_Clear(); /* as above */
    return sum;
}
