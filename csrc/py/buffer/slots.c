/* buffer_slots: what the slots of a buffer are declared to be, and which of them is meant. */
#include "py/buffer/buffer_object.h"
#include "py/device/backends.h"

#include "base/mem.h"

#include <string.h>

int fan_slot_arg(const buffer_object *self, PyObject *o, size_t *out)
{
    fan_error_context w = {.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
    int64_t i = 0;
    int result;
    fan_error_context_push(&w);
    result = fan_slot_index(o, "slot", &i);
    if (result == 0 && (uint64_t)i >= self->n)
        result = self->n
                     ? fan_refuse(PyExc_IndexError, "expected a slot from 0 to %zu, got %lld (S1)",
                                  self->n - 1, (long long)i)
                     : fan_refuse(PyExc_IndexError, "it has no slots, got %lld (S1)", (long long)i);
    fan_error_context_pop(&w);
    *out = (size_t)i;
    return result;
}

int fan_slot_of_add(const buffer_object *self, PyObject *o, const char *call, size_t *out)
{
    int bad = fan_slot_arg(self, o, out);
    if (bad && fan_is_array(o)) {
        fan_error_context w = {.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
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
                          "%R is a number, and no example array: for one slot of a shape give "
                          "[fanin.Slot(shape=(3, "
                          "4))], for so many slots a bare count, "
                          "for a slot of numbers fanin.Slot()",
                          item);
    if (fan_import(item, false, false, &v) < 0)
        return -1;
    ndim = fan_value_shape(&v, &shape);
    if (ndim < 0 && PyArray_Check(item) &&
        PyArray_DESCR((PyArrayObject *)item)->type_num == NPY_OBJECT)
        fan_dtype_refuse(PyArray_DESCR((PyArrayObject *)item), "the example array");
    else if (ndim < 0)
        fan_refuse(
            PyExc_TypeError,
            "expected an example array or a fanin.Slot, got %s; fanin.Slot() declares nothing",
            FAN_TYPE_TEXT(item));
    else
        result = fan_slot_spec_shape(spec, ndim, shape);
    spec->dtype = v.dtype;
    spec->device = v.device ? fan_device_hold(v.device) : NULL;
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
    WORDS
};

/* slot_words_of: reads the fields from a Slot's own dict, which has those that it was given; a
 * subclass may give them by properties. */
static int slot_words_of(PyObject *item, PyObject **words)
{
    const fan_state *st = fan_state_get();
    PyObject *const names[WORDS] = {st->str_shape,      st->str_dtype,   st->str_device,
                                    st->str_accumulate, st->str_combine, st->str_name};
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
        Py_XSETREF(words[i], word == Py_None ? NULL : Py_NewRef(word));
        Py_DECREF(word);
    }
    return 0;
}

static int spec_shape_of(PyObject *shape, fan_slot_spec *spec)
{
    FAN_UNINITIALIZED int64_t dims[FAN_MAX_NDIM];
    Py_ssize_t n = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : FAN_MAX_NDIM + 1;
    if (n > FAN_MAX_NDIM)
        return fan_refuse(PyExc_ValueError, "expected a shape of at most %d axes, got %R",
                          FAN_MAX_NDIM, shape);
    for (Py_ssize_t i = 0; i < n; i++)
        if (fan_index(PyTuple_GET_ITEM(shape, i), "shape", PyExc_ValueError, &dims[i]) < 0)
            return -1;
    return fan_slot_spec_shape(spec, (int)n, dims);
}

/* spec_of_slot: a fanin.Slot, which has checked itself. Its name goes to *name. */
static int spec_of_slot(PyObject *item, fan_slot_spec *spec, PyObject **held, PyObject **name)
{
    PyObject *w[WORDS] = {NULL};
    int bad =
        slot_words_of(item, w) < 0 || (w[SHAPE] && spec_shape_of(w[SHAPE], spec) < 0) ||
        (w[DTYPE] && fan_dtype_parse(w[DTYPE], &spec->dtype) < 0) ||
        (w[DEVICE] && fan_device_arg(w[DEVICE], &spec->device) < 0) ||
        (w[ACCUMULATE] && fan_accumulate_arg(w[ACCUMULATE], &spec->accumulate, &spec->exact) < 0);
    if (!bad) {
        spec->combine = *held = Py_XNewRef(w[COMBINE]);
        *name = Py_XNewRef(w[NAME]);
    }
    for (size_t i = 0; i < WORDS; i++)
        Py_XDECREF(w[i]);
    return bad ? -1 : 0;
}

/* spec_named: slot i of d is called `own`; *names becomes a tuple where it is NULL. */
static int spec_named(fan_slot_specs *d, size_t i, PyObject *own, PyObject **names)
{
    PyObject *text = PyObject_Str(own);
    if (text && !*names && (*names = PyTuple_New((Py_ssize_t)d->n)))
        for (size_t k = 0; k < d->n; k++)
            PyTuple_SET_ITEM(*names, (Py_ssize_t)k, Py_NewRef(Py_None));
    if (!text || !*names) {
        Py_XDECREF(text);
        return -1;
    }
    Py_SETREF(PyTuple_GET_ITEM(*names, (Py_ssize_t)i), text);
    d->specs[i].name = fan_text_arg(text);
    return d->specs[i].name ? 0 : -1;
}

/* spec_of: what `item`, for slot i of a buffer of this name, declares. */
static int spec_of(fan_slot_specs *d, size_t i, PyObject *item, const char *name, PyObject **names)
{
    PyObject *type = fan_state_get()->slot_type, *own = NULL;
    fan_error_context w = {.buffer = name, .slot = (Py_ssize_t)i, .key = -1};
    int isslot = (PyObject *)Py_TYPE(item) == type ? 1 : PyObject_IsInstance(item, type), bad;
    if (isslot < 0)
        return -1;
    fan_error_context_push(&w);
    bad = isslot ? spec_of_slot(item, &d->specs[i], &d->held[i], &own)
                 : spec_of_example(item, &d->specs[i]);
    fan_error_context_pop(&w);
    if (!bad && own)
        bad = spec_named(d, i, own, names);
    Py_XDECREF(own);
    return bad;
}

int fan_slot_specs_of(PyObject *slots, const char *name, fan_slot_specs *d, PyObject **names)
{
    fan_state *st = fan_state_get();
    PyObject *fast, *type = fan_lazy(&st->slot_type, "fanin.slots", "Slot");
    int bare = type ? fan_is_bare(slots) : -1, result = -1;
    if (bare < 0)
        return -1;
    if (bare)
        return fan_refuse(PyExc_TypeError,
                          "slots: expected a count or a sequence of arrays and Slots, got one "
                          "%.200s: give [array]",
                          Py_TYPE(slots)->tp_name);
    if (PyUnicode_Check(slots) || PyBytes_Check(slots) || PyDict_Check(slots) ||
        PyAnySet_Check(slots) || !Py_TYPE(slots)->tp_iter || !(fast = PySequence_Tuple(slots)))
        return PyErr_Occurred()
                   ? -1
                   : fan_refuse(PyExc_TypeError,
                                "slots: expected a count or a sequence of arrays and Slots, got %s",
                                FAN_TYPE_TEXT(slots));
    size_t n = (size_t)PyTuple_GET_SIZE(fast);
    if (!(d->specs = fan_alloc(n * (sizeof *d->specs + sizeof *d->held)))) {
        PyErr_NoMemory();
        goto done;
    }
    d->held = (PyObject **)(void *)(d->specs + n);
    d->n = n;
    for (size_t i = 0; i < n; i++) {
        d->specs[i] = (fan_slot_spec){.dtype = FAN_DT_NONE, .accumulate = FAN_DT_NONE};
        d->held[i] = NULL;
    }
    for (size_t i = 0; i < n; i++)
        if (spec_of(d, i, PyTuple_GET_ITEM(fast, (Py_ssize_t)i), name, names) < 0)
            goto done;
    result = 0;
done:
    Py_DECREF(fast);
    return result;
}

int fan_slot_specs_note(buffer_object *self, const fan_slot_specs *d)
{
    if (!d->specs)
        return 0;
    if (self->n > sizeof self->few_flags) {
        if (!(self->flags = fan_calloc(self->n))) {
            PyErr_NoMemory();
            return -1;
        }
    } else {
        self->flags = memset(self->few_flags, 0, sizeof self->few_flags);
    }
    if (self->create_graph && !(self->declared = PyTuple_New((Py_ssize_t)self->n)))
        return -1;
    for (size_t i = 0; i < self->n; i++) {
        const fan_slot_spec *s = &d->specs[i];
        PyObject *shape, *pair;
        if (s->combine)
            self->flags[i] |= FAN_HAS_COMBINE;
        if (fan_dtype_of_ml_dtypes(s->dtype))
            self->flags[i] |= FAN_LOW_DTYPE;
        if (!self->create_graph && !s->combine && (s->has_shape || s->dtype != FAN_DT_NONE))
            self->flags[i] |= FAN_NUMBERS;
        if (!self->declared)
            continue;
        if (s->has_shape || s->dtype != FAN_DT_NONE)
            self->flags[i] |= FAN_DECLARED;
        shape = s->has_shape ? fan_ints(s->ndim, s->shape) : Py_NewRef(Py_None);
        pair = shape ? Py_BuildValue("(Nz)", shape,
                                     s->dtype == FAN_DT_NONE ? NULL : fan_dtype_name(s->dtype))
                     : NULL;
        if (!pair)
            return -1;
        PyTuple_SET_ITEM(self->declared, (Py_ssize_t)i, pair);
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
