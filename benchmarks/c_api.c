/* c_api: calls of the C API, 64 at a time, for c_api.py. */
#include <Python.h>

#include <fanin.h>

#define CALLS 64

static const fanin_api *api;
static float x[16];
static int64_t shape[1] = {16};
static fanin_tensor view = {.data = x, .device = {1, 0}, .ndim = 1, .dtype = {2, 32, 1}, .shape = shape};
static fanin_value value;
static fanin_buffer *parks, *eager; /* one buffer that only parks, and one whose sum each add is added into */

/* count: a function of this file, for the cost of a call through a table like the API's. */
typedef struct table {
    int (*count)(const fanin_value *v);
} table;
static __attribute__((noinline)) int count(const fanin_value *v)
{
    __asm__ volatile("");
    return v->ndim;
}
static const table here = {count};
static const table *volatile through = &here;

static PyObject *done(int bad)
{
    if (bad)
        return PyErr_Format(PyExc_RuntimeError, "a call failed");
    Py_RETURN_NONE;
}

static PyObject *clear(PyObject *m, PyObject *none)
{
    (void)m, (void)none;
    return done(api->buffer_clear(parks, NULL));
}

static PyObject *add_view(PyObject *m, PyObject *none)
{
    int bad = 0;
    (void)m, (void)none;
    for (int i = 0; i < CALLS; i++)
        bad |= (int)api->buffer_add(parks, 0, &view, NULL, NULL);
    return done(bad);
}

static PyObject *add_view_key(PyObject *m, PyObject *none)
{
    int bad = 0;
    fanin_add_options o = {.struct_size = sizeof o, .flags = FANIN_ADD_KEY};
    (void)m, (void)none;
    for (int i = 0; i < CALLS; i++) {
        o.key = i;
        bad |= (int)api->buffer_add(parks, 0, &view, &o, NULL);
    }
    return done(bad);
}

static PyObject *add_value(PyObject *m, PyObject *none)
{
    int bad = 0;
    (void)m, (void)none;
    for (int i = 0; i < CALLS; i++)
        bad |= (int)api->buffer_add_value(parks, 0, &value, NULL, NULL);
    return done(bad);
}

static PyObject *add_in_place(PyObject *m, PyObject *none)
{
    int bad = 0;
    (void)m, (void)none;
    for (int i = 0; i < CALLS; i++)
        bad |= (int)api->buffer_add(eager, 0, &view, NULL, NULL);
    return done(bad);
}

static PyObject *call_direct(PyObject *m, PyObject *none)
{
    int all = 0;
    (void)m, (void)none;
    for (int i = 0; i < CALLS; i++)
        all += count(&value);
    return done(all != CALLS);
}

static PyObject *call_table(PyObject *m, PyObject *none)
{
    int all = 0;
    (void)m, (void)none;
    for (int i = 0; i < CALLS; i++)
        all += through->count(&value);
    return done(all != CALLS);
}

static PyMethodDef methods[] = {{"clear", clear, METH_NOARGS, NULL},
                                {"add_view", add_view, METH_NOARGS, NULL},
                                {"add_view_key", add_view_key, METH_NOARGS, NULL},
                                {"add_value", add_value, METH_NOARGS, NULL},
                                {"add_in_place", add_in_place, METH_NOARGS, NULL},
                                {"call_direct", call_direct, METH_NOARGS, NULL},
                                {"call_table", call_table, METH_NOARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "c_api", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_c_api(void)
{
    fanin_buffer_options o = {.struct_size = sizeof o, .budget = FANIN_BUDGET_FUSED};
    api = fanin_import();
    if (!api)
        return NULL;
    int bad = (int)api->empty(FANIN_FLOAT32, 1, shape, &value, NULL) | (int)api->buffer_new(1, &o, &parks, NULL);
    o.budget = FANIN_BUDGET_EAGER;
    bad |= (int)api->buffer_new(1, &o, &eager, NULL);
    for (int i = 0; i < 3 && !bad; i++)
        bad = (int)api->buffer_add(eager, 0, &view, NULL, NULL);
    return bad ? PyErr_Format(PyExc_RuntimeError, "a call failed") : PyModule_Create(&module);
}
