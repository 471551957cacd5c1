/* slots: the declarations of a buffer's slots, and the argument that names a slot.
 *
 * First slot=; then one declaration, from an example array or a fanin.Slot; then all of a buffer;
 * last what add reads of them. */
#include "py/buffer/buffer_object.h"
#include "py/device/backends.h"

#include "base/mem.h"

#include <string.h>

int fan_slot_arg(const buffer_object *self, PyObject *o, size_t *out)
{
    fan_error_context w = fan_buffer_context(self);
    int64_t i = 0;
    fan_error_context_push(&w);
    int result = fan_slot_index(o, "slot", &i);
    bool beyond = result == 0 && (uint64_t)i >= self->n;
    if (beyond && self->n) {
        result = fan_refuse(PyExc_IndexError, "expected a slot from 0 to %zu, got %lld (S1)",
                            self->n - 1, (long long)i);
    } else if (beyond)
        result = fan_refuse(PyExc_IndexError, "it has no slots, got %lld (S1)", (long long)i);
    fan_error_context_pop(&w);
    *out = (size_t)i;
    return result;
}

int fan_slot_of_add(const buffer_object *self, PyObject *o, const char *call, size_t *out)
{
    int bad = fan_slot_arg(self, o, out);
    if (bad && fan_is_array(o)) {
        fan_error_context w = fan_buffer_context(self);
        PyErr_Clear();
        fan_error_context_push(&w);
        fan_refuse(PyExc_TypeError,
                   "slot: expected an integer, got %s: the slot comes first, as in %s",
                   FAN_TYPE_TEXT(o), call);
        fan_error_context_pop(&w);
    }
    return bad;
}

void fan_slot_specs_fini(fan_slot_specs *d)
{
    for (size_t i = 0; d->specs && i < d->n; i++) {
        fan_free((void *)d->specs[i].shape);
        fan_device_drop(d->specs[i].device);
        if (d->held)
            Py_XDECREF(d->held[i]);
    }
    fan_free(d->specs);
}

int fan_slot_spec_shape(fan_slot_spec *spec, int ndim, const int64_t *shape)
{
    int64_t *copy = fan_alloc(sizeof *copy * (size_t)ndim);
    if (!copy)
        return fan_no_memory();
    if (ndim)
        memcpy(copy, shape, sizeof *copy * (size_t)ndim);
    spec->has_shape = true;
    spec->ndim = ndim;
    spec->shape = copy;
    return 0;
}

static bool is_number(PyObject *o)
{
    if (PyLong_Check(o) || PyFloat_CheckExact(o) || PyComplex_CheckExact(o))
        return true;
    return PyArray_IsScalar(o, Integer) || PyArray_IsScalar(o, Bool);
}

/* spec_of_example: shape, dtype and device of an array, which is not kept. */
static int spec_of_example(PyObject *item, fan_slot_spec *spec)
{
    if (is_number(item)) {
        return fan_refuse(PyExc_TypeError,
                          "%R is a number, and no example array: for one slot of a shape give "
                          "[fanin.Slot(shape=(3, 4))], for so many slots a bare count, for a slot "
                          "of numbers fanin.Slot()",
                          item);
    }
    fan_value v;
    if (fan_import(item, false, false, &v) < 0)
        return -1;
    const int64_t *shape = NULL;
    int ndim = fan_value_shape(&v, &shape);
    int result = -1;
    if (ndim >= 0)
        result = fan_slot_spec_shape(spec, ndim, shape);
    else if (PyArray_Check(item) && PyArray_TYPE((PyArrayObject *)item) == NPY_OBJECT) {
        fan_dtype_refuse(PyArray_DESCR((PyArrayObject *)item), "the example array");
    } else {
        fan_refuse(
            PyExc_TypeError,
            "expected an example array or a fanin.Slot, got %s; fanin.Slot() declares nothing",
            FAN_TYPE_TEXT(item));
    }
    spec->dtype = v.dtype;
    if (v.device)
        spec->device = fan_device_hold(v.device);
    fan_value_drop(&fan_python, &v);
    return result;
}

/* The fields of a Slot, each held; NULL: None, or, after a failure, not read. */
enum {
    SHAPE,
    DTYPE,
    DEVICE,
    ACCUMULATE,
    COMBINE,
    NAME,
    PARTIAL,
    WORDS
};

/* slot_words_of: reads the fields from a Slot's own dict, which has those that it was given; a
 * subclass may give them by properties. */
