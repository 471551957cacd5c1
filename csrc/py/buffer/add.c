/* add: InputBuffer.add: a plain contribution (buffer/plain.h) in one call of the core;
 * every other gradient becomes a value first, or an error.
 *
 * First a gradient as a value, and its add; then plain contributions; last the method, of which
 * fan_buffer_add_fast is tried first, and then fan_buffer_add_one. */
#include "py/buffer/buffer_object.h"

#include <math.h>

int fan_add_flags(const buffer_object *self, PyObject *donate, PyObject *copy, bool *donated,
                  bool *copied)
{
    *donated = donate == Py_True;
    *copied = copy == Py_True;
    if (!*donated || !*copied)
        return 0;
    return fan_set_error(
        PyExc_ValueError,
        "%s: donate=True gives the array away, copy=True keeps it yours: give one of them",
        fan_buffer_name(self->core));
}

/* conformed: A9 and A10 by the array's own operators, for a slot of a buffer that records itself;
 * new reference. */
static PyObject *conformed(const buffer_object *self, size_t slot, PyObject *gradient)
{
    PyObject *arrays = fan_arrays();
    PyObject *pair = PyTuple_GET_ITEM(self->declared, (Py_ssize_t)slot);
    PyObject *result = NULL;
    if (!arrays)
        return NULL;
    PyObject *answer = PyObject_CallMethod(arrays, "conform", "OOO", gradient,
                                           PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
    if (!answer)
        return NULL;
    if (PyTuple_GET_SIZE(answer) == 1) /* Conformed or Refused (_interop/records.py) */
        result = Py_NewRef(PyTuple_GET_ITEM(answer, 0));
    else
        fan_refuse(PyTuple_GET_ITEM(answer, 0), "%U", PyTuple_GET_ITEM(answer, 1));
    Py_DECREF(answer);
    return result;
}

/* check_object: whether a slot that declares something takes what sums by its own + (A8). */
static int check_object(const PyObject *gradient, unsigned flags)
{
    if ((flags & FAN_NUMBERS) && PyArray_CheckExact(gradient)) {
        return fan_refuse(
            fan_state_get()->dtype_error,
            "expected an array of numbers, as the slot declares its shape or dtype, got %s of "
            "objects: convert it, x.astype(float), or give Slot(combine=f)",
            FAN_TYPE_TEXT(gradient));
    }
    if (flags & FAN_ARRAYS) {
        return fan_refuse(
            PyExc_TypeError,
            "expected an array that can be added to the leaf's .grad in place, got %s, which sums "
            "by its own +: pass np.asarray(x)",
            FAN_TYPE_TEXT(gradient));
    }
    return 0;
}

/* needs_ml_dtypes: whether a numeric array of ours or of NumPy is added to a slot whose sum NumPy
 * cannot return without ml_dtypes. */
static bool needs_ml_dtypes(const fan_value *v, unsigned flags)
{
    if (!(flags & FAN_LOW_DTYPE))
        return false;
    if (v->origin >= FAN_FROM_FOREIGN)
        return false;
    if (v->device != fan_cpu())
        return false;
    bool has_numbers = v->form != FAN_FORM_ZERO && v->dtype != FAN_DT_NONE;
    return has_numbers && fan_dtype_needs_ml_dtypes(FAN_DT_BFLOAT16);
}

/* check_contribution: 0, or -1 with an exception, here, where nothing is lost yet. */
static int check_contribution(const fan_value *v, const PyObject *own, unsigned flags)
{
    if (needs_ml_dtypes(v, flags)) {
        return fan_refuse(PyExc_TypeError,
                          "the slot is declared of a dtype that NumPy knows through ml_dtypes "
                          "alone: import ml_dtypes first");
    }
    if ((flags & (FAN_NUMBERS | FAN_ARRAYS)) && v->form == FAN_FORM_OBJECT)
        return check_object(own, flags);
    return 0;
}

int fan_contribution_of(buffer_object *self, size_t slot, PyObject *gradient, PyObject *key,
                        fan_contribution *c)
{
    fan_error_context w = fan_slot_context(self, slot);
    unsigned flags = 0;
    PyObject *own = NULL;
    int bad = 0;
    if (self->flags)
        flags = self->flags[slot];
    c->key = -1;
    w.stream = c->stream;
    if (fan_is_no_gradient(gradient))
        gradient = Py_None;
    fan_error_context_push(&w);
    if (fan_given(key))
        bad = fan_index(key, "key", PyExc_ValueError, &c->key);
    w.key = c->key;
    if (!bad && (flags & FAN_DECLARED))
        own = conformed(self, slot, gradient);
    else if (!bad)
        own = Py_NewRef(gradient);
    if (own)
        bad = fan_import(own, self->create_graph, flags & FAN_HAS_COMBINE, &c->value);
    else
        bad = -1;
    if (!bad)
        bad = check_contribution(&c->value, own, flags);
    fan_error_context_pop(&w);
    Py_XDECREF(own);
    return bad;
}

fan_status fan_add_owned(fan_buffer *core, size_t slot, fan_contribution *c, fan_error *err)
{
    FAN_TRY(fan_value_use(&c->value, "add", c->donate, err));
    fan_status status = fan_buffer_add(core, slot, c, err);
    if (status != FAN_OK && c->donate)
        fan_value_returned(&c->value);
    return status;
}

int fan_add_on_library_stream(fan_buffer *core, size_t slot, fan_contribution *c)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status = FAN_OK;
    fan_stream *library = NULL;
    if (fan_library_stream(&c->value, NULL, &library) < 0)
        return -1;
    fan_error_clear(&err);
    if (library)
        status = fan_stream_push(library, &err);
    if (status == FAN_OK) {
        status = fan_add_owned(core, slot, c, &err);
        if (library)
            fan_stream_pop(library);
    }
    fan_stream_drop(library);
    return fan_check(status, &err);
}

