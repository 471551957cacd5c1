/* collector: the hooks of fanin.torch.accumulate: what a backward pass left in a parameter's .grad is added to a
 * buffer. Only what the fast path adds is done here; all else is Python's to do, and to say. */
#include "py/buffer_part.h"
#include "py/dlpack.h"

/* What a hook has: a tuple of these. NAMES: those of what add is told by name; None: nothing, False: add is Python's.
 */
enum { BUFFER, SLOT, CAME, OTHERWISE, NAMES, ITEMS };

/* plain_add: 1: the gradient of `p` is in the buffer; 0: it is not for this way, or there is none (*none); -1 with an
 * exception. */
static int plain_add(PyObject *hook, PyObject *p, bool *none)
{
    const fan_state *st = fan_state_get();
    PyObject *names = PyTuple_GET_ITEM(hook, NAMES), *grad = PyObject_GetAttr(p, st->str_grad);
    PyObject *args[] = {PyTuple_GET_ITEM(hook, SLOT), grad, Py_True};
    int added = grad ? 0 : -1;
    *none = grad == Py_None;
    if (grad && !*none && names != Py_False && fan_is_tensor(st, grad) && fan_fast_is_detached(grad)) {
        Py_INCREF(grad); /* .grad has it still: it is not the buffer's alone */
        added =
            fan_buffer_fast_add(fan_buffer_self(PyTuple_GET_ITEM(hook, BUFFER)), args, names == Py_None ? NULL : names);
        Py_DECREF(grad);
    }
    if (added > 0 && PyObject_SetAttr(p, st->str_grad, Py_None) < 0)
        added = -1;
    Py_XDECREF(grad);
    return added;
}

/* collect: `otherwise` is called with the slot, the parameter, and the error that there was, or None. */
static PyObject *collect(PyObject *hook, PyObject *p)
{
    PyObject *slot = PyTuple_GET_ITEM(hook, SLOT), *otherwise = PyTuple_GET_ITEM(hook, OTHERWISE);
    bool none = false;
    int added = fan_sched_active() ? 0 : plain_add(hook, p, &none);
    if (added > 0)
        PyByteArray_AS_STRING(PyTuple_GET_ITEM(hook, CAME))[PyLong_AsSsize_t(slot)] = 1;
    if (added > 0 || none)
        Py_RETURN_NONE;
    PyObject *error = added < 0 ? fan_exception_take() : Py_NewRef(Py_None);
    PyObject *answer = PyObject_CallFunctionObjArgs(otherwise, slot, p, error, NULL);
    Py_XDECREF(error);
    return answer;
}

static PyMethodDef hook_def = {"collect", collect, METH_O, NULL};

/* hook_new: for one slot. */
static PyObject *hook_new(PyObject *buffer, Py_ssize_t i, PyObject *donate, PyObject *came, PyObject *otherwise)
{
    const fan_state *st = fan_state_get();
    PyObject *slot = PyLong_FromSsize_t(i);
    PyObject *names = donate == Py_True    ? PyTuple_Pack(1, st->str_donate)
                      : donate == Py_False ? Py_NewRef(Py_None)
                                           : Py_NewRef(Py_False);
    PyObject *self = slot && names ? PyTuple_Pack(ITEMS, buffer, slot, came, otherwise, names) : NULL;
    PyObject *hook = self ? PyCFunction_New(&hook_def, self) : NULL;
    Py_XDECREF(slot);
    Py_XDECREF(names);
    Py_XDECREF(self);
    return hook;
}

static PyObject *collectors(PyObject *Py_UNUSED(m), PyObject *args)
{
    PyObject *buffer, *donate, *came, *otherwise, *hooks;
    if (!PyArg_ParseTuple(args, "O!O!O!O:_collectors", fan_state_get()->buffer_type, &buffer, &PyList_Type, &donate,
                          &PyByteArray_Type, &came, &otherwise))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(donate);
    if ((size_t)n != fan_buffer_self(buffer)->n || PyByteArray_GET_SIZE(came) != n)
        return PyErr_Format(PyExc_ValueError, "_collectors: expected one item for each slot");
    hooks = PyList_New(n);
    for (Py_ssize_t i = 0; hooks && i < n; i++) {
        PyObject *hook = hook_new(buffer, i, PyList_GET_ITEM(donate, i), came, otherwise);
        if (hook)
            PyList_SET_ITEM(hooks, i, hook);
        else
            Py_CLEAR(hooks);
    }
    return hooks;
}

PyMethodDef fan_collector_functions[] = {
    {"_collectors", collectors, METH_VARARGS,
     "_collectors(buffer, donate, came, otherwise, /)\n--\n\nThe hooks of fanin.torch.accumulate, one for each slot: "
     "each adds its parameter's gradient, donated or not (None: not by itself), notes that in `came`, and leaves what "
     "is not plain to `otherwise`."},
    {NULL, NULL, 0, NULL},
};