static int slot_words_of(PyObject *item, PyObject **words)
{
    const fan_state *st = fan_state_get();
    PyObject *const names[WORDS] = {st->str_shape,      st->str_dtype,   st->str_device,
                                    st->str_accumulate, st->str_combine, st->str_name,
                                    st->str_partial};
#ifndef Py_GIL_DISABLED /* another thread may write into the dict */
    if ((PyObject *)Py_TYPE(item) == st->slot_type) {
        PyObject *name, *word, *said = PyObject_GenericGetDict(item, NULL);
        size_t i = 0;
        if (!said)
            return -1;
        for (Py_ssize_t at = 0; i < WORDS && PyDict_Next(said, &at, &name, &word);) {
            for (i = 0; i < WORDS && names[i] != name;)
                i++;
            if (i < WORDS && word != Py_None)
                words[i] = Py_NewRef(word);
        }
        Py_DECREF(said);
        if (i < WORDS)
            return 0;
    }
#endif
    for (size_t i = 0; i < WORDS; i++) {
        PyObject *word = PyObject_GetAttr(item, names[i]);
        if (!word)
            return -1;
        Py_XSETREF(words[i], Py_XNewRef(fan_given(word)));
        Py_DECREF(word);
    }
    return 0;
}

static int spec_shape_of(PyObject *shape, fan_slot_spec *spec)
{
    FAN_UNINITIALIZED int64_t dims[FAN_MAX_NDIM];
    Py_ssize_t n = FAN_MAX_NDIM + 1;
    if (PyTuple_Check(shape))
        n = PyTuple_GET_SIZE(shape);
    if (n > FAN_MAX_NDIM) {
        return fan_refuse(PyExc_ValueError, "expected a shape of at most %d axes, got %R",
                          FAN_MAX_NDIM, shape);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (fan_index(PyTuple_GET_ITEM(shape, i), "shape", PyExc_ValueError, &dims[i]) < 0)
            return -1;
    }
    return fan_slot_spec_shape(spec, (int)n, dims);
}

/* spec_of_slot: a fanin.Slot, which has checked itself. Its name goes to *name. */
static int spec_of_slot(PyObject *item, fan_slot_spec *spec, PyObject **held, PyObject **name)
{
    PyObject *w[WORDS] = {NULL};
    int bad = slot_words_of(item, w);
    if (!bad && w[SHAPE])
        bad = spec_shape_of(w[SHAPE], spec);
    if (!bad && w[DTYPE])
        bad = fan_dtype_parse(w[DTYPE], &spec->dtype);
    if (!bad && w[DEVICE])
        bad = fan_device_arg(w[DEVICE], &spec->device);
    if (!bad && w[ACCUMULATE])
        bad = fan_accumulate_arg(w[ACCUMULATE], &spec->accumulate, &spec->exact);
    if (!bad) {
        spec->combine = *held = Py_XNewRef(w[COMBINE]);
        *name = Py_XNewRef(w[NAME]);
        spec->partial = w[PARTIAL] == Py_True;
    }
    for (size_t i = 0; i < WORDS; i++)
        Py_XDECREF(w[i]);
    return bad;
}

/* spec_named: slot i of d is called `own`; *names becomes a tuple where it is NULL. */
static int spec_named(fan_slot_specs *d, size_t i, PyObject *own, PyObject **names)
{
    PyObject *text = PyObject_Str(own);
    if (!text)
        return -1;
    if (!*names) {
        *names = PyTuple_New((Py_ssize_t)d->n);
        if (!*names) {
            Py_DECREF(text);
            return -1;
        }
        for (size_t k = 0; k < d->n; k++)
            PyTuple_SET_ITEM(*names, (Py_ssize_t)k, Py_NewRef(Py_None));
    }
    Py_SETREF(PyTuple_GET_ITEM(*names, (Py_ssize_t)i), text);
    d->specs[i].name = fan_text_arg(text);
    if (!d->specs[i].name)
        return -1;
    return 0;
}

/* spec_of: what `item`, for slot i of a buffer of this name, declares. */
static int spec_of(fan_slot_specs *d, size_t i, PyObject *item, const char *name, PyObject **names)
{
    PyObject *type = fan_state_get()->slot_type;
    PyObject *own = NULL;
    fan_error_context w = {
        .buffer = name,
        .slot = (Py_ssize_t)i,
        .key = -1,
    };
    int is_slot = 1;
    int bad;
    if (d->nones && item == Py_None)
        return 0;
    if ((PyObject *)Py_TYPE(item) != type)
        is_slot = PyObject_IsInstance(item, type);
    if (is_slot < 0)
        return -1;
    fan_error_context_push(&w);
    if (is_slot)
        bad = spec_of_slot(item, &d->specs[i], &d->held[i], &own);
    else
        bad = spec_of_example(item, &d->specs[i]);
    fan_error_context_pop(&w);
    if (!bad && own)
        bad = spec_named(d, i, own, names);
    Py_XDECREF(own);
    return bad;
}

