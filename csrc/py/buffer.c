/* buffer: fanin.InputBuffer: its methods, and what each does to what threads share. */
#include "py/buffer_part.h"
#include "py/turn.h"

static PyObject *buffer_target(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"slot", "key", "stream"};
    buffer_object *self = fan_buffer_self(o);
    struct {
        PyObject *slot, *key, *stream;
    } a;
    fan_error_context w = {.buffer = fan_buffer_name(self->core), .key = -1};
    fan_stream *stream = NULL;
    PyObject *target = NULL;
    int64_t key = -1;
    size_t slot;
    if (fan_parse_call("target", names, 3, 1, "slot", args, nargs, kwnames, &a.slot) < 0)
        return NULL;
    if (!a.slot)
        return PyErr_Format(PyExc_TypeError, "target() needs 'slot'");
    if (fan_slot_arg(self, a.slot, &slot) < 0)
        return NULL;
    w.slot = (Py_ssize_t)slot;
    w.slot_name = fan_slot_name(self, slot);
    fan_error_context_push(&w);
    if (self->create_graph)
        fan_refuse(PyExc_ValueError, "target() lends memory, and a buffer with create_graph sums by the arrays' own +");
    else if ((!a.key || a.key == Py_None || fan_index(a.key, "key", PyExc_ValueError, &key) == 0) &&
             (!a.stream || a.stream == Py_None || fan_stream_arg(a.stream, &stream) == 0))
        target = fan_target_new(o, slot, key, stream);
    fan_error_context_pop(&w);
    fan_stream_drop(stream);
    return target;
}

static PyObject *buffer_expect(PyObject *o, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"slot", "n", NULL};
    buffer_object *self = fan_buffer_self(o);
    PyObject *which, *count;
    fan_error_context w = {.buffer = fan_buffer_name(self->core), .key = -1};
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    int64_t n = 0;
    size_t slot;
    int bad;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:expect", names, &which, &count) ||
        fan_slot_arg(self, which, &slot) < 0)
        return NULL;
    w.slot = (Py_ssize_t)slot;
    w.slot_name = fan_slot_name(self, slot);
    fan_error_context_push(&w);
    bad = fan_index(count, "n", PyExc_ValueError, &n);
    fan_error_context_pop(&w);
    if (bad)
        return NULL;
    fan_error_clear(&err);
    status = fan_buffer_expect(self->core, slot, n, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    Py_RETURN_NONE;
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

static PyObject *buffer_snapshot(PyObject *o, PyObject *which)
{
    fan_value v = {.dtype = FAN_DT_NONE};
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    size_t slot;
    if (fan_slot_arg(fan_buffer_self(o), which, &slot) < 0)
        return NULL;
    fan_error_clear(&err);
    status = fan_buffer_snapshot(fan_buffer_self(o)->core, slot, NULL, &v, &err);
    return status == FAN_OK ? fan_export(&v) : fan_raise(status, &err);
}

static PyObject *buffer_stats(PyObject *o, PyObject *which)
{
    size_t slot;
    return fan_slot_arg(fan_buffer_self(o), which, &slot) < 0 ? NULL : fan_stats_wrap(fan_buffer_self(o)->core, slot);
}

static PyObject *buffer_clear(PyObject *o, PyObject *Py_UNUSED(none))
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    fan_error_clear(&err);
    status = fan_buffer_clear(fan_buffer_self(o)->core, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    Py_RETURN_NONE;
}

static PyObject *buffer_reduce(PyObject *o, PyObject *Py_UNUSED(protocol))
{
    return PyErr_Format(
        PyExc_TypeError,
        "cannot pickle or copy %R: what it holds is ordered by streams of this process; take() the sums", o);
}

static Py_ssize_t buffer_length(PyObject *o) { return (Py_ssize_t)fan_buffer_self(o)->n; }

static PyObject *buffer_name(PyObject *o, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(fan_buffer_name(fan_buffer_self(o)->core));
}

static PyObject *buffer_counters(PyObject *o, void *Py_UNUSED(closure))
{
    fan_counters n;
    fan_buffer_counters(fan_buffer_self(o)->core, &n);
    return fan_counters_wrap(&n);
}

/* ---- what each does to what threads share, where it takes no lock (turn.h) ---- */

static size_t slot_seen(PyObject *o)
{
    Py_ssize_t i = o ? fan_small_index(o) : -1;
    return i < 0 ? SIZE_MAX : (size_t)i;
}

static void seen_adding(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen(fan_buffer_self(o)->core, slot_seen(nargs > 0 ? args[0] : NULL), FAN_SCHED_WRITE);
}

static void seen_reading(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen(fan_buffer_self(o)->core, slot_seen(nargs > 0 ? args[0] : NULL), FAN_SCHED_READ);
}

static void seen_adding_many(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *Py_UNUSED(kwnames))
{
    PyObject *slots = nargs > 0 && (PyList_CheckExact(args[0]) || PyTuple_CheckExact(args[0])) ? args[0] : NULL;
    if (!slots)
        fan_buffer_seen(fan_buffer_self(o)->core, SIZE_MAX, FAN_SCHED_WRITE);
    for (Py_ssize_t i = 0; slots && i < PySequence_Fast_GET_SIZE(slots); i++)
        fan_buffer_seen(fan_buffer_self(o)->core, slot_seen(PySequence_Fast_GET_ITEM(slots, i)), FAN_SCHED_WRITE);
}

/* named_slot: slot=, and *out=, where nothing else is given by name; else NULL. */
static PyObject *named_slot(PyObject *const *values, PyObject *kwnames, PyObject **out)
{
    PyObject *slot = NULL;
    Py_ssize_t n = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    *out = NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        if (PyUnicode_CompareWithASCIIString(name, "slot") == 0)
            slot = values[i];
        else if (PyUnicode_CompareWithASCIIString(name, "out") == 0)
            *out = values[i];
        else
            return NULL;
    }
    return slot;
}

