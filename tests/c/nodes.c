/* nodes: functions of nodes in C, as an author of extensions writes them against fanin.h alone: for
 * tests and benchmarks. */
#include <Python.h>

#include <fanin.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fanin_api *api;
static long released, unwrapped;

typedef enum kind {
    PASS,
    SCALE,
    IN_PLACE,
    NOTHING,
    FAIL,
    WRAP,
    CALL_PYTHON,
    RAISE,
    LOOK,
    FRESH
} kind;

typedef struct context {
    kind what;
    double factor;
    int status;
    PyObject *held; /* a function of Python's; NULL: none */
    char *text;     /* 600 bytes; NULL: none */
} context;

static void release(void *ctx)
{
    context *c = ctx;
    released++;
    Py_XDECREF(c->held);
    free(c->text);
    free(c);
}

static void free_data(void *ctx)
{
    unwrapped++;
    free(ctx);
}

static void multiply(const fanin_value *g, void *to, double factor)
{
    for (int64_t i = 0; i < g->size; i++) {
        if (g->dtype == FANIN_FLOAT32) {
            ((float *)to)[i] = ((const float *)g->data)[i] * (float)factor;
        } else {
            ((double *)to)[i] = ((const double *)g->data)[i] * factor;
        }
    }
}

/* scale: in place, where that is asked for, this is the last gradient of that sum, and nobody else
 * sees it. */
static fanin_status scale(const context *c, const fanin_value *g, int last, fanin_value *out,
                          fanin_error *err)
{
    fanin_status status;
    if ((g->dtype != FANIN_FLOAT32 && g->dtype != FANIN_FLOAT64) || !g->contiguous) {
        snprintf(err->text, sizeof err->text, "expected floats in C order");
        return FANIN_ERR_TYPE;
    }
    if (c->what == IN_PLACE && last && api->may_write(g)) {
        multiply(g, g->data, c->factor);
        api->share(g, out);
        return FANIN_OK;
    }
    status = api->like(g, out, err);
    if (status == FANIN_OK)
        multiply(g, out->data, c->factor);
    return status;
}

/* wrap: memory of our own, every other element of it. */
static fanin_status wrap(const fanin_value *g, fanin_value *out, fanin_error *err)
{
    const int64_t shape[1] = {g->size};
    const int64_t strides[1] = {2 * sizeof(double)};
    double *data = calloc((size_t)g->size * 2 + 1, sizeof *data);
    fanin_status status = FANIN_ERR_NOMEM;
    for (int64_t i = 0; data && i < g->size; i++)
        data[2 * i] = (double)i;
    if (data)
        status = api->wrap(data, FANIN_FLOAT64, 1, shape, strides, free_data, data, out, err);
    if (status != FANIN_OK)
        free(data);
    return status;
}

/* in_python: what a function of Python's gives of the first sum. */
static fanin_status in_python(const context *c, const fanin_value *g, fanin_value *out)
{
    PyGILState_STATE state = PyGILState_Ensure();
    fanin_object *seen = api->to_python(g);
    PyObject *made = NULL;
    int bad = -1;
    if (seen)
        made = PyObject_CallOneArg(c->held, (PyObject *)seen);
    if (made)
        bad = api->of_python((fanin_object *)made, out);
    Py_XDECREF((PyObject *)seen);
    Py_XDECREF(made);
    PyGILState_Release(state);
    return bad ? FANIN_ERR_PYTHON : FANIN_OK;
}

static fanin_status run(void *ctx, const fanin_value *sums, size_t n, fanin_value *out, size_t m,
                        fanin_error *err)
{
    const context *c = ctx;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < m && status == FANIN_OK; i++) {
        const fanin_value *g = &sums[i % n];
        switch (c->what) {
        case PASS: api->share(g, &out[i]); break;
        case SCALE:
        case IN_PLACE:
            if (g->array)
                status = scale(c, g, i + n >= m, &out[i], err);
            break;
        case NOTHING:
        case LOOK: break;
        case FAIL: /* after it has made some */
            if (i + 1 < m || g->array)
                api->share(g, &out[i]);
            if (i + 1 == m) {
                if (c->text)
                    memcpy(err->text, c->text, sizeof err->text);
                status = (fanin_status)c->status;
            }
            break;
        case WRAP: status = wrap(g, &out[i], err); break;
        case CALL_PYTHON: status = in_python(c, g, &out[i]); break;
        case RAISE: /* and says that all is well */
            PyErr_SetString(PyExc_KeyError, "raised");
            break;
        case FRESH: {
            const int64_t shape[2] = {3, -1};
            status =
                api->empty((fanin_dtype)c->status, c->status == 99 ? 1 : 2, shape, &out[i], err);
            break;
        }
        }
    }
    return status;
}

