/* buffer_add: InputBuffer.add: a plain contribution (buffer/plain.h) in one call of the core;
 * whatever it is not, becomes a value first, or an error. */
#include "py/buffer/buffer_object.h"

int fan_add_flags(const buffer_object *self, PyObject *donate, PyObject *copy, bool *donated,
                  bool *copied)
{
    *donated = donate == Py_True;
    *copied = copy == Py_True;
    if (!*donated || !*copied)
        return 0;
    PyErr_Format(PyExc_ValueError,
                 "%s: donate=True gives the array away, copy=True keeps it yours: give one of them",
                 fan_buffer_name(self->core));
    return -1;
}

/* conformed: A9 and A10 by the array's own operators, for a slot of a buffer that records itself;
 * new reference. */
static PyObject *conformed(const buffer_object *self, size_t slot, PyObject *gradient)
{
    PyObject *arrays = fan_arrays(), *pair = PyTuple_GET_ITEM(self->declared, (Py_ssize_t)slot),
             *answer, *result = NULL;
    answer = arrays ? PyObject_CallMethod(arrays, "conform", "OOO", gradient,
                                          PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1))
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

/* check_object: whether a slot that declares something takes what sums by its own + (A8). */
static int check_object(const PyObject *gradient, unsigned flags)
{
    if ((flags & FAN_NUMBERS) && PyArray_CheckExact(gradient))
        return fan_refuse(
            fan_state_get()->dtype_error,
            "expected an array of numbers, as the slot declares its shape or dtype, got %s of "
            "objects: convert it, x.astype(float), or give Slot(combine=f)",
            FAN_TYPE_TEXT(gradient));
    if (flags & FAN_ARRAYS)
        return fan_refuse(
            PyExc_TypeError,
            "expected an array that can be added to the leaf's .grad in place, got %s, which sums "
            "by its own +: pass np.asarray(x)",
            FAN_TYPE_TEXT(gradient));
    return 0;
}

int fan_contribution_of(buffer_object *self, size_t slot, PyObject *gradient, PyObject *key,
                        fan_contribution *c)
{
    fan_error_context w = fan_slot_context(self, slot);
    unsigned flags = self->flags ? self->flags[slot] : 0;
    PyObject *own = NULL;
    int bad;
    c->key = -1;
    w.stream = c->stream;
    if (fan_is_no_gradient(gradient))
        gradient = Py_None;
    fan_error_context_push(&w);
    bad = key && key != Py_None && fan_index(key, "key", PyExc_ValueError, &c->key) < 0;
    w.key = c->key;
    if (!bad)
        own = (flags & FAN_DECLARED) ? conformed(self, slot, gradient) : Py_NewRef(gradient);
    bad =
        !own || fan_import(own, self->create_graph, (flags & FAN_HAS_COMBINE) != 0, &c->value) < 0;
    const fan_value *v = &c->value;
    if (!bad && (flags & FAN_LOW_DTYPE) &&
        (v->form == FAN_FORM_DENSE || v->form == FAN_FORM_SPARSE) && v->origin < FAN_FROM_FOREIGN &&
        v->device == fan_cpu() && fan_dtype_needs_ml_dtypes(FAN_DT_BFLOAT16))
        bad = fan_refuse(PyExc_TypeError, /* here, where nothing is lost yet */
                         "the slot is declared of a dtype that NumPy knows through ml_dtypes "
                         "alone: import ml_dtypes "
                         "first");
    if (!bad && (flags & (FAN_NUMBERS | FAN_ARRAYS)) && c->value.form == FAN_FORM_OBJECT)
        bad = check_object(own, flags) < 0;
    fan_error_context_pop(&w);
    Py_XDECREF(own);
    return bad ? -1 : 0;
}

fan_status fan_add_used(fan_buffer *core, size_t slot, fan_contribution *c, fan_error *err)
{
    FAN_TRY(fan_value_use(&c->value, "add", c->donate, err));
    fan_status status = fan_buffer_add(core, slot, c, err);
    if (status != FAN_OK && c->donate)
        fan_value_returned(&c->value);
    return status;
}

