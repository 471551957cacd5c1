/* buffer: the buffer of the C API: csrc/buffer with a frontend that needs no interpreter, or an
 * InputBuffer of Python.
 *
 * An object of this frontend is an unboxed array (objects.h), or LENT: memory that stays the
 * caller's, of which the entry keeps the address alone. A small add is a plain entry
 * (buffer/plain.h), so it allocates nothing.
 *
 * The lock of an InputBuffer is the interpreter's, which each call takes. It gets values of the
 * core alone: a view is copied at once, because Python's frontend has no LENT.
 *
 * In this order: the frontend; the begin and the end of a call; new and free; add; add_many; take;
 * target; the rest. */
#include "py/api/api.h"
#include "py/base/api_lock.h"
#include "py/buffer/buffer_object.h"

#include "array/sum.h"
#include "base/mem.h"

#include <math.h>
#include <stdlib.h>

struct fanin_buffer {
    fan_api_lock lock;
    fan_buffer *core;
    size_t nplain;      /* slots that take plain entries of this file: all; 0 of an InputBuffer */
    PyObject *python;   /* held: the InputBuffer whose core this is; NULL: made by buffer_new */
    atomic_size_t uses; /* the owner, until buffer_free, and each open target */
};

struct fanin_target {
    fanin_buffer *buffer;
    fan_target t;
};

static const uint64_t lent; /* its address is even */
#define LENT ((void *)(uintptr_t)&lent)

/* ---- the frontend ---- */

static void api_hold(void *object)
{
    if (object != LENT)
        fan_array_hold(fan_unboxed_array(object));
}

static void api_drop(void *object)
{
    if (object != LENT)
        fan_array_drop(fan_unboxed_array(object));
}

static bool api_drop_if_shared(void *object)
{
    return object == LENT || fan_unboxed_drop_if_shared(object);
}

static bool api_unshared(void *object)
{
    return object != LENT && fan_unboxed_is_unique(object);
}

static bool api_alone(void *object, const fan_value *v)
{
    (void)v;
    if (object == LENT)
        return false;
    const fan_array *a = fan_unboxed_array(object);
    if (atomic_load_explicit(&a->refs, memory_order_relaxed) != 1)
        return false;
    return atomic_load_explicit(&a->storage->refs, memory_order_relaxed) == 1;
}

static bool api_lent(const void *object, const fan_value *v)
{
    if (!v)
        return object == LENT;
    return v->form == FAN_FORM_DENSE && fan_api_is_lent(v->array);
}

static bool api_is_unchanged(void *object, const fan_plain_kind *kind, const char *data)
{
    (void)object;
    (void)kind;
    (void)data;
    return true; /* an array of the core does not change */
}

static bool api_writable(void *object, const fan_plain_kind *kind)
{
    (void)kind;
    return object != LENT && fan_unboxed_array(object)->writable;
}

/* api_fresh: in the order of the kind's axes. */
static void *api_fresh(void *like, const fan_plain_kind *kind, char **data)
{
    int64_t strides[FAN_PLAIN_NDIM];
    int64_t shape[FAN_PLAIN_NDIM];
    fan_array layout = {
        .dtype = kind->dtype,
        .ndim = kind->ndim,
        .shape = shape,
        .strides = strides,
    };
    const fan_array *order = NULL;
    fan_array *a;
    (void)like;
    memcpy(shape, kind->shape, sizeof shape);
    if (kind->order) {
        fan_plain_strides(kind, (int64_t)fan_dtype_size(kind->dtype), strides);
        order = &layout;
    }
    if (fan_array_new(kind->dtype, kind->ndim, shape, order, &a, NULL) != FAN_OK)
        return NULL;
    *data = a->data;
    return fan_unboxed(a);
}

static void *api_copy(void *of, const fan_plain_kind *kind, char **data)
{
    const char *from = *data;
    void *made = api_fresh(of, kind, data);
    if (made && fan_plain_bytes(kind)) /* an empty array may have no address */
        memcpy(*data, from, (size_t)fan_plain_bytes(kind));
    return made;
}

static fan_status api_plain_value(void *object, char *data, const fan_plain_kind *kind,
                                  fan_value *out, bool *kept, fan_error *err)
{
    int64_t shape[FAN_PLAIN_NDIM];
    int64_t strides[FAN_PLAIN_NDIM];
    fan_array *a;
    *kept = false;
    if (object != LENT) {
        *out = fan_unboxed_value(object);
        return FAN_OK;
    }
    memcpy(shape, kind->shape, sizeof shape);
    fan_plain_strides(kind, (int64_t)fan_dtype_size(kind->dtype), strides);
    FAN_TRY(fan_api_lend(data, kind->dtype, kind->ndim, shape, strides, &a, err));
    *out = fan_value_dense(a, fan_cpu());
    out->origin = FAN_FROM_NDARRAY;
    return FAN_OK;
}

/* Entries of a kind that is checked at use, numbers, and arrays of libraries that count writes do
 * not occur. */
static const fan_plain_frontend plain_frontend = {
    .hold = api_hold,
    .drop_if_shared = api_drop_if_shared,
    .is_unchanged = api_is_unchanged,
    .unshared = api_unshared,
    .writable = api_writable,
    .fresh = api_fresh,
    .copy = api_copy,
};

static const fan_frontend frontend = {
    .hold = api_hold,
    .drop = api_drop,
    .unshared = api_unshared,
    .alone = api_alone,
    .lent = api_lent,
    .plain_value = api_plain_value,
    .allow_threads_begin = fan_allow_threads_begin,
    .allow_threads_end = fan_allow_threads_end,
    .plain = &plain_frontend,
};

/* ---- calls ---- */

/* A call in progress. */
typedef struct api_call {
    fanin_buffer *b;
    fan_error *err;
    fan_api_place was; /* where the thread was before */
    fan_gil gil;       /* of an InputBuffer's */
    bool turn;         /* a turn of a simulated machine's thread (base/thread.h, Calls and turns) */
} api_call;

/* call_begin: enters the buffer, and reports that the call does so to a slot (SIZE_MAX: to all).
 * call_end: leaves it, and then calls the releases that the call put off. */
