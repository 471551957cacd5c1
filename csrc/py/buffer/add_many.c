/* buffer_many: InputBuffer.add_many.
 *
 * The arguments; the general path, of any gradients; the path of plain ones; the method. */
#include "py/buffer/buffer_object.h"

#include "base/mem.h"

#include <stdlib.h>

static int batch_begin(fan_batch_args *args, PyObject *slots, PyObject *gradients, PyObject *keys)
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
    if (fan_sequence_arg(slots, "slots", &args->slots) < 0)
        return -1;
    if (fan_sequence_arg(gradients, "gradients", &args->gradients) < 0)
        return -1;
    if (fan_is_given(keys) && fan_sequence_arg(keys, "keys", &args->keys) < 0)
        return -1;
    args->n = PyTuple_GET_SIZE(args->slots);
    Py_ssize_t other = PyTuple_GET_SIZE(args->gradients);
    const char *what = "gradient";
    if (other == args->n && args->keys) {
        other = PyTuple_GET_SIZE(args->keys);
        what = "key";
    }
    if (other == args->n)
        return 0;
    return fan_refuse(PyExc_ValueError,
                      "expected as many slots as gradients%s, got %zd slot%s and %zd %s%s",
                      args->keys ? " and keys" : "", args->n, FAN_PLURAL(args->n), other, what,
                      FAN_PLURAL(other));
}

typedef struct slot_order {
    size_t slot, at;
} slot_order;

static int by_slot(const void *a, const void *b)
{
    const slot_order *x = a;
    const slot_order *y = b;
    if (x->slot != y->slot)
        return x->slot < y->slot ? -1 : 1;
    return (x->at > y->at) - (x->at < y->at);
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
        if (status == FAN_OK)
            status = fan_stream_push(own[i], err);
    }
    return status;
}

fan_status fan_add_many_used(fan_buffer *core, fan_contribution *c, const size_t *slots, size_t n,
                             fan_error *err)
{
    slot_order *sorted = fan_alloc((n ? n : 1) * sizeof *sorted);
    size_t *order = fan_alloc((n ? n : 1) * sizeof *order);
    size_t used = 0;
    fan_status status = sorted && order ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    if (status == FAN_OK) {
        for (size_t i = 0; i < n; i++)
            sorted[i] = (slot_order){slots[i], i};
        qsort(sorted, n, sizeof *sorted, by_slot);
        for (size_t i = 0; i < n; i++)
            order[i] = sorted[i].at;
    }
    while (status == FAN_OK && used < n) {
        status = fan_value_use(&c[used].value, "add", c[used].donate, err);
        if (status == FAN_OK)
            used++;
    }
    if (status == FAN_OK)
        status = fan_buffer_add_many(core, c, slots, order, n, err);
    while (status != FAN_OK && used-- > 0) {
        if (c[used].donate)
            fan_value_returned(&c[used].value);
    }
    fan_free(order);
    fan_free(sorted);
    return status;
}

static int batch_any(buffer_object *self, const fan_batch_args *t, fan_stream *stream, bool donate,
                     bool copy)
{
    size_t n = (size_t)t->n;
    size_t made = 0;
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
        if (fan_slot_of_add(self, PyTuple_GET_ITEM(t->slots, k), "add_many(slots, gradients)",
                            &slots[made]) < 0)
            goto done;
        c[made] = (fan_contribution){.key = -1,
                                     .stream = stream,
                                     .donate = donate,
                                     .copy = copy,
                                     .value = {.dtype = FAN_DT_NONE}};
        PyObject *gradient = Py_NewRef(PyTuple_GET_ITEM(t->gradients, k));
        int bad = fan_contribution_of(self, slots[made], gradient,
                                      t->keys ? PyTuple_GET_ITEM(t->keys, k) : NULL, &c[made]);
        Py_DECREF(gradient);
        if (!bad)
            bad = fan_library_stream(&c[made].value, made ? own[made - 1] : NULL, &own[made]);
        if (bad) {
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
    Py_ssize_t i = (Py_ssize_t)k;
    Py_ssize_t at = fan_small_index(PyTuple_GET_ITEM(m->args->slots, i));
    Py_ssize_t key = -1;
    if (at < 0)
        return false;
    if (m->args->keys) {
        key = fan_small_index(PyTuple_GET_ITEM(m->args->keys, i));
        if (key < 0 || key > FAN_ENTRY_KEY_MAX)
            return false;
    }
    PyObject *gradient = PyTuple_GET_ITEM(m->args->gradients, i);
    char *data = NULL;
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
    Py_ssize_t k = (Py_ssize_t)at;
    Py_ssize_t n = m->args->n;
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
    bool donate, copy;
    if (fan_add_flags(self, a[DONATE], a[COPY], &donate, &copy) < 0)
        return NULL;
    fan_batch_args args = {.slots = NULL};
    fan_stream *stream = NULL;
    fan_error_context w = {.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
    bool added = false;
    fan_error_context_push(&w);
    int bad = batch_begin(&args, a[SLOTS], a[GRADIENTS], a[KEYS]);
    if (!bad)
        bad = fan_stream_arg(a[STREAM] ? a[STREAM] : Py_None, &stream);
    if (!bad && !stream && !copy && !self->create_graph) {
        batch_source source = {&args, self, donate};
        fan_plain_batch batch = {(size_t)args.n, self->n >= FAR,  source_read,
                                 source_again,   source_prefetch, &source};
        bad = FAN_CHECK(fan_plain_add_many(self->core, &batch, &added, &err));
    }
    if (!bad && !added)
        bad = batch_any(self, &args, stream, donate, copy);
    fan_error_context_pop(&w);
    fan_stream_drop(stream);
    Py_XDECREF(args.slots);
    Py_XDECREF(args.gradients);
    Py_XDECREF(args.keys);
    return bad ? NULL : Py_NewRef(Py_None);
}
