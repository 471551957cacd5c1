/* collector: the hooks of fanin.torch.accumulate. Each adds the gradient that a backward pass
 * brings to a parameter to a buffer, before it reaches .grad, which other threads of torch's read
 * and write. A dense tensor that is small, or whose slot has a sum already, is added here,
 * everything else by a function in Python. */
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"
#include "py/arrays/dlpack.h"

#include "buffer/plain.h"
#include "buffer/weights.h"

/* Items of a hook's tuple. SMALL: whether its gradients are small enough to be copied here. CAME: a
 * bytearray, a byte for each slot and one for the end of the block. COPY: the names for add,
 * without a weight and with one. NOTHING: what torch adds to .grad.
 *
 * NOW: a list; empty if no pass of the block has a weight; else the last pass that brought a
 * gradient, by the number that TASK() returns, and its weight or None. WEIGH(pass, gradient)
 * returns the weight of another pass, and sets NOW. A list of its own for each block, not for each
 * hook. */
enum {
    BUFFER,
    SLOT,
    SMALL,
    CAME,
    OTHERWISE,
    COPY,
    COPY_WEIGHTED,
    NOTHING,
    NOW,
    TASK,
    WEIGH
};

/* weight_of: the weight of the pass that runs; new reference, None: 1; NULL with an exception. */
static PyObject *weight_of(PyObject *hook, PyObject *gradient)
{
    PyObject *now = PyTuple_GET_ITEM(hook, NOW);
    if (PyList_GET_SIZE(now) == 0)
        return Py_NewRef(Py_None);
    PyObject *task = PyObject_CallNoArgs(PyTuple_GET_ITEM(hook, TASK));
    if (!task)
        return NULL;
    PyObject *weight = NULL;
    int same = 0;
    if (PyList_GET_SIZE(now) == 2)
        same = PyObject_RichCompareBool(PyList_GET_ITEM(now, 0), task, Py_EQ);
    if (same > 0)
        weight = Py_NewRef(PyList_GET_ITEM(now, 1));
    else if (!same)
        weight = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(hook, WEIGH), task, gradient, NULL);
    Py_DECREF(task);
    return weight;
}

/* plain_add: adds a copy, as others may have the gradient, or its memory, and write it. 1: done; 0:
 * it is no dense tensor, too large to be copied, or the block has ended; -1 with an exception. */
static int plain_add(PyObject *hook, PyObject *gradient, PyObject *weight)
{
    PyObject *args[] = {PyTuple_GET_ITEM(hook, SLOT), gradient, Py_True, weight};
    PyObject *names = PyTuple_GET_ITEM(hook, COPY);
    PyObject *came = PyTuple_GET_ITEM(hook, CAME);
    buffer_object *buffer = fan_buffer_self(PyTuple_GET_ITEM(hook, BUFFER));
    const fan_slot *slot = &buffer->core->slots[PyLong_AsSsize_t(args[0])];
    bool small = PyTuple_GET_ITEM(hook, SMALL) == Py_True;
    bool ended = PyByteArray_AS_STRING(came)[PyByteArray_GET_SIZE(came) - 1];
    if (ended || (!small && !fan_plain_has_sum(slot)))
        return 0;
    if (!fan_is_tensor(gradient) || !fan_plain_is_detached(gradient))
        return 0;
    if (weight != Py_None)
        names = PyTuple_GET_ITEM(hook, COPY_WEIGHTED);
    return fan_buffer_add_plain(buffer, args, names);
}

/* collect: calls `otherwise` with the slot, the gradient, the count of its references, the error
 * that there was, or None, and the weight, or None. The count is read here, because calls between
 * Python functions add references where Dynamo evaluates frames. */
static PyObject *collect(PyObject *hook, PyObject *gradients)
{
    PyObject *slot = PyTuple_GET_ITEM(hook, SLOT);
    PyObject *nothing = PyTuple_GET_ITEM(hook, NOTHING);
    if (!PyTuple_CheckExact(gradients) || PyTuple_GET_SIZE(gradients) != 1)
        return PyErr_Format(PyExc_TypeError, "collect: expected a tuple of one gradient");
    PyObject *gradient = PyTuple_GET_ITEM(gradients, 0);
    if (gradient == Py_None)
        return Py_NewRef(nothing);
    PyObject *weight = weight_of(hook, gradient);
    if (!weight)
        return NULL;
    int added = 0;
    if (!fan_sched_active())
        added = plain_add(hook, gradient, weight);
    if (added > 0) {
        PyByteArray_AS_STRING(PyTuple_GET_ITEM(hook, CAME))[PyLong_AsSsize_t(slot)] = 1;
        Py_DECREF(weight);
        return Py_NewRef(nothing);
    }
    PyObject *error = NULL;
    if (added < 0)
        error = fan_exception_take();
    PyObject *answer =
        PyObject_CallFunction(PyTuple_GET_ITEM(hook, OTHERWISE), "OOnOO", slot, gradient,
                              Py_REFCNT(gradient), fan_or_none(error), weight);
    Py_XDECREF(error);
    Py_DECREF(weight);
    if (fan_drop_result(answer) < 0)
        return NULL;
    return Py_NewRef(nothing);
}