static fan_status call_begin(fanin_buffer *b, size_t slot, fan_sched_mode mode, api_call *call,
                             fan_error *err)
{
    fan_error_clear(err);
    call->b = b;
    call->err = err;
    call->turn = fan_sched_active();
    if (call->turn && !fan_sched_enter())
        return fan_fail(err, FAN_ERR_STATE, "the machine ends this run");
    if (b->python && !fan_gil_enter(&call->gil)) {
        if (call->turn)
            fan_sched_leave();
        return fan_fail(err, FAN_ERR_STATE, "the interpreter of this InputBuffer has ended");
    }
    if (b->python)
        call->was = fan_api_releases_begin();
    else
        call->was = fan_api_enter(&b->lock, fan_api_this_thread());
    if (!call->turn)
        return FAN_OK;
    fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_READ);
    fan_buffer_seen(b->core, slot, mode);
    return FAN_OK;
}

/* exception_to_text: takes the live exception off a thread that had no interpreter, and so cannot
 * keep it: the caller gets its text. */
static void exception_to_text(fan_error *err)
{
    PyObject *e = fan_exception_take();
    if (!e)
        return;
    PyObject *text = PyObject_Str(e);
    const char *utf8 = NULL;
    if (text)
        utf8 = PyUnicode_AsUTF8(text);
    if (!utf8)
        utf8 = "its text cannot be read";
    (void)fan_fail(err, FAN_ERR_EXTERN, "%s: %s", Py_TYPE(e)->tp_name, utf8);
    PyErr_Clear();
    Py_XDECREF(text);
    Py_DECREF(e);
}

static void call_end(api_call *call, fan_status status)
{
    if (!call->b->python) {
        fan_api_exit(&call->b->lock, fan_api_this_thread(), call->was);
    } else {
        if (status == FAN_ERR_EXTERN && call->gil.taken)
            exception_to_text(call->err);
        fan_api_here.place = call->was; /* as fan_gil_enter found it */
        fan_gil_leave(&call->gil);
    }
    if (call->turn)
        fan_sched_leave();
    fan_api_releases_end(call->was);
}

/* ---- new, free ---- */

/* dtype_of: the dtype in a struct of the caller's. */
static fan_status dtype_of(fanin_dtype d, const char *what, fan_dtype *out, fan_error *err)
{
    *out = (fan_dtype)d;
    if ((unsigned)d >= FAN_DT_COUNT)
        return fan_fail(err, FAN_ERR_TYPE, "%s: there is no dtype %d", what, (int)d);
    return FAN_OK;
}

/* not_exact: refuses an accumulation dtype beside an exact sum. */
static fan_status not_exact(bool exact, const char *what, fan_error *err)
{
    if (!exact)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_VALUE, "%s: expected one of accumulate and exact, got both", what);
}

#define SLOT_FLAGS                                                                     \
    (FANIN_SLOT_SHAPE | FANIN_SLOT_DTYPE | FANIN_SLOT_DEVICE | FANIN_SLOT_ACCUMULATE | \
     FANIN_SLOT_EXACT)

static fan_status slot_shape(const fanin_slot *slot, fan_slot_spec *out, fan_error *err)
{
    int64_t size;
    if (slot->ndim > 0 && !slot->shape) {
        return fan_fail(err, FAN_ERR_VALUE, "fanin_slot: expected a shape of %d extents, got NULL",
                        (int)slot->ndim);
    }
    out->ndim = slot->ndim;
    out->shape = slot->shape;
    return fan_shape_check(slot->ndim, slot->shape, 16, &size, err);
}

/* slot_spec: reads the declaration of a slot; the caller drops the device. */
static fan_status slot_spec(const fanin_slot *given, fan_slot_spec *out, fan_error *err)
{
    fanin_slot slot;
    *out = (fan_slot_spec){
        .dtype = FAN_DT_NONE,
        .accumulate = FAN_DT_NONE,
    };
    FAN_TRY(fan_api_options(given, sizeof slot, sizeof slot, "fanin_slot", &slot, err));
    FAN_TRY(fan_api_flags(slot.declares, SLOT_FLAGS, "fanin_slot", err));
    out->name = slot.name;
    out->has_shape = slot.declares & FANIN_SLOT_SHAPE;
    out->exact = slot.declares & FANIN_SLOT_EXACT;
    if (out->has_shape)
        FAN_TRY(slot_shape(&slot, out, err));
    if (slot.declares & FANIN_SLOT_DTYPE)
        FAN_TRY(dtype_of(slot.dtype, "fanin_slot", &out->dtype, err));
    if (slot.declares & FANIN_SLOT_ACCUMULATE) {
        FAN_TRY(not_exact(out->exact, "fanin_slot", err));
        FAN_TRY(dtype_of(slot.accumulate, "fanin_slot", &out->accumulate, err));
    }
    if (slot.declares & FANIN_SLOT_DEVICE)
        FAN_TRY(fan_api_device(slot.device_type, slot.device_id, &out->device, err));
    return FAN_OK;
}

/* More than a slot takes: the product with their number cannot wrap */
#define MAX_SLOT_BYTES 4096
#define BUFFER_FLAGS \
    (FANIN_BUFFER_LEAF | FANIN_BUFFER_STATS | FANIN_BUFFER_ACCUMULATE | FANIN_BUFFER_EXACT)

static fan_status buffer_config(const fanin_buffer_options *o, fan_buffer_config *c, fan_error *err)
{
    FAN_TRY(fan_api_flags(o->flags, BUFFER_FLAGS, "fanin_buffer_options", err));
    c->name = o->name;
    c->budget = o->budget;
    if (o->budget == FANIN_BUDGET_AUTO)
        c->budget = FAN_BUDGET_AUTO;
    else if (o->budget == FANIN_BUDGET_EAGER)
        c->budget = 0;
    c->leaf = o->flags & FANIN_BUFFER_LEAF;
    c->stats = o->flags & FANIN_BUFFER_STATS;
    c->exact = o->flags & FANIN_BUFFER_EXACT;
    if (o->flags & FANIN_BUFFER_ACCUMULATE) {
        FAN_TRY(not_exact(c->exact, "fanin_buffer_options", err));
        FAN_TRY(dtype_of(o->accumulate, "fanin_buffer_options", &c->accumulate, err));
    }
    return fan_api_stream(o->stream, NULL, &c->stream, err);
}

/* specs_read: reads the declarations of all slots; the caller drops their devices and frees *out,
 * on failure, too. NULL: none are given. */