/* function(what, inputs, gradients, factor=1.0, status=0, text="", held=None, flags=0) */
static PyObject *function(PyObject *m, PyObject *args)
{
    int what;
    int status = 0;
    unsigned inputs, gradients;
    unsigned flags = 0;
    double factor = 1;
    const char *text = "";
    PyObject *held = NULL, *made;
    context *c = calloc(1, sizeof *c);
    (void)m;
    if (!c || !PyArg_ParseTuple(args, "iII|disOI", &what, &inputs, &gradients, &factor, &status,
                                &text, &held, &flags)) {
        free(c);
        return NULL;
    }
    *c = (context){.what = (kind)what, .factor = factor, .status = status};
    c->held = held && held != Py_None ? Py_NewRef(held) : NULL;
    c->text = malloc(600);
    if (!c->text) {
        free(c);
        return PyErr_NoMemory();
    }
    memset(c->text, '.', 600); /* no end */
    if (strcmp(text, "endless") != 0)
        snprintf(c->text, 600, "%s", text);
    const fanin_function f = {.struct_size = sizeof f,
                              .call = run,
                              .ctx = c,
                              .release = release,
                              .inputs = inputs,
                              .gradients = gradients,
                              .flags = flags};
    made = (PyObject *)api->function_new(&f);
    if (!made) {
        Py_XDECREF(c->held);
        free(c->text);
        free(c);
    }
    return made;
}

/* node(function, ((next, slot), ..), name=None) */
static PyObject *node(PyObject *m, PyObject *args)
{
    PyObject *fn, *edges, *name = Py_None;
    fanin_edge to[8];
    (void)m;
    if (!PyArg_ParseTuple(args, "OO!|O", &fn, &PyTuple_Type, &edges, &name))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(edges) && i < 8; i++) {
        PyObject *pair = PyTuple_GET_ITEM(edges, i);
        to[i] = (fanin_edge){NULL, 0};
        if (pair == Py_None)
            continue;
        to[i].next = (fanin_object *)PyTuple_GET_ITEM(pair, 0);
        to[i].slot = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(pair, 1));
    }
    return (PyObject *)api->node_new((fanin_object *)fn, to, (size_t)PyTuple_GET_SIZE(edges),
                                     name == Py_None ? NULL : (fanin_object *)name);
}

/* many(n, next, what, factor, chained): n nodes, one after the other to the last, or a list of n
 * that lead to next. */
static PyObject *many(PyObject *m, PyObject *args)
{
    Py_ssize_t n;
    PyObject *next, *list = NULL;
    int what, chained;
    int bad = 0;
    double factor;
    (void)m;
    if (!PyArg_ParseTuple(args, "nOidp", &n, &next, &what, &factor, &chained) ||
        (!chained && !(list = PyList_New(n))))
        return NULL;
    Py_INCREF(next);
    for (Py_ssize_t i = 0; i < n && !bad; i++) {
        const fanin_edge edge = {(fanin_object *)next, 0};
        context *c = calloc(1, sizeof *c);
        c->what = (kind)what;
        c->factor = factor;
        const fanin_function f = {.struct_size = sizeof f,
                                  .call = run,
                                  .ctx = c,
                                  .release = release,
                                  .inputs = 1,
                                  .gradients = 1};
        fanin_object *fn = api->function_new(&f);
        fanin_object *made = fn ? api->node_new(fn, &edge, 1, NULL) : NULL;
        Py_XDECREF((PyObject *)fn);
        bad = !made;
        if (made && chained) {
            Py_SETREF(next, (PyObject *)made);
        } else if (made) {
            PyList_SET_ITEM(list, i, (PyObject *)made);
        }
    }
    if (bad || !chained)
        Py_DECREF(next);
    if (bad)
        Py_CLEAR(list);
    if (bad)
        return NULL;
    return chained ? next : list;
}

static PyObject *counts(PyObject *m, PyObject *none)
{
    (void)m, (void)none;
    return Py_BuildValue("(ll)", released, unwrapped);
}

/* refused(): what function_new and node_new say of nonsense. */
static PyObject *refused(PyObject *m, PyObject *which)
{
    const fanin_function f = {.struct_size = sizeof f, .call = run, .inputs = 1};
    struct {
        fanin_function f;
        uint64_t later; /* what a longer one has */
    } bad = {f, 0};
    (void)m;
    switch (PyLong_AsLong(which)) {
    case 0: bad.f.struct_size = 8; break;
    case 1: bad.f.call = NULL; break;
    case 2: bad.f.inputs = 0; break;
    case 3: bad.f.flags = 8; break;
    case 4: bad.f.reserved = 1; break;
    case 5: bad.f.struct_size = sizeof bad; break;
    default: break;
    }
    return (PyObject *)api->function_new(&bad.f);
}

static PyMethodDef methods[] = {
    {"function", function, METH_VARARGS, NULL}, {"node", node, METH_VARARGS, NULL},
    {"many", many, METH_VARARGS, NULL},         {"counts", counts, METH_NOARGS, NULL},
    {"refused", refused, METH_O, NULL},         {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "nodes", .m_size = -1,
                                    .m_methods = methods};

PyMODINIT_FUNC PyInit_nodes(void);
PyMODINIT_FUNC PyInit_nodes(void)
{
    api = fanin_import();
    return api ? PyModule_Create(&module) : NULL;
}
