/* add_many: InputBuffer.add_many.
 *
 * The arguments; the general path, of any gradients; the path of plain ones; the method. */
#include "py/buffer/buffer_object.h"

#include "base/mem.h"

#include <stdlib.h>

/* batch_count_weights: there is one weight for each gradient. */
static int batch_count_weights(const fan_batch_args *args)
{
    Py_ssize_t n = PyTuple_GET_SIZE(args->weights);
    if (n == args->n)
        return 0;
    return fan_refuse(PyExc_ValueError, "expected as many weights as gradients, %zd, got %zd",
                      args->n, n);
}

static int batch_begin(fan_batch_args *args, PyObject *slots, PyObject *gradients, PyObject *keys,
                       PyObject *weights)
{
    int bare = fan_is_bare(gradients);
    if (bare < 0)
        return -1;
    if (bare) {
        return fan_refuse(
            PyExc_TypeError,
            "gradients: expected a sequence of gradients, got one %.200s: give [x, ..]",
            Py_TYPE(gradients)->tp_name);
    }
    /* Our own tuples: no other code can change them. */
    if (fan_sequence_arg(slots, "slots", &args->slots) < 0)
        return -1;
    if (fan_sequence_arg(gradients, "gradients", &args->gradients) < 0)
        return -1;
    if (fan_given(keys) && fan_sequence_arg(keys, "keys", &args->keys) < 0)
        return -1;
    if (fan_given(weights) && fan_sequence_arg(weights, "weights", &args->weights) < 0)
        return -1;
    args->n = PyTuple_GET_SIZE(args->slots);
    Py_ssize_t other = PyTuple_GET_SIZE(args->gradients);
    const char *what = "gradient";
    const char *and_keys = "";
    if (args->keys) {
        and_keys = " and keys";
        if (other == args->n) {
            other = PyTuple_GET_SIZE(args->keys);
            what = "key";
        }
    }
    if (other == args->n)
        return args->weights ? batch_count_weights(args) : 0;
    return fan_refuse(PyExc_ValueError,
                      "expected as many slots as gradients%s, got %zd slot%s and %zd %s%s",
                      and_keys, args->n, FAN_PLURAL(args->n), other, what, FAN_PLURAL(other));
}

typedef struct slot_order {
    size_t slot;
    size_t at;
} slot_order;

static int by_slot(const void *a, const void *b)
{
    const slot_order *x = a;
    const slot_order *y = b;
    if (x->slot != y->slot)
        return (x->slot > y->slot) - (x->slot < y->slot);
    return (x->at > y->at) - (x->at < y->at);
}

