/* buffer: fanin.InputBuffer: its methods. */
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"

static PyObject *buffer_target(PyObject *o, PyObject *const *a)
{
    enum { SLOT, KEY, STREAM };
    buffer_object *self = fan_buffer_self(o);
    fan_error_context w = {.buffer = fan_buffer_name(self->core), .key = -1};
    fan_stream *stream = NULL;
    PyObject *target = NULL;
    int64_t key = -1;
    size_t slot;
    if (fan_slot_arg(self, a[SLOT], &slot) < 0)
        return NULL;
    w.slot = (Py_ssize_t)slot;
    w.slot_name = fan_slot_name(self, slot);
    fan_error_context_push(&w);
    if (self->create_graph)
        fan_refuse(PyExc_ValueError, "target() lends memory, and a buffer with create_graph sums by the arrays' own +");
    else if ((!a[KEY] || a[KEY] == Py_None || fan_index(a[KEY], "key", PyExc_ValueError, &key) == 0) &&
             (!a[STREAM] || fan_stream_arg(a[STREAM], &stream) == 0))
        target = fan_target_new(o, slot, key, stream);
    fan_error_context_pop(&w);
    fan_stream_drop(stream);
    return target;
}

static PyObject *buffer_expect(PyObject *o, PyObject *const *a)
{
    enum { SLOT, N };
    buffer_object *self = fan_buffer_self(o);
    fan_error_context w = {.buffer = fan_buffer_name(self->core), .key = -1};
    int64_t n = 0;
    size_t slot;
    int bad;
    if (fan_slot_arg(self, a[SLOT], &slot) < 0)
        return NULL;
    w.slot = (Py_ssize_t)slot;
    w.slot_name = fan_slot_name(self, slot);
    fan_error_context_push(&w);
    bad = fan_index(a[N], "n", PyExc_ValueError, &n);
    fan_error_context_pop(&w);
    if (bad)
        return NULL;
    return FAN_DONE(fan_buffer_expect(self->core, slot, n, &err));
}

static PyObject *buffer_ready(PyObject *o, PyObject *which)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    bool ready = false;
    size_t slot;
    if (fan_slot_arg(fan_buffer_self(o), which, &slot) < 0)
        return NULL;
    fan_error_clear(&err);
    status = fan_buffer_ready(fan_buffer_self(o)->core, slot, &ready, &err);
    if (status == FAN_OK && !ready && fan_sched_active())
        fan_sched_not_ready();
    return status == FAN_OK ? PyBool_FromLong(ready) : fan_raise(status, &err);
}

static PyObject *buffer_getitem(PyObject *o, PyObject *which)
{
    fan_value v = {.dtype = FAN_DT_NONE};
    size_t slot;
    if (fan_slot_arg(fan_buffer_self(o), which, &slot) < 0)
        return NULL;
    return FAN_CHECK(fan_buffer_snapshot(fan_buffer_self(o)->core, slot, NULL, &v, &err)) < 0 ? NULL : fan_export(&v);
}

static PyObject *buffer_stats(PyObject *o, PyObject *which)
{
    size_t slot;
    return fan_slot_arg(fan_buffer_self(o), which, &slot) < 0 ? NULL : fan_stats_wrap(fan_buffer_self(o)->core, slot);
}

static PyObject *buffer_clear(PyObject *o, PyObject *Py_UNUSED(none))
{
    return FAN_DONE(fan_buffer_clear(fan_buffer_self(o)->core, &err));
}

static PyObject *buffer_reduce_ex(PyObject *o, PyObject *Py_UNUSED(protocol))
{
    return PyErr_Format(
        PyExc_TypeError,
        "cannot pickle or copy %R: what it holds is ordered by streams of this process; take() the sums", o);
}

static Py_ssize_t buffer_length(PyObject *o) { return (Py_ssize_t)fan_buffer_self(o)->n; }

static PyObject *buffer_get_name(PyObject *o, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(fan_buffer_name(fan_buffer_self(o)->core));
}

static PyObject *buffer_get_counters(PyObject *o, void *Py_UNUSED(closure))
{
    fan_counters n;
    fan_buffer_counters(fan_buffer_self(o)->core, &n);
    return fan_counters_wrap(&n);
}

static PyObject *buffer_get_budget(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_budget_wrap(fan_buffer_budget(fan_buffer_self(o)->core));
}

/* Methods of other files. */
static int buffer_add_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **result)
{
    return fan_buffer_add_fast(o, args, nargs, kwnames, result);
}
static int buffer_take_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **result)
{
    return fan_buffer_take_fast(o, args, nargs, kwnames, result);
}
static int buffer_new_fast(PyObject *o, PyObject *const *args, size_t nargsf, PyObject *kwnames, PyObject **result)
{
    return fan_buffer_new_fast(o, args, nargsf, kwnames, result);
}
static PyObject *buffer_new(PyTypeObject *type, PyObject *const *a) { return fan_buffer_new_object(type, a); }
static PyObject *buffer_add(PyObject *o, PyObject *const *a) { return fan_buffer_add_one(o, a); }
static PyObject *buffer_add_many(PyObject *o, PyObject *const *a) { return fan_buffer_add_batch(o, a); }
static PyObject *buffer_take(PyObject *o, PyObject *const *a) { return fan_buffer_take_sums(o, a); }
static PyObject *buffer_explain(PyObject *o, PyObject *slot) { return fan_buffer_explain(o, slot); }
static PyObject *buffer_repr(PyObject *o) { return fan_buffer_repr(o); }

#include "py/declared/InputBuffer.h"

PyObject *fan_buffer_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    return buffer_new_vector_step(type, args, nargsf, kwnames);
}

/* buffer_item: for iteration, which ends at IndexError. */
static PyObject *buffer_item(PyObject *o, Py_ssize_t i)
{
    PyObject *slot = PyLong_FromSsize_t(i), *sum = slot ? buffer_getitem_step(o, slot) : NULL;
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
    {Py_tp_dealloc, fan_buffer_dealloc},
    {Py_tp_traverse, fan_buffer_traverse},
    {Py_tp_clear, fan_buffer_clear_refs},
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