static fan_status specs_read(const fanin_slot *given, size_t slots, fan_slot_spec **out,
                             fan_error *err)
{
    if (!given || !slots)
        return FAN_OK;
    fan_slot_spec *specs = *out = fan_calloc(slots * sizeof *specs);
    if (!specs)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    /* each is as long as its author's version had it */
    const char *at = (const char *)given;
    for (size_t i = 0; i < slots; i++) {
        FAN_TRY(slot_spec((const void *)at, &specs[i], err));
        at += given->struct_size;
    }
    return FAN_OK;
}

static fan_status buffer_init(fanin_buffer *b, size_t slots, const fanin_buffer_options *options,
                              fan_error *err)
{
    fan_buffer_config config = {
        .slots = slots,
        .budget = FAN_BUDGET_AUTO,
        .accumulate = FAN_DT_NONE,
        .frontend = &frontend,
    };
    fanin_buffer_options o;
    fan_slot_spec *specs = NULL;
    FAN_TRY(fan_api_options(options, sizeof o, sizeof o, "fanin_buffer_options", &o, err));
    if (slots > PTRDIFF_MAX / MAX_SLOT_BYTES)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu slots", slots);
    fan_status status = buffer_config(&o, &config, err);
    if (status == FAN_OK)
        status = specs_read(o.slots, slots, &specs, err);
    if (status == FAN_OK) {
        config.specs = specs;
        status = fan_buffer_new(&config, &b->core, err);
    }
    b->nplain = slots;
    b->uses = 1;
    for (size_t i = 0; specs && i < slots; i++)
        fan_device_drop(specs[i].device);
    fan_free(specs);
    fan_stream_drop(config.stream);
    return status;
}

fanin_status fan_api_buffer_new(size_t slots, const fanin_buffer_options *options,
                                fanin_buffer **out, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    fanin_buffer *b = fan_calloc(sizeof *b);
    bool locked = b && fan_api_lock_init(&b->lock) == 0;
    fan_api_place was = fan_api_releases_begin();
    fan_error_clear(&err);
    if (locked)
        status = buffer_init(b, slots, options, &err);
    else if (b)
        status = fan_fail(&err, FAN_ERR_STATE, "a lock could not be made");
    else
        status = fan_fail(&err, FAN_ERR_NOMEM, "out of memory");
    if (status != FAN_OK) {
        if (locked)
            fan_api_lock_fini(&b->lock);
        fan_free(b);
        b = NULL;
    }
    *out = b;
    fan_api_releases_end(was);
    return fan_api_fail(why, status, &err);
}

/* buffer_done: one use less; the last one ends the buffer. */
static void buffer_done(fanin_buffer *b)
{
    FAN_UNINITIALIZED fan_gil gil;
    if (atomic_fetch_sub_explicit(&b->uses, 1, memory_order_acq_rel) != 1)
        return;
    fan_api_place was = fan_api_releases_begin();
    if (!b->python) {
        fan_buffer_free(b->core);
        fan_api_lock_fini(&b->lock);
    } else if (fan_gil_enter(&gil)) {
        Py_DECREF(b->python);
        fan_gil_leave(&gil);
    }
    fan_free(b);
    fan_api_releases_end(was);
}

void fan_api_buffer_free(fanin_buffer *b)
{
    if (b)
        buffer_done(b);
}

fanin_buffer *fan_api_buffer_of_python(fanin_object *object)
{
    PyObject *o = (PyObject *)object;
    if (!o || !PyObject_TypeCheck(o, fan_state_get()->buffer_type)) {
        return (fanin_buffer *)PyErr_Format(
            PyExc_TypeError, "buffer_of_python: expected a fanin.InputBuffer, got %s",
            o ? FAN_TYPE_TEXT(o) : "NULL");
    }
    if (fan_buffer_self(o)->create_graph) {
        return (fanin_buffer *)PyErr_Format(
            PyExc_TypeError,
            "buffer_of_python: a buffer with create_graph=True sums by the arrays' own "
            "+: add to it in Python");
    }
    fanin_buffer *b = fan_calloc(sizeof *b);
    if (!b)
        return (fanin_buffer *)PyErr_NoMemory();
    b->core = fan_buffer_of(o);
    b->python = Py_NewRef(o);
    b->uses = 1;
    return b;
}

fanin_object *fan_api_buffer_to_python(fanin_buffer *b)
{
    if (b->python)
        return (fanin_object *)Py_NewRef(b->python);
    return (fanin_object *)PyErr_Format(
        PyExc_TypeError,
        "buffer_to_python: %s was made by buffer_new, and Python has no object of it: "
        "make a fanin.InputBuffer, and its fanin_buffer by buffer_of_python",
        fan_buffer_name(b->core));
}

/* ---- add ---- */

#define DONATE_AND_COPY (FANIN_ADD_DONATE | FANIN_ADD_COPY)
#define PLAIN_FLAGS (FANIN_ADD_KEY | DONATE_AND_COPY)
#define ADD_FLAGS (PLAIN_FLAGS | FANIN_ADD_WEIGHT)
/* The structs without weights, as they were first. */
#define ADD_OPTIONS_LEAST offsetof(fanin_add_options, weight)
#define GRADIENT_LEAST offsetof(fanin_gradient, weight)

/* add_options: the checked options of an add; keyed: with its key. */
static fan_status add_options(const fanin_add_options *given, bool keyed, fanin_add_options *o,
                              fan_error *err)
{
    FAN_TRY(fan_api_options(given, ADD_OPTIONS_LEAST, sizeof *o, "fanin_add_options", o, err));
    FAN_TRY(fan_api_flags(o->flags, ADD_FLAGS, "fanin_add_options", err));
    FAN_TRY(fan_api_reserved(o->reserved, "fanin_add_options", err));
    if (keyed && o->flags & FANIN_ADD_KEY && o->key < 0) {
        return fan_fail(err, FAN_ERR_VALUE, "key: expected a non-negative integer, got %lld",
                        (long long)o->key);
    }
    if ((o->flags & DONATE_AND_COPY) == DONATE_AND_COPY) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "FANIN_ADD_DONATE gives the memory away, FANIN_ADD_COPY keeps it yours: "
                        "give one of them");
    }
    return FAN_OK;
}

/* weight_of: W4: a weight that the caller gave. */
static fan_status weight_of(double re, double im, fan_weight *out, fan_error *err)
{
    *out = (fan_weight){
        .on = true,
        .re = re,
        .im = im,
    };
    if (isfinite(re) && isfinite(im))
        return FAN_OK;
    return fan_fail(err, FAN_ERR_VALUE, "weight: expected a finite number, got %.12g%+.12gj (W4)",
                    re, im);
}

