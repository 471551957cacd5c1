/* deleters: a deleter that waits for a thread which enters the interpreter, and calls of the C API
 * with an exception set. */
#include <Python.h>
#include <fanin.h>

#include <pthread.h>

static const fanin_api *api;
static long calls;  /* of the deleter */
static long locked; /* .. with the interpreter's lock: to wait would be to wait for ever */

static void *enter_and_leave(void *unused)
{
    PyGILState_Release(PyGILState_Ensure());
    return unused;
}

/* waits_for_python: the deleter, of a tensor or of a context. */
static void waits_for_python(void *any)
{
    pthread_t other;
    (void)any;
    calls++;
    if (PyGILState_Check()) {
        locked++;
    } else if (pthread_create(&other, NULL, enter_and_leave, NULL) == 0) {
        (void)pthread_join(other, NULL);
    }
}

static PyObject *deleter(PyObject *m, PyObject *none)
{
    (void)m, (void)none;
    return PyLong_FromVoidPtr((void *)waits_for_python);
}

/* counts(): (calls, locked) since the last time. */
static PyObject *counts(PyObject *m, PyObject *none)
{
    (void)m, (void)none;
    PyObject *both = Py_BuildValue("(ll)", calls, locked);
    calls = locked = 0;
    return both;
}

/* drop_failing(value): drops a value while a KeyError is set, as code that cleans up does; returns
 * what is set then. */
static PyObject *drop_failing(PyObject *m, PyObject *value)
{
    PyObject *type, *error, *trace;
    (void)m;
    PyErr_SetString(PyExc_KeyError, "live");
    api->drop(PyLong_AsVoidPtr(value));
    PyErr_Fetch(&type, &error, &trace);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return type ? type : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"deleter", deleter, METH_NOARGS, NULL},
    {"counts", counts, METH_NOARGS, NULL},
    {"drop_failing", drop_failing, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "deleters", .m_size = -1,
                                    .m_methods = methods};

PyMODINIT_FUNC PyInit_deleters(void);
PyMODINIT_FUNC PyInit_deleters(void)
{
    api = fanin_import();
    return api ? PyModule_Create(&module) : NULL;
}