int fan_add_on(fan_buffer *core, size_t slot, fan_contribution *c)
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
        status = fan_add_used(core, slot, c, &err);
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
    bool donate, copy;
} add_options;

/* add_options_of: false: another option, or a wrong one: for the general path. */
static bool add_options_of(PyObject *const *values, PyObject *kwnames, add_options *t)
{
    const fan_state *st = fan_state_get();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i), *value = values[i];
        bool flag = value == Py_True || value == Py_False;
        if (name == st->str_key && value != Py_None) {
            t->key = fan_small_index(value);
            if (t->key < 0 || t->key > FAN_ENTRY_KEY_MAX)
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

/* add_entry: 1: added; 0: it is for the general path; -1 with an exception. */
static inline __attribute__((always_inline)) int add_entry(fan_buffer *core, size_t slot,
                                                           const fan_plain_kind *kind,
                                                           fan_entry *one)
{
    FAN_UNINITIALIZED fan_error err;
    bool added;
    fan_error_clear(&err);
    fan_status status = fan_plain_add(core, slot, kind, one, &added, &err);
    if (status == FAN_OK)
        return added;
    fan_raise(status, &err);
    return -1;
}

int fan_buffer_add_plain(buffer_object *self, PyObject *const *args, PyObject *kwnames)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    Py_ssize_t slot = fan_small_index(args[0]);
    PyObject *gradient = args[1] == Py_None ? NULL : args[1];
    add_options t = {.key = -1};
    char *data = NULL;
    if (slot < 0 || (size_t)slot >= self->n || self->create_graph ||
        (kwnames && !add_options_of(args + 2, kwnames, &t)) ||
        (gradient && !fan_plain_import_as(gradient, true, &kind, &data)))
        return 0;
    fan_entry one = fan_entry_of(gradient, data, t.key, gradient && t.donate, false);
    one.copy = t.copy;
    one.alone = gradient && fan_alone(gradient, 1);
    return add_entry(self->core, (size_t)slot, gradient ? &kind : NULL, &one);
}

int fan_plain_add_only(fan_buffer *core, PyObject *gradient, int64_t key)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    PyObject *defined = gradient == Py_None ? NULL : gradient;
    char *data = NULL;
    if (key > FAN_ENTRY_KEY_MAX || (defined && !fan_plain_import_as(defined, true, &kind, &data)))
        return 0;
    fan_entry one = fan_entry_of(defined, data, key, false, false);
    return add_entry(core, 0, defined ? &kind : NULL, &one);
}

/* ---- all others ---- */

PyObject *fan_buffer_add_one(PyObject *o, PyObject *const *a)
{
    enum {
        SLOT,
        GRADIENT,
        KEY,
        STREAM,
        DONATE,
        COPY
    };
    buffer_object *self = fan_buffer_self(o);
    fan_contribution c = {.key = -1, .value = {.dtype = FAN_DT_NONE}};
    size_t slot;
    int bad;
    if (fan_slot_of_add(self, a[SLOT], "add(slot, gradient)", &slot) < 0 ||
        fan_add_flags(self, a[DONATE], a[COPY], &c.donate, &c.copy) < 0)
        return NULL;
    if (a[STREAM] && a[STREAM] != Py_None) {
        fan_error_context w = fan_slot_context(self, slot);
        fan_error_context_push(&w);
        bad = fan_stream_arg(a[STREAM], &c.stream);
        fan_error_context_pop(&w);
        if (bad)
            return NULL;
    }
    c.alone = fan_alone(a[GRADIENT], 1);
    bad = fan_contribution_of(self, slot, a[GRADIENT], a[KEY], &c) < 0 ||
          fan_add_on(self->core, slot, &c) < 0;
    if (c.value.form != FAN_FORM_UNDEFINED)
        fan_value_drop(&fan_python, &c.value);
    fan_stream_drop(c.stream);
    if (bad)
        return NULL;
    Py_RETURN_NONE;
}

int fan_buffer_add_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                        PyObject **result)
{
    int added = nargs == 2 ? fan_buffer_add_plain(fan_buffer_self(o), args, kwnames) : 0;
    if (added > 0)
        *result = Py_NewRef(Py_None);
    return added != 0;
}
