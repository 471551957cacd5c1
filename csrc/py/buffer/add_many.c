/* buffer_many: InputBuffer.add_many. */
#include "py/buffer/buffer_object.h"

#include "base/mem.h"

#include <stdlib.h>

static int batch_begin(fan_batch_args *t, PyObject *slots, PyObject *gradients, PyObject *keys)
{
    int bare = fan_is_bare(gradients);
    if (bare < 0)
        return -1;
    if (bare)
        return fan_refuse(
            PyExc_TypeError,
            "gradients: expected a sequence of gradients, got one %.200s: give [x, ..]",
            Py_TYPE(gradients)->tp_name);
    /* Our own tuples: no other code can change them. */
    if (fan_sequence_arg(slots, "slots", &t->slots) < 0 ||
        fan_sequence_arg(gradients, "gradients", &t->gradients) < 0 ||
        (keys && keys != Py_None && fan_sequence_arg(keys, "keys", &t->keys) < 0))
        return -1;
    t->n = PyTuple_GET_SIZE(t->slots);
    Py_ssize_t other = PyTuple_GET_SIZE(t->gradients) != t->n || !t->keys
                           ? PyTuple_GET_SIZE(t->gradients)
                           : PyTuple_GET_SIZE(t->keys);
    if (other != t->n)
        return fan_refuse(
            PyExc_ValueError, "expected as many slots as gradients%s, got %zd slot%s and %zd %s%s",
            t->keys ? " and keys" : "", t->n, FAN_PLURAL(t->n), other,
            PyTuple_GET_SIZE(t->gradients) != t->n ? "gradient" : "key", FAN_PLURAL(other));
    return 0;
}

typedef struct slot_order {
    size_t slot, at;
} slot_order;

static int by_slot(const void *a, const void *b)
{
    const slot_order *x = a, *y = b;
    return x->slot != y->slot ? (x->slot > y->slot) - (x->slot < y->slot)
                              : (x->at > y->at) - (x->at < y->at);
}

/* batch_push: as add_on: each gradient is ready on its library's current stream, and the first of a
 * device names that of the device. */
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

fan_status fan_add_many_used(fan_buffer *core, fan_contribution *c, const size_t *slots, size_t n,
                             fan_error *err)
{
    slot_order *sorted = fan_alloc((n ? n : 1) * sizeof *sorted);
    size_t *order = fan_alloc((n ? n : 1) * sizeof *order), used = 0;
    fan_status status = sorted && order ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    if (status == FAN_OK) {
        for (size_t i = 0; i < n; i++)
            sorted[i] = (slot_order){slots[i], i};
        qsort(sorted, n, sizeof *sorted, by_slot);
        for (size_t i = 0; i < n; i++)
            order[i] = sorted[i].at;
    }
    while (status == FAN_OK && used < n)
        if ((status = fan_value_use(&c[used].value, "add", c[used].donate, err)) == FAN_OK)
            used++;
    if (status == FAN_OK)
        status = fan_buffer_add_many(core, c, slots, order, n, err);
    while (status != FAN_OK && used-- > 0)
        if (c[used].donate)
            fan_value_returned(&c[used].value);
    fan_free(order);
    fan_free(sorted);
    return status;
}