fan_status fan_add_many_owned(fan_buffer *core, fan_contribution *c, const size_t *slots, size_t n,
                              fan_error *err)
{
    slot_order *sorted = fan_alloc(n * sizeof *sorted);
    size_t *order = fan_alloc(n * sizeof *order);
    size_t used = 0;
    fan_status status = FAN_OK;
    if (!sorted || !order) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    } else {
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

/* batch_add: as add_on: each gradient is ready on its library's current stream, and the first of a
 * device names that of the device. */
static fan_status batch_add(fan_buffer *core, fan_contribution *c, const size_t *slots,
                            fan_stream **own, size_t n, fan_error *err)
{
    fan_status status = FAN_OK;
    size_t first = n; /* the streams from here on are pushed */
    while (status == FAN_OK && first > 0) {
        fan_stream *s = own[first - 1];
        if (s && !c[first - 1].stream)
            c[first - 1].stream = s;
        if (s)
            status = fan_stream_push(s, err);
        if (status == FAN_OK)
            first--;
    }
    if (status == FAN_OK)
        status = fan_add_many_owned(core, c, slots, n, err);
    for (; first < n; first++) {
        if (own[first])
            fan_stream_pop(own[first]);
    }
    return status;
}

static int batch_weight(const buffer_object *self, size_t slot, PyObject *weight,
                        fan_contribution *c)
{
    fan_error_context w = fan_slot_context(self, slot);
    fan_error_context_push(&w);
    int bad = fan_weight_arg(weight, "weights", &c->weight);
    fan_error_context_pop(&w);
    return bad;
}

/* batch_read: reads gradient k, and a hold on the current stream of its library. */
static int batch_read(buffer_object *self, const fan_batch_args *t, Py_ssize_t k, size_t *slot,
                      fan_contribution *c, fan_stream **own)
{
    fan_stream *last = NULL;
    PyObject *key = NULL;
    if (k)
        last = own[-1];
    if (t->keys)
        key = PyTuple_GET_ITEM(t->keys, k);
    PyObject *number = PyTuple_GET_ITEM(t->slots, k);
    if (fan_slot_of_add(self, number, "add_many(slots, gradients)", slot) < 0)
        return -1;
    PyObject *gradient = Py_NewRef(PyTuple_GET_ITEM(t->gradients, k));
    int bad = 0;
    if (t->weights)
        bad = batch_weight(self, *slot, PyTuple_GET_ITEM(t->weights, k), c);
    if (!bad)
        bad = fan_contribution_of(self, *slot, gradient, key, c);
    Py_DECREF(gradient);
    if (!bad)
        bad = fan_library_stream(&c->value, last, own);
    return bad;
}

/* batch_any: by the general path; `options`: the stream and flags of all contributions. */
static int batch_any(buffer_object *self, const fan_batch_args *t, const fan_contribution *options)
{
    size_t n = (size_t)t->n;
    fan_contribution *c = fan_calloc(n * sizeof *c);
    size_t *slots = fan_alloc(n * sizeof *slots);
    fan_memory_leave_begin();
    /* current streams of the gradients' libraries */
    fan_stream **own = fan_calloc(n * sizeof *own);
    int bad = 0;
    if (!c || !slots || !own) {
        bad = fan_no_memory();
        n = 0;
    }
    for (size_t i = 0; i < n && !bad; i++) {
        c[i] = *options;
        bad = batch_read(self, t, (Py_ssize_t)i, &slots[i], &c[i], &own[i]);
    }
    if (!bad)
        bad = FAN_CHECK(batch_add(self->core, c, slots, own, n, &err));
    for (size_t i = 0; i < n; i++) {
        if (c[i].value.form != FAN_FORM_UNDEFINED)
            fan_value_drop(&fan_python, &c[i].value);
        fan_stream_drop(own[i]);
    }
    fan_free(c);
    fan_free(slots);
    fan_free(own);
    fan_memory_leave_end();
    return bad;
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
    Py_ssize_t i = (Py_ssize_t)k;
    *slot = (size_t)fan_small_index(PyTuple_GET_ITEM(args->slots, i));
    return fan_given(PyTuple_GET_ITEM(args->gradients, i));
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
        Py_ssize_t slot = fan_small_index(PyTuple_GET_ITEM(m->args->slots, k + AHEAD));
        fan_plain_prefetch(m->self->core, (size_t)slot);
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
        COPY,
        WEIGHTS
    };
    buffer_object *self = fan_buffer_self(o);
    fan_contribution options = {
        .key = -1,
        .value = {.dtype = FAN_DT_NONE},
    };
    if (fan_add_flags(self, a[DONATE], a[COPY], &options.donate, &options.copy) < 0)
        return NULL;
    fan_batch_args args = {.slots = NULL};
    fan_error_context w = fan_buffer_context(self);
    bool added = false;
    fan_error_context_push(&w);
    int bad = batch_begin(&args, a[SLOTS], a[GRADIENTS], a[KEYS], a[WEIGHTS]);
    if (!bad)
        bad = fan_stream_arg(fan_or_none(a[STREAM]), &options.stream);
    bool may_be_plain = !options.stream && !options.copy && !self->create_graph;
    may_be_plain = may_be_plain && !args.weights;
    if (!bad && may_be_plain) {
        batch_source source = {
            .args = &args,
            .self = self,
            .donate = options.donate,
        };
        fan_plain_batch batch = {
            .n = (size_t)args.n,
            .far = self->n >= FAR,
            .read = source_read,
            .again = source_again,
            .prefetch = source_prefetch,
            .ctx = &source,
        };
        bad = FAN_CHECK(fan_plain_add_many(self->core, &batch, &added, &err));
    }
    if (!bad && !added)
        bad = batch_any(self, &args, &options);
    fan_error_context_pop(&w);
    fan_stream_drop(options.stream);
    Py_XDECREF(args.slots);
    Py_XDECREF(args.gradients);
    Py_XDECREF(args.keys);
    Py_XDECREF(args.weights);
    return fan_none_unless(bad);
}