static void seen_taking(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *out, *slot = named_slot(args + nargs, kwnames, &out);
    fan_buffer_seen(fan_buffer_self(o)->core, slot_seen(slot), FAN_SCHED_WRITE);
    fan_sched_access(FAN_THING_HOST_MEMORY, 0, kwnames && (out || !slot) ? FAN_SCHED_WRITE : FAN_SCHED_READ); /* out= */
}

static void seen_explaining(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    seen_reading(o, args, nargs, kwnames);
    fan_buffer_seen_parked(fan_buffer_self(o)->core);
}

static void seen_all(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                     PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen(fan_buffer_self(o)->core, SIZE_MAX, FAN_SCHED_READ);
    fan_buffer_seen_parked(fan_buffer_self(o)->core);
}

static void seen_counters(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                          PyObject *Py_UNUSED(kwnames))
{
    fan_buffer_seen_counters(fan_buffer_self(o)->core);
}

FAN_TURN_FAST(fan_buffer_add_one, seen_adding)
FAN_TURN_FAST(fan_buffer_add_batch, seen_adding_many)
FAN_TURN_FAST(fan_buffer_take_sums, seen_taking)
FAN_TURN_NAMED(buffer_expect, seen_adding)
FAN_TURN_ONE(buffer_ready, seen_reading)
FAN_TURN_ONE(buffer_snapshot, seen_reading)
FAN_TURN_ONE(buffer_stats, seen_reading)
FAN_TURN_ONE(fan_buffer_explain, seen_explaining)
FAN_TURN_NONE(buffer_clear, seen_taking)
FAN_TURN_REPR(fan_buffer_repr, seen_all)
FAN_TURN_GET(buffer_counters, seen_counters)