static int batch_any(buffer_object *self, const fan_batch_args *t, fan_stream *stream, bool donate,
                     bool copy)
{
    size_t n = (size_t)t->n, made = 0;
    fan_contribution *c = fan_calloc((n ? n : 1) * sizeof *c);
    size_t *slots = fan_alloc((n ? n : 1) * sizeof *slots);
    fan_memory_leave_begin();
    /* current streams of the gradients' libraries */
    fan_stream **own = fan_calloc((n ? n : 1) * sizeof *own);
    FAN_UNINITIALIZED fan_error err;
    int result = -1;
    if (!c || !slots || !own) {
        PyErr_NoMemory();
        goto done;
    }
    for (; made < n; made++) {
        Py_ssize_t k = (Py_ssize_t)made;
        PyObject *gradient = NULL;
        if (fan_slot_of_add(self, PyTuple_GET_ITEM(t->slots, k), "add_many(slots, gradients)",
                            &slots[made]) < 0)
            goto done;
        c[made] = (fan_contribution){.key = -1,
                                     .stream = stream,
                                     .donate = donate,
                                     .copy = copy,
                                     .value = {.dtype = FAN_DT_NONE}};
        gradient = Py_NewRef(PyTuple_GET_ITEM(t->gradients, k));
        int bad = fan_contribution_of(self, slots[made], gradient,
                                      t->keys ? PyTuple_GET_ITEM(t->keys, k) : NULL, &c[made]);
        Py_DECREF(gradient);
        if (bad ||
            fan_library_stream(&c[made].value, made ? own[made - 1] : NULL, &own[made]) < 0) {
            made++;
            goto done;
        }
    }
    fan_error_clear(&err);
    fan_status status = batch_push(c, own, n, &err);
    if (status == FAN_OK)
        status = fan_add_many_used(self->core, c, slots, n, &err);
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
    fan_free(own);
    fan_memory_leave_end();
    return result;
}

/* ---- plain contributions (buffer/plain.h) ---- */

#define AHEAD 8
#define FAR 500 /* slots that no near cache holds */

typedef struct batch_source {
    const fan_batch_args *args;
    const buffer_object *self;
    bool donate;
} batch_source;

static bool source_read(void *ctx, size_t k, size_t *slot, fan_plain_kind *kind, fan_entry *one)
{
    const batch_source *m = ctx;
    Py_ssize_t at = fan_small_index(PyTuple_GET_ITEM(m->args->slots, (Py_ssize_t)k)), key = -1;
    PyObject *gradient = PyTuple_GET_ITEM(m->args->gradients, (Py_ssize_t)k);
    char *data = NULL;
    if (at < 0 || (m->args->keys &&
                   ((key = fan_small_index(PyTuple_GET_ITEM(m->args->keys, (Py_ssize_t)k))) < 0 ||
                    key > FAN_ENTRY_KEY_MAX)))
        return false;
    if (gradient == Py_None)
        gradient = NULL;
    else if (!fan_plain_import_as(gradient, true, kind, &data))
        return false;
    *slot = (size_t)at;
    *one = fan_entry_of(gradient, data, key, gradient && m->donate, false);
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
        fan_plain_prefetch(m->self->core,
                           (size_t)fan_small_index(PyTuple_GET_ITEM(m->args->slots, k + AHEAD)));
    }
}

PyObject *fan_buffer_add_batch(PyObject *o, PyObject *const *a)
{
    enum {
        SLOTS,
        GRADIENTS,
        KEYS,
        STREAM,
        DONATE,
        COPY
    };
    buffer_object *self = fan_buffer_self(o);
    fan_batch_args t = {.slots = NULL};
    fan_stream *stream = NULL;
    fan_error_context w = {.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
    bool donate, copy;
    int done = -1;
    if (fan_add_flags(self, a[DONATE], a[COPY], &donate, &copy) < 0)
        return NULL;
    fan_error_context_push(&w);
    if (batch_begin(&t, a[SLOTS], a[GRADIENTS], a[KEYS]) == 0 &&
        fan_stream_arg(a[STREAM] ? a[STREAM] : Py_None, &stream) == 0) {
        batch_source m = {&t, self, donate};
        fan_plain_batch batch = {(size_t)t.n,  self->n >= FAR,  source_read,
                                 source_again, source_prefetch, &m};
        bool added = false;
        done = 0;
        if (!stream && !copy && !self->create_graph)
            done = FAN_CHECK(fan_plain_add_many(self->core, &batch, &added, &err)) < 0 ? -1 : added;
        if (done == 0)
            done = batch_any(self, &t, stream, donate, copy) == 0 ? 1 : -1;
    }
    fan_error_context_pop(&w);
    fan_stream_drop(stream);
    Py_XDECREF(t.slots);
    Py_XDECREF(t.gradients);
    Py_XDECREF(t.keys);
    return done > 0 ? Py_NewRef(Py_None) : NULL;
}