/* key_of: the key of an add; -1: it has none. */
static inline int64_t key_of(const fanin_add_options *o)
{
    if (o->flags & FANIN_ADD_KEY)
        return o->key;
    return -1;
}

/* view_plain: the kind and the address of a plain entry of a view; false: it is none, as of memory
 * with gaps, which an entry cannot describe. */
static inline bool view_plain(const fanin_tensor *t, uint32_t flags, fan_plain_kind *kind,
                              char **data)
{
    if (flags & FANIN_ADD_DONATE)
        return false;
    if (!fan_dl_plain(fan_api_tensor(t), false, kind, data))
        return false;
    if (kind->order && (uintptr_t)*data % fan_dtype_size(kind->dtype))
        return false;
    kind->origin = FAN_FROM_NDARRAY;
    kind->check_at_use = false;
    return true;
}

/* options_are_plain: whether options are none but key, donate and copy, with values that are
 * taken. */
static inline bool options_are_plain(const fanin_add_options *o)
{
    bool known = o->struct_size == sizeof *o || o->struct_size == ADD_OPTIONS_LEAST;
    if (!known || o->flags & ~PLAIN_FLAGS)
        return false;
    if (o->reserved || o->stream)
        return false;
    if (o->flags & FANIN_ADD_KEY && (o->key < 0 || o->key > FAN_ENTRY_KEY_MAX))
        return false;
    return (o->flags & DONATE_AND_COPY) != DONATE_AND_COPY;
}

/* object_of: the frontend's object for a gradient; NULL: it is undefined. */
static inline void *object_of(const fanin_tensor *view, const fanin_value *value)
{
    if (view)
        return LENT;
    if (!value || !value->array)
        return NULL;
    return fan_unboxed(fan_c_array(value));
}

/* add_plain: the plain entry of a gradient, both NULL: undefined; false: it, or its options, are
 * for the general path. */
static inline bool add_plain(const fanin_tensor *view, const fanin_value *value,
                             const fanin_add_options *o, fan_plain_kind *kind, fan_entry *one)
{
    uint32_t flags = 0;
    int64_t key = -1;
    void *object = object_of(view, value);
    char *data = NULL;
    if (o) {
        if (!options_are_plain(o))
            return false;
        flags = o->flags;
        key = key_of(o);
    }
    if (view) {
        if (!view_plain(view, flags, kind, &data))
            return false;
    } else if (object) {
        if (value->device_type > FAN_DL_CPU)
            return false;
        if (!fan_unboxed_plain(object, kind, &data))
            return false;
    }
    *one = fan_entry_of(object, data, key, false, false);
    /* bits that are written one by one delay the next read of the entry */
    if (object && flags & FANIN_ADD_DONATE)
        one->donated = true;
    if (object && flags & FANIN_ADD_COPY)
        one->copy = true;
    return true;
}

/* origin_on: the kind of array that Python gets for a sum. */
static uint8_t origin_on(const fan_device *d)
{
    if (d->backend->has_streams)
        return FAN_FROM_DEVICE_ARRAY;
    return FAN_FROM_NDARRAY;
}

/* contribution_of: a gradient for the general path; c->value and c->stream are the caller's to
 * drop. */
static fan_status contribution_of(const fanin_buffer *b, const fanin_tensor *view,
                                  const fanin_value *value, const fanin_add_options *o,
                                  fan_contribution *c, fan_error *err)
{
    fan_array *a = NULL;
    fan_device *d = fan_cpu();
    if (value)
        d = fan_api_device_of(value);
    bool donate = o->flags & FANIN_ADD_DONATE;
    *c = (fan_contribution){
        .key = key_of(o),
        .donate = donate,
        .copy = o->flags & FANIN_ADD_COPY,
        .value = {.dtype = FAN_DT_NONE},
    };
    if (b->python && view && !donate)
        c->copy = true;
    if (o->flags & FANIN_ADD_WEIGHT)
        FAN_TRY(weight_of(o->weight, o->weight_imag, &c->weight, err));
    if (view)
        FAN_TRY(fan_api_view(view, !donate, &a, err));
    else if (value && value->array)
        a = fan_array_hold(fan_c_array(value));
    if (a) {
        c->value = fan_value_dense(a, d);
        c->value.origin = origin_on(d);
    }
    return fan_api_stream(o->stream, d, &c->stream, err);
}

static void contribution_drop(fan_contribution *c)
{
    fan_value_drop(&frontend, &c->value); /* an array or nothing: no frontend's object */
    fan_stream_drop(c->stream);
}

/* add_checked: a contribution whose options are checked. plain: the plain entry of it; NULL: it has
 * none. */
static fan_status add_checked(fanin_buffer *b, size_t slot, const fan_plain_kind *kind,
                              fan_entry *plain, fan_contribution *c, fan_error *err)
{
    FAN_UNINITIALIZED api_call call;
    bool added = false;
    FAN_TRY(call_begin(b, slot, FAN_SCHED_WRITE, &call, err));
    fan_status status = FAN_OK;
    if (plain) { /* a scheduled thread has not tried it yet */
        if (!plain->object)
            kind = NULL;
        status = fan_plain_add(b->core, slot, kind, plain, &added, err);
    }
    if (!added && status == FAN_OK)
        status = fan_add_owned(b->core, slot, c, err);
    call_end(&call, status);
    return status;
}

static fan_status add_any(fanin_buffer *b, size_t slot, const fanin_tensor *view,
                          const fanin_value *value, const fanin_add_options *given, fan_error *err)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    fan_entry one;
    fan_entry *plain = NULL;
    fan_contribution c = {.value = {.dtype = FAN_DT_NONE}};
    fanin_add_options o;
    if (slot < b->nplain && add_plain(view, value, given, &kind, &one))
        plain = &one;
    fan_api_place was = fan_api_releases_begin();
    fan_error_clear(err);
    fan_status status = add_options(given, true, &o, err);
    if (status == FAN_OK)
        status = contribution_of(b, view, value, &o, &c, err);
    if (status == FAN_OK)
        status = add_checked(b, slot, &kind, plain, &c, err);
    contribution_drop(&c);
    fan_api_releases_end(was);
    return status;
}