/* buffer_item: for iteration alone: buf[slot] is asked by buffer_snapshot, which knows no negative slots either. */
static PyObject *buffer_item(PyObject *o, Py_ssize_t i)
{
    PyObject *slot = PyLong_FromSsize_t(i), *made = slot ? buffer_snapshot_turn(o, slot) : NULL;
    Py_XDECREF(slot);
    return made;
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))fan_buffer_add_one_turn, METH_FASTCALL | METH_KEYWORDS,
     "add($self, slot, gradient, *, key=None, stream=None, donate=False, copy=False)\n--\n\n"
     "Add one gradient to a slot.\n\n"
     "The gradient is an array (ndarray, torch.Tensor, jax.Array, SciPy sparse, fanin.Sparse, an array of a simulated "
     "device),\n"
     "a number, fanin.Zero, an object with its own `+`, or None: undefined, which counts and adds nothing.\n"
     "Leave it as it is until the sum is taken: the buffer may keep a reference. `copy=True` lifts that. Without "
     "`donate` it is\n"
     "never written into; with it, nobody else touches it until take(), and the sum may be written there.\n\n"
     "key: an integer from 0 on, one per edge: the sum is the left fold in key order, whoever came first. stream: the "
     "one that\n"
     "the gradient was made on. donate and copy exclude each other.\n\n"
     "Raises IndexError (slot), TypeError (no array, no stream), ValueError (shape, dtype, key, count), OverflowError "
     "(a Python int\n"
     "that does not fit int64), BufferError (an array that cannot be imported), RuntimeError (the slot is poisoned). "
     "Then all is as before.\n\n"
     ">>> buf = fanin.InputBuffer(1)\n"
     ">>> buf.add(0, np.array([1.0, 2.0]))\n"
     ">>> buf.add(0, np.array([10.0, 20.0]))\n"
     ">>> buf.take()\n"
     "[array([11., 22.])]\n"},
    {"add_many", (PyCFunction)(void (*)(void))fan_buffer_add_batch_turn, METH_FASTCALL | METH_KEYWORDS,
     "add_many($self, slots, gradients, *, keys=None, stream=None, donate=False, copy=False)\n--\n\n"
     "Add gradients[i] to slots[i] for each i, in one call: all of them or, with an error, none.\n\n"
     "slots: a sequence of ints; one slot may be there more than once. gradients: as many of what `add` takes. keys: "
     "as many ints\n"
     "(or None for each), stream, donate, copy: as `add` has them, for all.\n\n"
     "Raises what `add` raises, and ValueError where the lengths differ; then no gradient was added.\n\n"
     ">>> buf = fanin.InputBuffer(2)\n"
     ">>> buf.add_many([0, 1, 0], [np.ones(2), np.ones(3), np.ones(2)])\n"
     ">>> buf.take()\n"
     "[array([2., 2.]), array([1., 1., 1.])]\n"},
    {"target", (PyCFunction)(void (*)(void))buffer_target, METH_FASTCALL | METH_KEYWORDS,
     "target($self, slot, *, key=None, stream=None)\n--\n\n"
     "A context that lends an array, in the accumulation dtype, for a producer that adds into the slot by itself.\n\n"
     "It is the running sum where that is safe: where it is the buffer's own, `key` comes next, and the producer's "
     "stream is the\n"
     "one that sums; the slot then waits for the end. Else it holds zeros, and counts as a contribution at the end. "
     "The slot must\n"
     "declare its shape and dtype. If the body raises, zeros that were lent are dropped; a slot whose running sum was "
     "lent answers\n"
     "every call but clear() with a RuntimeError. What was lent is not to be written after the block.\n\n"
     "Raises IndexError (slot), TypeError (stream), ValueError (an undeclared slot, key, count).\n\n"
     ">>> buf = fanin.InputBuffer([np.empty(3, np.float16)])\n"
     ">>> with buf.target(0) as out:\n"
     "...     out += np.float32([1, 2, 3])\n"
     ">>> buf.take()\n"
     "[array([1., 2., 3.], dtype=float16)]\n"},
    {"expect", (PyCFunction)(void (*)(void))buffer_expect_turn, METH_VARARGS | METH_KEYWORDS,
     "expect($self, slot, n)\n--\n\n"
     "Say that each pass brings `n` contributions to a slot; this stays after take().\n\n"
     "One too many is then a ValueError at add, a missing one at take.\n\n"
     ">>> buf = fanin.InputBuffer(1)\n"
     ">>> buf.expect(0, 2)\n"
     ">>> buf.add(0, 1.0)\n"
     ">>> buf.ready(0)\n"
     "False\n"},
    {"ready", buffer_ready_turn, METH_O,
     "ready($self, slot, /)\n--\n\n"
     "Whether all contributions that were told to `expect` have come; ValueError without expect."},
    {"take", (PyCFunction)(void (*)(void))fan_buffer_take_sums_turn, METH_FASTCALL | METH_KEYWORDS,
     "take($self, stream=None, *, slot=None, out=None, scale=None, writable=False)\n--\n\n"
     "All sums, as a list with an entry for each slot, None where it is undefined; the buffer is then empty.\n\n"
     "slot: of this one alone the sum comes back, bare, and only it is empty then: one buffer can serve a whole graph. "
     "`out` is one array.\n"
     "The sums are ready to be used on `stream`; by default the buffer's, else what was current at the slot's first "
     "gradient (S5).\n"
     "A single contribution comes back as the very object that was added (of a torch tensor that requires a gradient "
     "its detach());\n"
     "`writable=True` copies what is not the buffer's alone. out: a list of arrays (or None) to write "
     "the sums into.\n"
     "scale: a number that multiplies the sums in the same pass, before the one rounding.\n\n"
     "Raises ValueError (out, scale, a contribution missing), BufferError (out cannot be written), OverflowError (a "
     "sum of Python ints\n"
     "that does not fit), RuntimeError (poisoned; from within a target of a slot).\n\n"
     ">>> buf = fanin.InputBuffer(2)\n"
     ">>> buf.add(0, np.float32([1, 2]))\n"
     ">>> buf.add(0, np.float32([3, 4]))\n"
     ">>> buf.take(scale=0.5)\n"
     "[array([2., 3.], dtype=float32), None]\n"
     ">>> buf.add(0, 1.0); buf.add(1, 2.0)\n"
     ">>> buf.take(slot=1), buf.take()\n"
     "(2.0, [1.0, None])\n"},
    {"stats", buffer_stats_turn, METH_O,
     "stats($self, slot, /)\n--\n\n"
     "What is known of the sum that was taken of a slot, until something is added to it again: a fanin.Stats; None "
     "where the sum is\n"
     "undefined, or an object. Gathered in the same pass over memory as the sum, where there is one.\n\n"
     "On a device with streams the sum leaves them there: the first call waits for the stream that summed, and "
     "blocks.\n\n"
     "Raises ValueError if the buffer was made without stats=True, or no sum was taken; CaptureError while that stream "
     "is captured, and\n"
     "of a sum that was made while it was.\n\n"
     ">>> buf = fanin.InputBuffer(1, stats=True)\n"
     ">>> buf.add(0, np.array([3.0, np.inf]), key=0)\n"
     ">>> buf.add(0, np.array([1.0, 1.0]), key=1)\n"
     ">>> _ = buf.take()\n"
     ">>> buf.stats(0)\n"
     "Stats(count=2, sumsq=16.0, absmax=4.0, nonfinite=1, first_bad_key=0)\n"},
    {"clear", buffer_clear_turn, METH_NOARGS,
     "clear($self, /)\n--\n\nEmpty it, also when it is poisoned; for passes that failed."},
    {"explain", fan_buffer_explain_turn, METH_O,
     "explain($self, slot, /)\n--\n\n"
     "What was and will be decided for a slot, in sentences with the numbers of the rules.\n\n"
     ">>> buf = fanin.InputBuffer(1, name=\"w1\")\n"
     ">>> print(buf.explain(0))\n"
     "w1: slot 0: nothing has come yet.\n"},
    {"__reduce_ex__", buffer_reduce, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *buffer_budget(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_budget_wrap(fan_buffer_budget(fan_buffer_self(o)->core));
}

static PyGetSetDef getset[] = {
    {"budget", buffer_budget, NULL,
     "Bytes of contributions that may wait to be summed: \"auto\", a number, or math.inf.", NULL},
    {"name", buffer_name, NULL, "Its name in messages, traces and pictures.", NULL},
    {"counters", buffer_counters_turn, NULL, "What it has done so far: a fanin.Counters.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(buffer_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "InputBuffer(slots, *, budget=None, accumulate=None, stats=False, stream=None, leaf=False, create_graph=False, "
     "name=None)\n--\n\n"
     "Gradients are added to its slots, from any thread and any stream; their sums are taken.\n\n"
     "slots: a count; or a sequence of example arrays, whose shape, dtype and device are taken, and of fanin.Slot.\n"
     "budget: bytes of contributions that may wait to be summed; 0 sums at each arrival, math.inf only when asked. "
     "\"auto\": what the\n"
     "buffer alone keeps alive, for whoever made it has dropped it, counts against a part of the second-level cache, "
     "and what somebody\n"
     "else holds against 64 MiB. None is what fanin.set_options says: \"auto\" at first. The bits of the sums do not "
     "depend on it.\n"
     "accumulate: the dtype in which sums run; by default float32 for float16, bfloat16 and float8, else the dtype "
     "itself. \"exact\":\n"
     "sums of floats are those of real numbers, rounded once, whatever the order (a gradient that is summed to the "
     "slot's shape is summed as ever before that). stats: `stats()` tells norms, largest elements and\n"
     "non-finite ones of what was taken, and waits for it on a device with streams. stream: the consumer's. leaf: the "
     "consumer accumulates into `.grad`. create_graph: sums are made by the arrays' own `+`, so\n"
     "that they can be differentiated. name: for messages, traces and pictures.\n\n"
     ">>> buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype=\"float32\", name=\"b1\")])\n"
     ">>> buf.add(0, np.ones((5, 2), np.float32))   # summed to the declared shape\n"
     ">>> buf.take()\n"
     "[array([5., 5.], dtype=float32)]\n"},
    {Py_tp_new, fan_buffer_new_object},
    {Py_tp_dealloc, fan_buffer_dealloc},
    {Py_tp_traverse, fan_buffer_traverse},
    {Py_tp_clear, fan_buffer_clear_refs},
    {Py_tp_repr, fan_buffer_repr_turn},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {Py_mp_length, buffer_length},
    {Py_mp_subscript, buffer_snapshot_turn},
    {Py_sq_item, buffer_item},
    {0, NULL},
};

PyType_Spec fan_buffer_spec = {
    .name = "fanin.InputBuffer",
    .basicsize = sizeof(buffer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
