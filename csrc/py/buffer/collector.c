/* collector: the hooks of fanin.torch.accumulate. Each adds the gradient that a backward pass
 * brings to a parameter to a buffer, before it reaches .grad, which other threads of torch's read
 * and write. A dense tensor that is small, or whose slot has a sum already, is added here,
 * everything else by a function in Python. */
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"
#include "py/arrays/dlpack.h"

#include "buffer/plain.h"

/* Items of a hook's tuple. SMALL: whether its gradients are small enough to be copied here. CAME: a
 * bytearray, a byte for each slot and one for the end of the block. COPY: the names for add.
 * NOTHING: what goes on to .grad. */
enum {
    BUFFER,
    SLOT,
    SMALL,
    CAME,
    OTHERWISE,
    COPY,
    NOTHING
};

/* plain_add: adds a copy, as others may have the gradient, or its memory, and write it. 1: done; 0:
 * it is no dense tensor, too large to be copied, or the block has ended; -1 with an exception. */
static int plain_add(PyObject *hook, PyObject *gradient)
{
    PyObject *args[] = {PyTuple_GET_ITEM(hook, SLOT), gradient, Py_True};
    PyObject *came = PyTuple_GET_ITEM(hook, CAME);
    buffer_object *buffer = fan_buffer_self(PyTuple_GET_ITEM(hook, BUFFER));
    const fan_slot *slot = &buffer->core->slots[PyLong_AsSsize_t(args[0])];
    bool small = PyTuple_GET_ITEM(hook, SMALL) == Py_True;
    bool ended = PyByteArray_AS_STRING(came)[PyByteArray_GET_SIZE(came) - 1];
    if (ended || (!small && !fan_plain_has_sum(slot)))
        return 0;
    if (!fan_is_tensor(gradient) || !fan_plain_is_detached(gradient))
        return 0;
    return fan_buffer_add_plain(buffer, args, PyTuple_GET_ITEM(hook, COPY));
}

/* collect: calls `otherwise` with the slot, the gradient, the count of its references, and the
 * error that there was, or None. The count is read here, because calls between Python functions add
 * references where Dynamo evaluates frames. */
static PyObject *collect(PyObject *hook, PyObject *gradients)
{
    PyObject *slot = PyTuple_GET_ITEM(hook, SLOT);
    PyObject *nothing = PyTuple_GET_ITEM(hook, NOTHING);
    if (!PyTuple_CheckExact(gradients) || PyTuple_GET_SIZE(gradients) != 1)
        return PyErr_Format(PyExc_TypeError, "collect: expected a tuple of one gradient");
    PyObject *gradient = PyTuple_GET_ITEM(gradients, 0);
    if (gradient == Py_None)
        return Py_NewRef(nothing);
    int added = 0;
    if (!fan_sched_active())
        added = plain_add(hook, gradient);
    if (added > 0) {
        PyByteArray_AS_STRING(PyTuple_GET_ITEM(hook, CAME))[PyLong_AsSsize_t(slot)] = 1;
        return Py_NewRef(nothing);
    }
    PyObject *error = NULL;
    if (added < 0)
        error = fan_exception_take();
    PyObject *answer = PyObject_CallFunction(PyTuple_GET_ITEM(hook, OTHERWISE), "OOnO", slot,
                                             gradient, Py_REFCNT(gradient), fan_or_none(error));
    Py_XDECREF(error);
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
    const fan_state *state = fan_state_get();
    if (Py_TYPE(buffer) != state->buffer_type)
        return PyErr_Format(PyExc_TypeError, "_collectors: expected an InputBuffer, got %s",
                            FAN_TYPE_TEXT(buffer));
    Py_ssize_t n = PyList_GET_SIZE(small);
    if ((size_t)n != fan_buffer_self(buffer)->n || PyByteArray_GET_SIZE(came) != n + 1)
        return PyErr_Format(PyExc_ValueError, "_collectors: expected one item for each slot");
    PyObject *copy = PyTuple_Pack(1, state->str_copy);
    PyObject *nothing = PyTuple_Pack(1, Py_None);
    PyObject *hooks = NULL;
    if (copy && nothing)
        hooks = PyList_New(0);
    for (Py_ssize_t i = 0; hooks && i < n; i++) {
        PyObject *self = Py_BuildValue("(OnOOOOO)", buffer, i, PyList_GET_ITEM(small, i), came,
                                       otherwise, copy, nothing);
        PyObject *hook = NULL;
        if (self)
            hook = PyCFunction_New(&hook_def, self);
        Py_XDECREF(self);
        fan_list_add(&hooks, hook);
    }
    Py_XDECREF(copy);
    Py_XDECREF(nothing);
    return hooks;
}

#include "py/declared/collector.h"