static bool is_sequence(PyObject *o)
{
    if (PyUnicode_Check(o) || PyBytes_Check(o) || PyDict_Check(o))
        return false;
    return !PyAnySet_Check(o) && Py_TYPE(o)->tp_iter;
}

int fan_slot_specs_of(PyObject *slots, const char *name, fan_slot_specs *d, PyObject **names)
{
    if (!fan_lazy(&fan_state_get()->slot_type, "fanin.slots", "Slot"))
        return -1;
    int bare = fan_is_bare(slots);
    if (bare < 0)
        return -1;
    if (bare) {
        return fan_refuse(PyExc_TypeError,
                          "slots: expected a count or a sequence of arrays and Slots, got one "
                          "%.200s: give [array]",
                          Py_TYPE(slots)->tp_name);
    }
    if (!is_sequence(slots)) {
        return fan_refuse(PyExc_TypeError,
                          "slots: expected a count or a sequence of arrays and Slots, got %s",
                          FAN_TYPE_TEXT(slots));
    }
    PyObject *fast = PySequence_Tuple(slots);
    if (!fast)
        return -1;
    int bad = 0;
    size_t n = (size_t)PyTuple_GET_SIZE(fast);
    d->specs = fan_alloc(n * (sizeof *d->specs + sizeof *d->held));
    if (!d->specs) {
        Py_DECREF(fast);
        return fan_no_memory();
    }
    d->held = (PyObject **)(void *)(d->specs + n);
    d->n = n;
    for (size_t i = 0; i < n; i++) {
        d->specs[i] = (fan_slot_spec){
            .dtype = FAN_DT_NONE,
            .accumulate = FAN_DT_NONE,
        };
        d->held[i] = NULL;
    }
    for (size_t i = 0; i < n && !bad; i++)
        bad = spec_of(d, i, PyTuple_GET_ITEM(fast, (Py_ssize_t)i), name, names);
    Py_DECREF(fast);
    return bad;
}

/* declared_set: writes the shape and dtype of a slot to the tuple that conversions read. */
static int declared_set(buffer_object *self, size_t slot, const fan_slot_spec *spec)
{
    const char *dtype = NULL;
    PyObject *shape = NULL;
    if (spec->dtype != FAN_DT_NONE)
        dtype = fan_dtype_name(spec->dtype);
    if (spec->has_shape) {
        shape = fan_ints(spec->ndim, spec->shape);
        if (!shape)
            return -1;
    }
    PyObject *pair = Py_BuildValue("(Nz)", fan_take_or_none(shape), dtype);
    if (!pair)
        return -1;
    PyTuple_SET_ITEM(self->declared, (Py_ssize_t)slot, pair);
    return 0;
}

int fan_slot_specs_note(buffer_object *self, const fan_slot_specs *d)
{
    if (!d->specs)
        return 0;
    self->flags = memset(self->few_flags, 0, sizeof self->few_flags);
    if (self->n > sizeof self->few_flags) {
        self->flags = fan_calloc(self->n);
        if (!self->flags)
            return fan_no_memory();
    }
    if (self->create_graph) {
        self->declared = PyTuple_New((Py_ssize_t)self->n);
        if (!self->declared)
            return -1;
    }
    for (size_t i = 0; i < self->n; i++) {
        const fan_slot_spec *spec = &d->specs[i];
        bool declares = spec->has_shape || spec->dtype != FAN_DT_NONE;
        if (spec->combine)
            self->flags[i] |= FAN_HAS_COMBINE;
        if (fan_dtype_of_ml_dtypes(spec->dtype))
            self->flags[i] |= FAN_LOW_DTYPE;
        if (declares && self->declared)
            self->flags[i] |= FAN_DECLARED;
        else if (declares && !spec->combine)
            self->flags[i] |= FAN_NUMBERS;
        if (self->declared && declared_set(self, i, spec) < 0)
            return -1;
    }
    return 0;
}

void fan_slot_specs_forget(buffer_object *self)
{
    if (self->flags != self->few_flags)
        fan_free(self->flags);
    self->flags = NULL;
    Py_CLEAR(self->names);
}