/* ---- plain contributions (buffer/plain.h) ---- */

/* The options of add that plain contributions need. */
typedef struct add_options {
    Py_ssize_t key; /* -1: none */
    bool donate;
    bool copy;
    bool weighted; /* `weight` is set */
    fan_weight weight;
} add_options;

/* add_weight_of: false: reading its value needs a call, or it is wrong. */
static bool add_weight_of(PyObject *value, fan_weight *weight)
{
    if (PyFloat_CheckExact(value)) {
        weight->re = PyFloat_AS_DOUBLE(value);
    } else {
        Py_ssize_t number = fan_small_index(value);
        if (number < 0 || number >= (Py_ssize_t)1 << 53)
            return false;
        weight->re = (double)number;
        weight->integer = true;
    }
    return isfinite(weight->re);
}

/* add_option_of: false: another option, or a wrong one. */
static inline __attribute__((always_inline)) bool add_option_of(const fan_state *st, PyObject *name,
                                                                PyObject *value,
                                                                add_options *options)
{
    bool may_be_none = name == st->str_key || name == st->str_weight || name == st->str_stream;
    if (may_be_none && value == Py_None)
        return true;
    if (name == st->str_key) {
        options->key = fan_small_index(value);
        return options->key >= 0 && options->key <= FAN_ENTRY_KEY_MAX;
    }
    if (name == st->str_weight) {
        options->weight = (fan_weight){.on = true};
        options->weighted = true;
        return add_weight_of(value, &options->weight);
    }
    if (value != Py_True && value != Py_False)
        return false;
    if (name == st->str_donate) {
        options->donate = value == Py_True;
        return true;
    }
    options->copy = value == Py_True;
    return name == st->str_copy;
}

/* add_options_of: false: it is for the general path. */
static bool add_options_of(PyObject *const *values, PyObject *kwnames, add_options *options)
{
    const fan_state *st = fan_state_get();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        if (!add_option_of(st, PyTuple_GET_ITEM(kwnames, i), values[i], options))
            return false;
    }
    return !(options->donate && options->copy);
}

/* add_entry: adds a plain entry, with a weight (NULL: none). An undefined one with a weight is for
 * the general path.
 *   1: added
 *   0: it is for the general path
 *   -1, with an exception */