static inline __attribute__((always_inline)) fanin_status add_one(fanin_buffer *b, size_t slot,
                                                                  const fanin_tensor *view,
                                                                  const fanin_value *value,
                                                                  const fanin_add_options *o,
                                                                  fanin_failure *why)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    FAN_UNINITIALIZED fan_error err;
    fan_entry one;
    fan_status status = FAN_OK;
    bool added = false;
    if (!fan_sched_active() && slot < b->nplain && add_plain(view, value, o, &kind, &one)) {
        fan_error_clear(&err);
        fan_api_thread *here = fan_api_this_thread();
        fan_api_place was = fan_api_enter(&b->lock, here);
        status = fan_plain_add(b->core, slot, one.object ? &kind : NULL, &one, &added, &err);
        fan_api_exit(&b->lock, here, was);
        if (__builtin_expect(here->first != NULL, 0))
            fan_api_releases_run();
        if (added && status == FAN_OK)
            return FANIN_OK;
    }
    if (status == FAN_OK)
        status = add_any(b, slot, view, value, o, &err);
    return fan_api_fail(why, status, &err);
}

fanin_status fan_api_buffer_add(fanin_buffer *b, size_t slot, const fanin_tensor *gradient,
                                const fanin_add_options *options, fanin_failure *why)
{
    return add_one(b, slot, gradient, NULL, options, why);
}

fanin_status fan_api_buffer_add_value(fanin_buffer *b, size_t slot, const fanin_value *gradient,
                                      const fanin_add_options *options, fanin_failure *why)
{
    return add_one(b, slot, NULL, gradient, options, why);
}

/* ---- add_many ---- */

/* gradient_at: the k-th of an array, whose items have the size of their author's version. */
static const fanin_gradient *gradient_at(const fanin_gradient *all, size_t k)
{
    return (const void *)((const char *)all + k * all->struct_size);
}

typedef struct many {
    const fanin_gradient *all;
    fanin_add_options o;
    size_t nslots;
} many;

static bool many_read(void *ctx, size_t k, size_t *slot, fan_plain_kind *kind, fan_entry *one)
{
    many *m = ctx;
    const fanin_gradient *g = gradient_at(m->all, k);
    m->o.key = g->key;
    *slot = g->slot;
    if (g->slot >= m->nslots)
        return false;
    if (m->o.flags & FANIN_ADD_COPY)
        return false;
    if (g->view && g->value)
        return false;
    return add_plain(g->view, g->value, &m->o, kind, one);
}

static void *many_again(void *ctx, size_t k, size_t *slot)
{
    const many *m = ctx;
    const fanin_gradient *g = gradient_at(m->all, k);
    *slot = g->slot;
    return object_of(g->view, g->value);
}

/* many_any: for the general path, inside the buffer. */
static fan_status many_any(fanin_buffer *b, many *m, fan_contribution *c, size_t *slots, size_t n,
                           fan_error *err)
{
    for (size_t k = 0; k < n; k++) {
        const fanin_gradient *g = gradient_at(m->all, k);
        m->o.key = g->key;
        if (g->view && g->value) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "gradient %zu: expected a view or a value, got both", k);
        }
        if (m->o.flags & FANIN_ADD_KEY && g->key < 0) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "gradient %zu: key: expected a non-negative integer, got %lld", k,
                            (long long)g->key);
        }
        slots[k] = g->slot;
        if (m->o.flags & FANIN_ADD_WEIGHT) {
            m->o.weight = g->weight;
            m->o.weight_imag = g->weight_imag;
        }
        FAN_TRY(contribution_of(b, g->view, g->value, &m->o, &c[k], err));
    }
    return fan_add_many_owned(b->core, c, slots, n, err);
}

static fan_status add_many(fanin_buffer *b, many *m, size_t n, fan_error *err)
{
    fan_plain_batch batch = {
        .n = n,
        .read = many_read,
        .again = many_again,
        .ctx = m,
    };
    bool added = false;
    fan_status status;
    if (!m->o.stream)
        FAN_TRY(fan_plain_add_many(b->core, &batch, &added, err));
    if (added)
        return FAN_OK;
    fan_contribution *c = fan_calloc(n * sizeof *c);
    size_t *slots = fan_alloc(n * sizeof *slots);
    for (size_t k = 0; c && k < n; k++)
        c[k].value.dtype = FAN_DT_NONE;
    if (c && slots)
        status = many_any(b, m, c, slots, n, err);
    else
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t k = 0; c && k < n; k++)
        contribution_drop(&c[k]);
    fan_free(c);
    fan_free(slots);
    return status;
}

/* add_many_check: checks the options and the size of each gradient. */
static fan_status add_many_check(many *m, size_t n, const fanin_add_options *options,
                                 fan_error *err)
{
    fanin_gradient g;
    FAN_TRY(add_options(options, false, &m->o, err));
    m->o.struct_size = sizeof m->o;
    size_t least = GRADIENT_LEAST;
    if (m->o.flags & FANIN_ADD_WEIGHT)
        least = sizeof g;
    if (n && !m->all)
        return fan_fail(err, FAN_ERR_VALUE, "buffer_add_many: expected %zu gradients, got NULL", n);
    for (size_t k = 0; k < n; k++) {
        FAN_TRY(
            fan_api_options(gradient_at(m->all, k), least, sizeof g, "fanin_gradient", &g, err));
    }
    return FAN_OK;
}

fanin_status fan_api_buffer_add_many(fanin_buffer *b, const fanin_gradient *gradients, size_t n,
                                     const fanin_add_options *options, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    FAN_UNINITIALIZED api_call call;
    many m = {
        .all = gradients,
        .nslots = b->nplain,
    };
    fan_error_clear(&err);
    fan_status status = add_many_check(&m, n, options, &err);
    if (status != FAN_OK || !n)
        return fan_api_fail(why, status, &err);
    status = call_begin(b, SIZE_MAX, FAN_SCHED_WRITE, &call, &err);
    if (status == FAN_OK) {
        status = add_many(b, &m, n, &err);
        call_end(&call, status);
    }
    return fan_api_fail(why, status, &err);
}

/* ---- take ---- */

#define TAKE_FLAGS (FANIN_TAKE_WRITABLE | FANIN_TAKE_SCALE | FANIN_TAKE_MEAN | FANIN_TAKE_WEIGHTS)
#define TAKE_OPTIONS_LEAST offsetof(fanin_take_options, weights) /* without weights */
#define TAKE_FEW 8

/* One take: of all slots, or of one. */
typedef struct api_take {
    fan_take options;
    fan_buffer *core;
    fan_span span;
    size_t n;
    fan_array **outs;      /* held; NULL: none */
    fan_value *out_values; /* of the general path, borrowed from outs */
    void **results;
    void *few_results[TAKE_FEW];
} api_take;