static PyMethodDef hook_def = {"collect", collect, METH_O, NULL};

static PyObject *collectors(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    PyObject *buffer = a[0];
    PyObject *small = a[1];
    PyObject *came = a[2];
    PyObject *otherwise = a[3];
    PyObject *now = a[4];
    PyObject *task = a[5];
    PyObject *weigh = a[6];
    const fan_state *state = fan_state_get();
    if (Py_TYPE(buffer) != state->buffer_type) {
        return PyErr_Format(PyExc_TypeError, "_collectors: expected an InputBuffer, got %s",
                            FAN_TYPE_TEXT(buffer));
    }
    Py_ssize_t n = PyList_GET_SIZE(small);
    if ((size_t)n != fan_buffer_self(buffer)->n || PyByteArray_GET_SIZE(came) != n + 1)
        return PyErr_Format(PyExc_ValueError, "_collectors: expected one item for each slot");
    PyObject *copy = PyTuple_Pack(1, state->str_copy);
    PyObject *weighted = PyTuple_Pack(2, state->str_copy, state->str_weight);
    PyObject *nothing = PyTuple_Pack(1, Py_None);
    PyObject *hooks = NULL;
    if (copy && weighted && nothing)
        hooks = PyList_New(0);
    for (Py_ssize_t i = 0; hooks && i < n; i++) {
        PyObject *self = Py_BuildValue("(OnOOOOOOOOO)", buffer, i, PyList_GET_ITEM(small, i), came,
                                       otherwise, copy, weighted, nothing, now, task, weigh);
        PyObject *hook = NULL;
        if (self)
            hook = PyCFunction_New(&hook_def, self);
        Py_XDECREF(self);
        fan_list_add(&hooks, hook);
    }
    Py_XDECREF(copy);
    Py_XDECREF(weighted);
    Py_XDECREF(nothing);
    return hooks;
}

/* divisor_of: the sum of some numbers; false: the general path reports what is wrong with it. */
static bool divisor_of(const buffer_object *buffer, PyObject *parts, fan_divisor *divisor)
{
    fan_weight_sum sum = {.re = 0};
    if (fan_sched_active() || !buffer->n)
        return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); i++) {
        PyObject *part = PyTuple_GET_ITEM(parts, i);
        if (!PyFloat_CheckExact(part))
            return false;
        const fan_weight one = {
            .on = true,
            .re = PyFloat_AS_DOUBLE(part),
        };
        fan_weight_sum_add(&sum, &one, false);
    }
    return fan_divisor_of(buffer->core, 0, &sum, 0, divisor, NULL) == FAN_OK;
}

/* take_over: the sums of all slots, or of one, over a divisor. */
static PyObject *take_over(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    int64_t slot = -1;
    size_t only = 0;
    const fan_state *state = fan_state_get();
    if (Py_TYPE(a[0]) != state->buffer_type) {
        return PyErr_Format(PyExc_TypeError, "_take_over: expected an InputBuffer, got %s",
                            FAN_TYPE_TEXT(a[0]));
    }
    buffer_object *buffer = fan_buffer_self(a[0]);
    bool one = a[1] != Py_None;
    if (one && fan_slot_index(a[1], "slot", &slot) < 0)
        return NULL;
    only = (size_t)slot;
    FAN_UNINITIALIZED fan_divisor divisor;
    if (divisor_of(buffer, a[3], &divisor)) {
        PyObject *sums = fan_plain_take_over(buffer, one ? &only : NULL, a[2], &divisor);
        if (sums)
            return sums;
    }
    fan_error_context w = fan_buffer_context(buffer);
    fan_error_context_push(&w);
    const fan_take_args args = {
        .only = one ? &only : NULL,
        .slot_names = buffer->names,
        .out = a[2],
        .over = a[3],
        .mean = true,
    };
    PyObject *list = fan_take_list(buffer->core, &args);
    fan_error_context_pop(&w);
    if (one && list)
        Py_SETREF(list, Py_NewRef(PyList_GET_ITEM(list, 0)));
    return list;
}

#include "py/declared/collector.h"