static inline __attribute__((always_inline)) int add_entry(fan_buffer *core, size_t slot,
                                                           const fan_plain_kind *kind,
                                                           fan_entry *one, const fan_weight *weight)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    bool added;
    if (weight && !kind)
        return 0;
    fan_error_clear(&err);
    if (weight)
        status = fan_plain_add_weighted(core, slot, kind, one, weight, &added, &err);
    else
        status = fan_plain_add(core, slot, kind, one, &added, &err);
    if (status == FAN_OK)
        return added;
    fan_raise(status, &err);
    return -1;
}

int fan_buffer_add_plain(buffer_object *self, PyObject *const *args, PyObject *kwnames)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    const fan_plain_kind *defined = NULL;
    Py_ssize_t slot = fan_small_index(args[0]);
    PyObject *gradient = fan_given(args[1]);
    FAN_UNINITIALIZED add_options options;
    options.key = -1;
    options.donate = false;
    options.copy = false;
    options.weighted = false;
    char *data = NULL;
    if (slot < 0 || (size_t)slot >= self->n)
        return 0;
    if (self->create_graph)
        return 0;
    if (kwnames && !add_options_of(args + 2, kwnames, &options))
        return 0;
    if (gradient) {
        if (!fan_plain_import_as(gradient, true, &kind, &data))
            return 0;
        defined = &kind;
    }
    fan_entry one = fan_entry_of(gradient, data, options.key, gradient && options.donate, false);
    one.copy = options.copy;
    one.alone = gradient && fan_alone(gradient, 1);
    if (options.weighted)
        return add_entry(self->core, (size_t)slot, defined, &one, &options.weight);
    return add_entry(self->core, (size_t)slot, defined, &one, NULL);
}

int fan_plain_add_only(fan_buffer *core, PyObject *gradient, int64_t key)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    const fan_plain_kind *defined = NULL;
    PyObject *given = fan_given(gradient);
    char *data = NULL;
    if (key > FAN_ENTRY_KEY_MAX)
        return 0;
    if (given) {
        if (!fan_plain_import_as(given, true, &kind, &data))
            return 0;
        defined = &kind;
    }
    fan_entry one = fan_entry_of(given, data, key, false, false);
    return add_entry(core, 0, defined, &one, NULL);
}

/* ---- the method ---- */

PyObject *fan_buffer_add_one(PyObject *o, PyObject *const *a)
{
    enum {
        SLOT,
        GRADIENT,
        KEY,
        STREAM,
        DONATE,
        COPY,
        WEIGHT
    };
    buffer_object *self = fan_buffer_self(o);
    fan_contribution c = {
        .key = -1,
        .value = {.dtype = FAN_DT_NONE},
    };
    size_t slot;
    if (fan_slot_of_add(self, a[SLOT], "add(slot, gradient)", &slot) < 0)
        return NULL;
    if (fan_add_flags(self, a[DONATE], a[COPY], &c.donate, &c.copy) < 0)
        return NULL;
    fan_error_context place = fan_slot_context(self, slot);
    int bad = 0;
    fan_error_context_push(&place);
    if (fan_given(a[STREAM]))
        bad = fan_stream_arg(a[STREAM], &c.stream);
    if (!bad && fan_given(a[WEIGHT]))
        bad = fan_weight_arg(a[WEIGHT], "weight", &c.weight);
    fan_error_context_pop(&place);
    if (!bad) {
        c.alone = fan_alone(a[GRADIENT], 1);
        bad = fan_contribution_of(self, slot, a[GRADIENT], a[KEY], &c);
    }
    if (!bad)
        bad = fan_add_on_library_stream(self->core, slot, &c);
    if (c.value.form != FAN_FORM_UNDEFINED)
        fan_value_drop(&fan_python, &c.value);
    fan_stream_drop(c.stream);
    return fan_none_unless(bad);
}

int fan_buffer_add_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                        PyObject **result)
{
    if (nargs != 2)
        return 0;
    int added = fan_buffer_add_plain(fan_buffer_self(o), args, kwnames);
    if (added > 0)
        *result = Py_NewRef(Py_None);
    return added != 0;
}