static fan_plain_where take_out_at(void *ctx, size_t slot, const fan_plain_kind *kind,
                                   void **object, char **data, uint64_t *bytes)
{
    const api_take *t = ctx;
    FAN_UNINITIALIZED fan_plain_kind is;
    fan_array *a = t->outs[slot - t->span.first];
    if (!a)
        return FAN_PLAIN_NOWHERE;
    if (!fan_unboxed_plain(fan_unboxed(a), &is, data))
        return FAN_PLAIN_REFUSED;
    if (kind && !fan_plain_same(&is, kind))
        return FAN_PLAIN_REFUSED;
    *object = fan_unboxed(fan_array_hold(a));
    *bytes = fan_plain_bytes(&is);
    return FAN_PLAIN_THERE;
}

/* device_near: the device of the buffer's stream; NULL: it has none. */
static fan_device *device_near(const fanin_buffer *b)
{
    if (!b->core->stream)
        return NULL;
    return b->core->stream->device;
}

/* take_outs: reads the caller's memory for the sums. */
static fan_status take_outs(const fanin_tensor *const *out, api_take *t, fan_error *err)
{
    t->outs = fan_calloc(t->n * sizeof *t->outs);
    t->out_values = fan_calloc(t->n * sizeof *t->out_values);
    if (!t->outs || !t->out_values)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < t->n; i++) {
        t->out_values[i].dtype = FAN_DT_NONE;
        if (!out[i])
            continue;
        FAN_TRY(fan_api_out(out[i], "out", &t->outs[i], err));
        t->out_values[i] = fan_value_dense(t->outs[i], fan_cpu());
        t->out_values[i].origin = FAN_FROM_NDARRAY;
    }
    t->options.out = t->out_values;
    return FAN_OK;
}

static int late_by_key(const void *a, const void *b)
{
    const fan_late_weight *x = a;
    const fan_late_weight *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

/* take_weights: W5: the weights of the call, sorted by key; in memory that take_end frees. */
static fan_status take_weights(const fanin_take_options *o, fan_take *options, fan_error *err)
{
    size_t n = o->nweights;
    if (n && !o->weights)
        return fan_fail(err, FAN_ERR_VALUE, "weights: expected %zu of them, got NULL", n);
    fan_late_weight *late = fan_calloc((n + 1) * sizeof *late);
    if (!late)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    options->late = late;
    options->nlate = n;
    for (size_t i = 0; i < n; i++) {
        const fanin_weight *given = &o->weights[i];
        late[i].key = given->key;
        FAN_TRY(weight_of(given->weight, given->weight_imag, &late[i].weight, err));
    }
    qsort(late, n, sizeof *late, late_by_key);
    for (size_t i = 1; i < n; i++) {
        long long key = late[i].key;
        if (key == late[i - 1].key)
            return fan_fail(err, FAN_ERR_VALUE, "weights: key %lld is there twice (W5)", key);
    }
    return FAN_OK;
}

static fan_status take_prepare(fanin_buffer *b, const fanin_take_options *given, api_take *t,
                               fan_error *err)
{
    fanin_take_options o;
    fan_take *options = &t->options;
    FAN_TRY(fan_api_options(given, TAKE_OPTIONS_LEAST, sizeof o, "fanin_take_options", &o, err));
    FAN_TRY(fan_api_flags(o.flags, TAKE_FLAGS, "fanin_take_options", err));
    FAN_TRY(fan_api_reserved(o.reserved, "fanin_take_options", err));
    options->writable = o.flags & FANIN_TAKE_WRITABLE;
    options->real = true;
    if (o.flags & FANIN_TAKE_SCALE) {
        options->scale.on = true;
        options->scale.re = o.scale;
        options->scale.im = o.scale_imag;
        options->real = o.scale_imag == 0;
        fan_scale_finish(options);
    }
    options->mean = o.flags & FANIN_TAKE_MEAN;
    if (o.flags & FANIN_TAKE_WEIGHTS)
        FAN_TRY(take_weights(&o, options, err));
    if (t->n > TAKE_FEW)
        t->results = fan_alloc(t->n * sizeof *t->results);
    if (!t->results)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    memset(t->results, 0, t->n * sizeof *t->results);
    FAN_TRY(fan_api_stream(o.stream, device_near(b), &options->stream, err));
    if (o.out)
        FAN_TRY(take_outs(o.out, t, err));
    return FAN_OK;
}

/* dense_sum: FAN_ERR_TYPE of a sum that only Python can have; `call` begins the message. */
static fan_status dense_sum(fan_buffer *core, size_t slot, const fan_value *sum, const char *call,
                            fan_error *err)
{
    if (sum->form == FAN_FORM_UNDEFINED || sum->form == FAN_FORM_DENSE)
        return FAN_OK;
    return fan_fail_at(err, FAN_ERR_TYPE, 0, fan_slot_place(core, slot, -1),
                       "%s: the sum is no dense array: take it in Python, by InputBuffer.take",
                       call);
}

/* take_show: refuses a sum before the take empties a slot. */
static fan_status take_show(void *ctx, size_t slot, const fan_value *sum, fan_error *err)
{
    const api_take *t = ctx;
    if (!sum)
        return FAN_OK;
    return dense_sum(t->core, t->span.first + slot, sum, "take", err);
}

/* unboxed_show: the value of an unboxed array, or an undefined one of NULL. */
static void unboxed_show(void *object, fanin_value *out)
{
    fan_array *a = NULL;
    if (object)
        a = fan_unboxed_array(object);
    fan_c_show(a, out);
}

/* take_run: a take inside the buffer: by the plain way, else by the general one. */
static fan_status take_run(fanin_buffer *b, api_take *t, fanin_value *sums, fan_error *err)
{
    fan_plain_outs places = {take_out_at, t};
    const fan_plain_outs *outs = NULL;
    if (t->outs)
        outs = &places;
    bool plain = !b->python && !t->options.stream;
    plain = plain && !t->options.late;
    if (plain && fan_plain_take(b->core, t->span, &t->options, outs, t->results)) {
        for (size_t i = 0; i < t->n; i++)
            unboxed_show(t->results[i], &sums[i]);
        return FAN_OK;
    }
    fan_value *values = fan_calloc(t->n * sizeof *values);
    if (!values)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < t->n; i++)
        values[i].dtype = FAN_DT_NONE;
    if (b->python) {
        t->options.show = take_show;
        t->options.ctx = t;
    }
    fan_status status = fan_buffer_take(b->core, &t->options, values, err);
    for (size_t i = 0; i < t->n; i++) {
        if (status == FAN_OK && values[i].form == FAN_FORM_DENSE)
            fan_api_show(fan_array_hold(values[i].array), values[i].device, &sums[i]);
        fan_value_drop(b->core->frontend, &values[i]);
    }
    fan_free(values);
    return status;
}

