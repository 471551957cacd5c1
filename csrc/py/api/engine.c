/* engine: passes of the C API: fanin.backward and fanin.grad, whose arguments they make, so that
 * the checks are theirs. All inside the interpreter. */
#include "py/api/api.h"
#include "py/engine/node_object.h"

/* root_of: (node, slot, gradient); new reference. */
static PyObject *root_of(const fanin_root *given)
{
    FAN_UNINITIALIZED fan_error err;
    fanin_root r;
    fan_error_clear(&err);
    fan_status status = fan_api_options(given, sizeof r, sizeof r, "fanin_root", &r, &err);
    if (status == FAN_OK)
        status = fan_api_reserved(r.reserved, "fanin_root", &err);
    if (status == FAN_OK && r.gradient && r.gradient->array &&
        fan_api_device_of(r.gradient) != fan_cpu())
        status = fan_fail(&err, FAN_ERR_TYPE, "fanin_root: expected a gradient on the CPU");
    if (status != FAN_OK)
        return fan_raise(status, &err);
    PyObject *gradient = r.gradient && r.gradient->array ? fan_export_array(fan_c_array(r.gradient))
                                                         : Py_NewRef(Py_None);
    return gradient ? Py_BuildValue("(OIN)", r.node ? (PyObject *)r.node : Py_None,
                                    (unsigned)r.slot, gradient)
                    : NULL;
}

/* pass_begin: NULL with an exception. */
static fan_backward *pass_begin(const char *call, const fanin_root *roots, size_t n,
                                const fanin_pass_options *given, size_t *nwanted)
{
    /* The parameters of backward, in the order of core.pyi. */
    enum {
        ROOTS,
        INPUTS,
        KEEP_GRAPH,
        CREATE_GRAPH,
        DETECT,
        SCHEDULE,
        PROGRESS,
        ONE,
        BUDGET,
        WORKERS,
        REDUCER,
        ALL
    };
    PyObject *a[ALL] = {NULL};
    fanin_pass_options o;
    fan_backward *p = NULL;
    if (FAN_CHECK(fan_api_options(given, sizeof o, sizeof o, "fanin_pass_options", &o, &err)) < 0 ||
        FAN_CHECK(fan_api_flags(o.flags, FANIN_PASS_KEEP_GRAPH | FANIN_PASS_DETECT,
                                "fanin_pass_options", &err)) < 0)
        return NULL;
    a[ROOTS] = PyList_New(0);
    for (size_t i = 0; a[ROOTS] && i < n; i++) /* each is as long as its author's version had it */
        fan_list_add(&a[ROOTS],
                     root_of((const void *)((const char *)roots + i * roots->struct_size)));
    if (a[ROOTS])
        a[INPUTS] = o.inputs ? PyList_New(0) : Py_NewRef(Py_None);
    for (size_t i = 0; a[INPUTS] && o.inputs && i < o.ninputs; i++)
        fan_list_add(&a[INPUTS],
                     Py_BuildValue("(OI)",
                                   o.inputs[i].next ? (PyObject *)o.inputs[i].next : Py_None,
                                   (unsigned)o.inputs[i].slot));
    a[WORKERS] = a[INPUTS] ? PyLong_FromUnsignedLong(o.workers ? o.workers : 1) : NULL;
    a[KEEP_GRAPH] = o.flags & FANIN_PASS_KEEP_GRAPH ? Py_True : Py_None;
    a[DETECT] = o.flags & FANIN_PASS_DETECT ? Py_True : Py_None;
    a[CREATE_GRAPH] = a[SCHEDULE] = a[PROGRESS] = a[ONE] = a[BUDGET] = a[REDUCER] = Py_None;
    if (a[WORKERS])
        p = fan_task_begin_args(call, a, strcmp(call, "grad") == 0, nwanted);
    Py_XDECREF(a[ROOTS]);
    Py_XDECREF(a[INPUTS]);
    Py_XDECREF(a[WORKERS]);
    return p;
}

int fan_api_backward(const fanin_root *roots, size_t n, const fanin_pass_options *options)
{
    size_t nwanted;
    fan_backward *p = pass_begin("backward", roots, n, options, &nwanted);
    int bad = p ? fan_task_run(p) : -1;
    fan_task_end(p);
    return bad;
}

