/* A node's function in C: the backward of y = a * x, which multiplies by a. 15_c_nodes.py compiles and runs it. */
#include <Python.h>

#include <fanin.h>

#include <stdio.h>
#include <stdlib.h>

static const fanin_api *api;

/* times: sums[0] is the gradient of y, ctx is a; out[0] becomes the gradient of x. */
static fanin_status times(void *ctx, const fanin_value *sums, size_t n, fanin_value *out, size_t m, fanin_error *err)
{
    const fanin_value *a = ctx, *g = &sums[0];
    fanin_status status;
    (void)n, (void)m;
    if (!g->array)
        return FANIN_OK; /* undefined: so is what it gives */
    if (g->dtype != FANIN_FLOAT64 || !g->contiguous || g->size != a->size) {
        snprintf(err->text, sizeof err->text, "expected %lld float64 in C order", (long long)a->size);
        return FANIN_ERR_VALUE;
    }
    status = api->like(g, &out[0], err);
    for (int64_t i = 0; status == FANIN_OK && i < g->size; i++)
        ((double *)out[0].data)[i] = ((const double *)g->data)[i] * ((const double *)a->data)[i];
    return status;
}

static void release(void *ctx)
{
    api->drop(ctx);
    free(ctx);
}

/* function(a): for fanin.Node(function(a), edges=..). */
static PyObject *function(PyObject *module, PyObject *a)
{
    fanin_value *kept = malloc(sizeof *kept);
    fanin_function f = {
        .struct_size = sizeof f, .call = times, .ctx = kept, .release = release, .inputs = 1, .gradients = 1};
    PyObject *made = NULL;
    (void)module;
    if (!kept)
        return PyErr_NoMemory();
    if (api->of_python((fanin_object *)a, kept) == 0) {
        if (kept->dtype == FANIN_FLOAT64 && kept->contiguous)
            made = (PyObject *)api->function_new(&f);
        else
            PyErr_SetString(PyExc_TypeError, "a: expected float64 in C order");
        if (!made)
            api->drop(kept);
    }
    if (!made)
        free(kept);
    return made;
}

static PyMethodDef methods[] = {{"times", function, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "c_nodes", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_c_nodes(void)
{
    api = fanin_import();
    return api ? PyModule_Create(&module) : NULL;
}