static fanin_status take_some(fanin_buffer *b, fan_span span, bool one,
                              const fanin_take_options *options, fanin_value *sums,
                              fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    FAN_UNINITIALIZED api_take t;
    FAN_UNINITIALIZED api_call call;
    t.options = (fan_take){
        .one = one,
        .slot = span.first,
    };
    t.core = b->core;
    t.span = span;
    t.n = span.end - span.first;
    t.outs = NULL;
    t.out_values = NULL;
    t.results = t.few_results;
    fan_api_place was = fan_api_releases_begin();
    fan_error_clear(&err);
    for (size_t i = 0; i < t.n; i++)
        fan_c_show(NULL, &sums[i]);
    fan_status status = take_prepare(b, options, &t, &err);
    if (status == FAN_OK)
        status = call_begin(b, one ? span.first : SIZE_MAX, FAN_SCHED_WRITE, &call, &err);
    if (status == FAN_OK) {
        status = take_run(b, &t, sums, &err);
        call_end(&call, status);
    }
    for (size_t i = 0; t.outs && i < t.n; i++)
        fan_array_drop(t.outs[i]);
    fan_free(t.outs);
    fan_free(t.options.late);
    fan_free(t.out_values);
    if (t.results != t.few_results)
        fan_free(t.results);
    fan_stream_drop(t.options.stream);
    fan_api_releases_end(was);
    return fan_api_fail(why, status, &err);
}

fanin_status fan_api_buffer_take(fanin_buffer *b, const fanin_take_options *options,
                                 fanin_value *sums, size_t n, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    size_t slots = b->core->nslots;
    if (n == slots)
        return take_some(b, (fan_span){0, n}, false, options, sums, why);
    /* n may count bytes, or be no number of sums at all */
    for (size_t i = 0; i < n && i < slots; i++)
        fan_c_show(NULL, &sums[i]);
    fan_error_clear(&err);
    fan_status status = fan_fail_at(&err, FAN_ERR_VALUE, 0, fan_buffer_place(b->core),
                                    "take: expected room for %zu sum%s, one for each slot, got %zu",
                                    slots, FAN_PLURAL(slots), n);
    return fan_api_fail(why, status, &err);
}

fanin_status fan_api_buffer_take_one(fanin_buffer *b, size_t slot,
                                     const fanin_take_options *options, fanin_value *sum,
                                     fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    fan_status status = fan_slot_check(b->core, slot, &err);
    if (status == FAN_OK)
        return take_some(b, (fan_span){slot, slot + 1}, true, options, sum, why);
    fan_c_show(NULL, sum);
    return fan_api_fail(why, status, &err);
}

static fan_status snapshot_run(fanin_buffer *b, size_t slot, fan_stream *s, fanin_value *sum,
                               fan_error *err)
{
    FAN_UNINITIALIZED api_call call;
    fan_value v = {.dtype = FAN_DT_NONE};
    FAN_TRY(call_begin(b, slot, FAN_SCHED_WRITE, &call, err));
    fan_status status = fan_buffer_snapshot(b->core, slot, s, &v, err);
    if (status == FAN_OK)
        status = dense_sum(b->core, slot, &v, "snapshot", err);
    if (status == FAN_OK && v.form == FAN_FORM_DENSE)
        fan_api_show(fan_array_hold(v.array), v.device, sum);
    fan_value_drop(b->core->frontend, &v);
    call_end(&call, status);
    return status;
}

fanin_status fan_api_buffer_snapshot(fanin_buffer *b, size_t slot, const fanin_stream *stream,
                                     fanin_value *sum, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_stream *s = NULL;
    fan_api_place was = fan_api_releases_begin();
    fan_c_show(NULL, sum);
    fan_error_clear(&err);
    fan_status status = fan_api_stream(stream, device_near(b), &s, &err);
    if (status == FAN_OK)
        status = snapshot_run(b, slot, s, sum, &err);
    fan_stream_drop(s);
    fan_api_releases_end(was);
    return fan_api_fail(why, status, &err);
}

/* ---- target ---- */

static fan_status target_open(fanin_buffer *b, size_t slot, const fanin_add_options *options,
                              fan_target *out, fan_error *err)
{
    FAN_UNINITIALIZED api_call call;
    fanin_add_options o;
    fan_stream *stream;
    fan_weight weight = {.on = false};
    FAN_TRY(add_options(options, true, &o, err));
    if (o.flags & FANIN_ADD_WEIGHT)
        FAN_TRY(weight_of(o.weight, o.weight_imag, &weight, err));
    FAN_TRY(fan_api_stream(o.stream, NULL, &stream, err));
    fan_status status = call_begin(b, slot, FAN_SCHED_WRITE, &call, err);
    if (status == FAN_OK) {
        status =
            fan_buffer_target(b->core, slot, key_of(&o), stream, FAN_DT_NONE, &weight, out, err);
        call_end(&call, status);
    }
    fan_stream_drop(stream);
    return status;
}

fanin_status fan_api_buffer_target(fanin_buffer *b, size_t slot, const fanin_add_options *options,
                                   fanin_target **out, fanin_value *lent_value, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    fanin_target *t = fan_calloc(sizeof *t);
    fan_api_place was = fan_api_releases_begin();
    fan_c_show(NULL, lent_value);
    *out = NULL;
    fan_error_clear(&err);
    if (t)
        status = target_open(b, slot, options, &t->t, &err);
    else
        status = fan_fail(&err, FAN_ERR_NOMEM, "out of memory");
    fan_api_releases_end(was);
    if (status == FAN_OK) {
        t->buffer = b;
        atomic_fetch_add_explicit(&b->uses, 1, memory_order_relaxed);
        fan_api_show(t->t.array, t->t.device, lent_value);
        *out = t;
    } else {
        fan_free(t);
    }
    return fan_api_fail(why, status, &err);
}

