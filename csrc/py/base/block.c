/* block: a context manager whose end runs whatever happens. Python raises KeyboardInterrupt where
 * it calls or returns, the first line of an __exit__ in Python included; between these functions
 * and a subclass's _begin() and _end(error) it cannot. An interruption of _end(error) is raised
 * when _end(error) is complete: it runs again, so each of its steps can be repeated. */
#include "py/base/args.h"

static bool block_interrupts(PyObject *raised)
{
    return !PyErr_GivenExceptionMatches(raised, PyExc_Exception);
}

int fan_block_end(PyObject *block, PyObject *error)
{
    PyObject *interrupt = NULL;
    PyObject *cause = Py_NewRef(fan_or_none(error));
    PyObject *raised = NULL;
    bool again = true;
    while (again) {
        PyObject *done = PyObject_CallMethodOneArg(block, fan_state_get()->str_end, cause);
        Py_XDECREF(done);
        raised = fan_exception_take();
        again = raised && raised != cause && block_interrupts(raised);
        if (again) {
            Py_SETREF(cause, Py_NewRef(raised));
            Py_XSETREF(interrupt, raised);
        }
    }
    Py_DECREF(cause);
    if (interrupt)
        Py_XSETREF(raised, interrupt);
    if (!raised)
        return 0;
    fan_exception_put(raised);
    return -1;
}

PyObject *fan_block_begin(PyObject *block)
{
    PyObject *result = PyObject_CallMethodNoArgs(block, fan_state_get()->str_begin);
    if (result)
        return result;
    PyObject *error = fan_exception_take();
    if (fan_block_end(block, error) < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) {
        Py_DECREF(error);
        return NULL;
    }
    fan_exception_put(error);
    return NULL;
}

static PyObject *block_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    return fan_block_begin(o);
}

static PyObject *block_exit(PyObject *o, PyObject *const *a)
{
    if (fan_block_end(o, a[1]) < 0)
        return NULL;
    Py_RETURN_FALSE;
}

#include "py/declared/Block.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)block_doc},
    {Py_tp_methods, block_methods},
    {0, NULL},
};

PyType_Spec fan_block_spec = {
    .name = "fanin._core.Block",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