/* result_of: takes the hold of a sum, an object or unboxed; 0, or -1 with an exception. */
static int result_of(void *sum, fanin_value *out)
{
    int bad = 0;
    if (!sum || fan_is_unboxed(sum)) {
        fan_c_show(sum ? fan_unboxed_array(sum) : NULL, out);
        return 0;
    }
    bad = fan_c_import(sum, NULL, out);
    fan_object_drop(sum);
    return bad;
}

int fan_api_grad(const fanin_root *roots, size_t n, const fanin_pass_options *options,
                 fanin_value *out)
{
    size_t nwanted = 0, made = 0;
    for (size_t i = 0; options && options->struct_size >= sizeof *options && i < options->ninputs;
         i++)
        fan_c_show(NULL, &out[i]); /* also on failure */
    fan_backward *p = pass_begin("grad", roots, n, options, &nwanted);
    int bad = p ? fan_task_run(p) : -1;
    for (; !bad && made < nwanted; made++)
        bad = result_of(fan_backward_result(p, made), &out[made]);
    for (size_t i = 0; bad && i < made; i++)
        if (out[i].array) {
            fan_array_drop(fan_c_array(&out[i]));
            fan_c_show(NULL, &out[i]);
        }
    fan_task_end(p);
    return bad;
}

fanin_object *fan_api_leaf_new(const fanin_value *array, fanin_object *name)
{
    PyObject *x, *leaf = NULL, *names;
    if (!array->array || fan_api_device_of(array) != fan_cpu())
        return (fanin_object *)PyErr_Format(PyExc_TypeError,
                                            "leaf_new: expected an array on the CPU");
    x = fan_export_array(fan_c_array(array));
    names = x ? Py_BuildValue("(s)", "name") : NULL;
    if (names) {
        PyObject *args[] = {x, name ? (PyObject *)name : Py_None};
        leaf = PyObject_Vectorcall((PyObject *)fan_state_get()->leaf_type, args, 1, names);
    }
    Py_XDECREF(names);
    Py_XDECREF(x);
    return (fanin_object *)leaf;
}

int fan_api_leaf_grad(fanin_object *leaf, fanin_value *out)
{
    PyObject *grad;
    fan_c_show(NULL, out);
    if (!leaf || !PyObject_TypeCheck((PyObject *)leaf, fan_state_get()->leaf_type)) {
        PyErr_Format(PyExc_TypeError, "leaf_grad: expected a fanin.Leaf, got %s",
                     leaf ? FAN_TYPE_TEXT((PyObject *)leaf) : "NULL");
        return -1;
    }
    grad = PyObject_GetAttrString((PyObject *)leaf, "grad");
    int bad = grad ? fan_c_import(grad, NULL, out) : -1;
    Py_XDECREF(grad);
    return bad;
}

/* ---- objects ---- */

fanin_object *fan_api_function_new(const fanin_function *f)
{
    return (fanin_object *)fan_function_new(f);
}

fanin_object *fan_api_node_new(fanin_object *function, const fanin_edge *edges, size_t nedges,
                               fanin_object *name)
{
    PyObject *fn = (PyObject *)function;
    if (!fn || !fan_is_function(fn))
        return (fanin_object *)PyErr_Format(PyExc_TypeError,
                                            "node_new: expected a function of function_new, got %s",
                                            fn ? FAN_TYPE_TEXT(fn) : "NULL");
    return (fanin_object *)fan_node_new((function_object *)fn, edges, nedges, (PyObject *)name);
}

fanin_object *fan_api_to_python(const fanin_value *v)
{
    fan_device *d = fan_api_device_of(v);
    if (v->array && d->backend->has_streams)
        return (fanin_object *)fan_array_wrap(fan_c_array(v), d);
    return (fanin_object *)(v->array ? fan_export_array(fan_c_array(v)) : Py_NewRef(Py_None));
}

int fan_api_of_python(fanin_object *object, fanin_value *out)
{
    PyObject *o = (PyObject *)object;
    fan_device *d;
    fan_c_show(NULL, out);
    if (!o) {
        PyErr_SetString(PyExc_TypeError, "of_python: expected an array or None, got NULL");
        return -1;
    }
    fan_array *a = fan_array_arg(o, &d);
    if (!a)
        return fan_c_import(o, NULL, out);
    if (fan_array_usable(a) < 0)
        return -1;
    fan_api_show(fan_array_hold(a), d, out);
    return 0;
}
