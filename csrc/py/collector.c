/* collector: the hooks of fanin.torch.accumulate: what a backward pass brings to a parameter is added to a buffer, and
 * does not reach its .grad, which torch's other threads read and write meanwhile. Only what the fast path adds is done
 * here; all else is Python's to do, and to say. */
#include "py/buffer_part.h"
#include "py/dlpack.h"

/* What a hook has: a tuple of these. ALONE, SHARED: what add is told by name of a gradient that nobody else has, and of
 * others; None: nothing, False: add is Python's. USES: torch counts so many of one that nobody else has. NOTHING: what
 * goes on to .grad. */
enum { BUFFER, SLOT, CAME, OTHERWISE, ALONE, SHARED, USES, NOTHING };

/* is_alone: whether nobody has a gradient but the pass and its hook: what torch lets .grad take over. */
static bool is_alone(PyObject *hook, PyObject *gradient)
{
    if (Py_REFCNT(gradient) != 1)
        return false;
    PyObject *uses = PyObject_CallMethodNoArgs(gradient, fan_state_get()->str_use_count);
    bool alone = uses && PyObject_RichCompareBool(uses, PyTuple_GET_ITEM(hook, USES), Py_EQ) > 0;
    Py_XDECREF(uses);
    PyErr_Clear();
    return alone;
}

/* plain_add: 1: the gradient is in the buffer; 0: it is not for this way; -1 with an exception. */
static int plain_add(PyObject *hook, PyObject *gradient, bool alone)
{
    PyObject *names = PyTuple_GET_ITEM(hook, alone ? ALONE : SHARED);
    PyObject *args[] = {PyTuple_GET_ITEM(hook, SLOT), gradient, Py_True};
    if (names == Py_False || !fan_is_tensor(fan_state_get(), gradient) || !fan_fast_is_detached(gradient))
        return 0;
    Py_INCREF(gradient); /* the pass has it still: it is not the buffer's alone */
    int added =
        fan_buffer_fast_add(fan_buffer_self(PyTuple_GET_ITEM(hook, BUFFER)), args, names == Py_None ? NULL : names);
    Py_DECREF(gradient);
    return added;
}

/* collect: `otherwise` is called with the slot, the gradient, whether it is alone, and the error that there was, or
 * None. */
static PyObject *collect(PyObject *hook, PyObject *gradients)
{
    PyObject *slot = PyTuple_GET_ITEM(hook, SLOT), *nothing = PyTuple_GET_ITEM(hook, NOTHING);
    if (!PyTuple_CheckExact(gradients) || PyTuple_GET_SIZE(gradients) != 1)
        return PyErr_Format(PyExc_TypeError, "collect: expected a tuple of one gradient");
    PyObject *gradient = PyTuple_GET_ITEM(gradients, 0);
    if (gradient == Py_None)
        return Py_NewRef(nothing);
    bool alone = is_alone(hook, gradient);
    int added = fan_watched() ? 0 : plain_add(hook, gradient, alone);
    if (added > 0) {
        PyByteArray_AS_STRING(PyTuple_GET_ITEM(hook, CAME))[PyLong_AsSsize_t(slot)] = 1;
        return Py_NewRef(nothing);
    }
    PyObject *error = added < 0 ? fan_exception_take() : Py_NewRef(Py_None);
    PyObject *answer = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(hook, OTHERWISE), slot, gradient,
                                                    alone ? Py_True : Py_False, error, NULL);
    Py_XDECREF(error);
    if (!answer)
        return NULL;
    Py_DECREF(answer);
    return Py_NewRef(nothing);
}

static PyMethodDef hook_def = {"collect", collect, METH_O, NULL};

static PyObject *collectors(PyObject *Py_UNUSED(m), PyObject *args)
{
    PyObject *buffer, *donate, *uses, *came, *otherwise, *hooks;
    const fan_state *st = fan_state_get();
    if (!PyArg_ParseTuple(args, "O!O!OO!O:_collectors", st->buffer_type, &buffer, &PyList_Type, &donate, &uses,
                          &PyByteArray_Type, &came, &otherwise))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(donate);
    if ((size_t)n != fan_buffer_self(buffer)->n || PyByteArray_GET_SIZE(came) != n)
        return PyErr_Format(PyExc_ValueError, "_collectors: expected one item for each slot");
    PyObject *donated = PyTuple_Pack(1, st->str_donate), *copied = PyTuple_Pack(1, st->str_copy);
    PyObject *nothing = PyTuple_Pack(1, Py_None);
    hooks = donated && copied && nothing ? PyList_New(n) : NULL;
    for (Py_ssize_t i = 0; hooks && i < n; i++) {
        PyObject *how = PyList_GET_ITEM(donate, i), *alone = how == Py_True   ? donated
                                                             : how == Py_None ? Py_False
                                                                              : Py_None;
        PyObject *self = Py_BuildValue("(OnOOOOOO)", buffer, i, came, otherwise, alone,
                                       how == Py_None ? Py_False : copied, uses, nothing);
        PyObject *hook = self ? PyCFunction_New(&hook_def, self) : NULL;
        Py_XDECREF(self);
        if (hook)
            PyList_SET_ITEM(hooks, i, hook);
        else
            Py_CLEAR(hooks);
    }
    Py_XDECREF(donated);
    Py_XDECREF(copied);
    Py_XDECREF(nothing);
    return hooks;
}

PyMethodDef fan_collector_functions[] = {
    {"_collectors", collectors, METH_VARARGS,
     "_collectors(buffer, donate, uses, came, otherwise, /)\n--\n\nThe hooks of fanin.torch.accumulate, one for each "
     "slot: each adds the gradient that comes to its parameter, donated or not (None: not by itself) where nobody else "
     "has it (torch counts so many `uses`), else a copy, notes that in `came`, and leaves what is not plain to "
     "`otherwise`. Nothing goes on to the parameter."},
    {NULL, NULL, 0, NULL},
};