fanin_status fan_api_target_end(fanin_target *t, int good, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fanin_buffer *b = t->buffer;
    FAN_UNINITIALIZED api_call call;
    fan_status status = call_begin(b, t->t.slot, FAN_SCHED_WRITE, &call, &err);
    if (status == FAN_OK) {
        status = fan_buffer_target_end(b->core, &t->t, good != 0, origin_on(t->t.device), &err);
        call_end(&call, status);
        fan_free(t);
        buffer_done(b);
    }
    return fan_api_fail(why, status, &err);
}

/* ---- the rest ---- */

fanin_status fan_api_buffer_expect(fanin_buffer *b, size_t slot, int64_t n, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    FAN_UNINITIALIZED api_call call;
    fan_status status = call_begin(b, slot, FAN_SCHED_WRITE, &call, &err);
    if (status == FAN_OK) {
        status = fan_buffer_expect(b->core, slot, n, &err);
        call_end(&call, status);
    }
    return fan_api_fail(why, status, &err);
}

fanin_status fan_api_buffer_ready(fanin_buffer *b, size_t slot, int *ready, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    FAN_UNINITIALIZED api_call call;
    bool is = false;
    fan_status status = call_begin(b, slot, FAN_SCHED_READ, &call, &err);
    if (status == FAN_OK) {
        status = fan_buffer_ready(b->core, slot, &is, &err);
        if (!is)
            fan_sched_not_ready();
        call_end(&call, status);
    }
    *ready = is;
    return fan_api_fail(why, status, &err);
}

fanin_status fan_api_buffer_clear(fanin_buffer *b, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    FAN_UNINITIALIZED api_call call;
    fan_status status = call_begin(b, SIZE_MAX, FAN_SCHED_WRITE, &call, &err);
    if (status == FAN_OK) {
        status = fan_buffer_clear(b->core, &err);
        call_end(&call, status);
    }
    return fan_api_fail(why, status, &err);
}

/* result_size: checks the size of a struct that the call fills in. */
static fan_status result_size(size_t given, size_t least, size_t size, const char *what,
                              fan_error *err)
{
    if (given < least || given > size) {
        return fan_fail(err, FAN_ERR_VALUE, "%s: struct_size: expected sizeof(%s), %zu, got %zu",
                        what, what, size, given);
    }
    return FAN_OK;
}

/* STATS_LEAST: the bytes of fanin_stats in a header that ends before its norm. */
#define STATS_LEAST offsetof(fanin_stats, norm)

fanin_status fan_api_buffer_stats(fanin_buffer *b, size_t slot, fanin_stats *out,
                                  fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    FAN_UNINITIALIZED api_call call;
    size_t size = out->struct_size;
    bool some = false;
    bool bad = false;
    int64_t key = -1;
    fan_stats s;
    fan_error_clear(&err);
    fan_status status = result_size(size, STATS_LEAST, sizeof *out, "fanin_stats", &err);
    if (status == FAN_OK)
        status = call_begin(b, slot, FAN_SCHED_READ, &call, &err);
    if (status == FAN_OK) {
        status = fan_buffer_stats(b->core, slot, &some, &s, &bad, &key, &err);
        call_end(&call, status);
    }
    if (status != FAN_OK)
        return fan_api_fail(why, status, &err);
    fanin_stats whole = {.struct_size = size, .first_bad_key = -1};
    if (some) {
        if (bad)
            whole.first_bad_key = key;
        whole.count = s.count;
        whole.sumsq = fan_stats_sumsq(&s);
        whole.absmax = s.absmax;
        whole.nonfinite = s.nonfinite;
        whole.defined = 1;
        whole.has_bad = bad;
        whole.norm = fan_stats_norm(&s);
    }
    memcpy(out, &whole, size);
    return FANIN_OK;
}

fanin_status fan_api_buffer_counters(fanin_buffer *b, fanin_counters *out, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    FAN_UNINITIALIZED api_call call;
    fan_counters n;
    fan_error_clear(&err);
    fan_status status =
        result_size(out->struct_size, sizeof *out, sizeof *out, "fanin_counters", &err);
    if (status == FAN_OK)
        status = call_begin(b, SIZE_MAX, FAN_SCHED_READ, &call, &err);
    if (status == FAN_OK) {
        if (call.turn)
            fan_buffer_seen_counters(b->core);
        fan_buffer_counters(b->core, &n);
        call_end(&call, status);
#define X(name) out->name = n.name;
        FAN_COUNTER_LIST(X)
#undef X
    }
    return fan_api_fail(why, status, &err);
}

#define X(name) +1
_Static_assert(0 FANIN_COUNTERS(X) == 0 FAN_COUNTER_LIST(X),
               "fanin.h lists the counters as the core does");
#undef X

/* explain_read: reads a slot; *poisoned: a copy of the reason, NULL: none or out of memory. */
static fan_status explain_read(fanin_buffer *b, size_t slot, fan_slot_view *v,
                               fan_item_view **items, char **poisoned, fan_error *err)
{
    FAN_UNINITIALIZED api_call call;
    FAN_TRY(call_begin(b, slot, FAN_SCHED_WRITE, &call, err));
    fan_status status = fan_slot_look(b->core, slot, v, items, err);
    if (status == FAN_OK && v->poisoned) {
        *poisoned = fan_alloc(strlen(v->poisoned) + 1);
        if (*poisoned)
            strcpy(*poisoned, v->poisoned);
    }
    call_end(&call, status);
    return status;
}

static PyObject *str_of(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

fanin_object *fan_api_buffer_explain(fanin_buffer *b, size_t slot)
{
    fan_slot_view v;
    fan_item_view *items = NULL;
    char *poisoned = NULL;
    PyObject *text = NULL;
    PyObject *slot_name = NULL;
    if (FAN_CHECK(explain_read(b, slot, &v, &items, &poisoned, &err)) < 0)
        return NULL;
    if (poisoned)
        v.poisoned = poisoned;
    else if (v.poisoned)
        v.poisoned = "out of memory for the reason";
    const char *name = b->core->slots[slot].spec->name;
    if (name)
        slot_name = str_of(name);
    PyErr_Clear();
    PyObject *buffer = str_of(fan_buffer_name(b->core));
    const char *utf8 = NULL;
    if (buffer)
        utf8 = PyUnicode_AsUTF8(buffer);
    if (utf8)
        text = fan_slot_text(utf8, slot, slot_name, &v, items);
    Py_XDECREF(buffer);
    Py_XDECREF(slot_name);
    fan_free(poisoned);
    fan_free(items);
    return (fanin_object *)text;
}
