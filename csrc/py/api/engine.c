/* engine: passes and nodes of the C API, inside the interpreter. A pass makes the arguments of
 * fanin.backward or fanin.grad, which check them. In this order: passes; leaves; objects. */
#include "py/api/api.h"
#include "py/engine/node_object.h"

/* root_check: reads a root, and checks what fanin.backward does not. */
static fan_status root_check(const fanin_root *given, fanin_root *r, fan_error *err)
{
    FAN_TRY(fan_api_options(given, sizeof *r, sizeof *r, "fanin_root", r, err));
    FAN_TRY(fan_api_reserved(r->reserved, "fanin_root", err));
    if (r->gradient && r->gradient->array && fan_api_device_of(r->gradient) != fan_cpu())
        return fan_fail(err, FAN_ERR_TYPE, "fanin_root: expected a gradient on the CPU");
    return FAN_OK;
}

/* host_to_python: the object of a value on the host; None of an undefined one, and of NULL. */
static PyObject *host_to_python(const fanin_value *v)
{
    if (!v || !v->array)
        Py_RETURN_NONE;
    return fan_export_array(fan_c_array(v));
}

/* root_of: (node, slot, gradient); new reference. */
static PyObject *root_of(const fanin_root *given)
{
    fanin_root r;
    if (FAN_CHECK(root_check(given, &r, &err)) < 0)
        return NULL;
    return Py_BuildValue("(OIN)", fan_or_none(r.node), (unsigned)r.slot,
                         host_to_python(r.gradient));
}

/* inputs_of: the list of (next, slot) of the inputs; None: none are given. New reference. */
static PyObject *inputs_of(const fanin_pass_options *o)
{
    if (!o->inputs)
        Py_RETURN_NONE;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < o->ninputs; i++) {
        fan_list_add(&list, Py_BuildValue("(OI)", fan_or_none(o->inputs[i].next),
                                          (unsigned)o->inputs[i].slot));
    }
    return list;
}

static fan_status pass_options(const fanin_pass_options *given, fanin_pass_options *o,
                               fan_error *err)
{
    FAN_TRY(fan_api_options(given, sizeof *o, sizeof *o, "fanin_pass_options", o, err));
    return fan_api_flags(o->flags, FANIN_PASS_KEEP_GRAPH | FANIN_PASS_DETECT, "fanin_pass_options",
                         err);
}

/* pass_begin: NULL with an exception. */
static fan_pass *pass_begin(const char *call, const fanin_root *roots, size_t n,
                            const fanin_pass_options *given, size_t *nwanted)
{
    PyObject *a[FAN_PASS_ARGS];
    fanin_pass_options o;
    fan_pass *pass = NULL;
    if (FAN_CHECK(pass_options(given, &o, &err)) < 0)
        return NULL;
    for (int i = 0; i < FAN_PASS_ARGS; i++)
        a[i] = Py_None;
    if (o.flags & FANIN_PASS_KEEP_GRAPH)
        a[FAN_PASS_KEEP_GRAPH] = Py_True;
    if (o.flags & FANIN_PASS_DETECT)
        a[FAN_PASS_DETECT] = Py_True;
    a[FAN_PASS_ROOTS] = PyList_New(0);
    for (size_t i = 0; a[FAN_PASS_ROOTS] && i < n;
         i++) { /* each has the size of its author's version */
        const char *root = (const char *)roots + i * roots->struct_size;
        fan_list_add(&a[FAN_PASS_ROOTS], root_of((const void *)root));
    }
    if (!a[FAN_PASS_ROOTS])
        return NULL;
    if (!o.workers)
        o.workers = 1;
    a[FAN_PASS_INPUTS] = inputs_of(&o);
    a[FAN_PASS_WORKERS] = PyLong_FromUnsignedLong(o.workers);
    if (a[FAN_PASS_INPUTS] && a[FAN_PASS_WORKERS])
        pass = fan_py_pass_begin(call, a, nwanted);
    Py_DECREF(a[FAN_PASS_ROOTS]);
    Py_XDECREF(a[FAN_PASS_INPUTS]);
    Py_XDECREF(a[FAN_PASS_WORKERS]);
    return pass;
}

int fan_api_backward(const fanin_root *roots, size_t n, const fanin_pass_options *options)
{
    size_t nwanted;
    fan_pass *pass = pass_begin("backward", roots, n, options, &nwanted);
    if (!pass)
        return -1;
    int bad = fan_py_pass_run(pass);
    fan_py_pass_end(pass);
    return bad;
}

/* result_of: takes the hold of a sum, an object or unboxed; 0, or -1 with an exception. */
static int result_of(void *sum, fanin_value *out)
{
    if (!sum) {
        fan_c_show(NULL, out);
        return 0;
    }
    if (fan_is_unboxed(sum)) {
        fan_c_show(fan_unboxed_array(sum), out);
        return 0;
    }
    int bad = fan_c_import(sum, NULL, out);
    fan_object_drop(sum);
    return bad;
}

int fan_api_grad(const fanin_root *roots, size_t n, const fanin_pass_options *options,
                 fanin_value *out)
{
    size_t nwanted = 0;
    size_t made = 0;
    /* also on failure */
    if (options && options->struct_size >= sizeof *options) {
        for (size_t i = 0; i < options->ninputs; i++)
            fan_c_show(NULL, &out[i]);
    }
    fan_pass *pass = pass_begin("grad", roots, n, options, &nwanted);
    if (!pass)
        return -1;
    int bad = fan_py_pass_run(pass);
    for (; !bad && made < nwanted; made++)
        bad = result_of(fan_pass_result(pass, made), &out[made]);
    for (size_t i = 0; bad && i < made; i++) {
        if (out[i].array) {
            fan_array_drop(fan_c_array(&out[i]));
            fan_c_show(NULL, &out[i]);
        }
    }
    fan_py_pass_end(pass);
    return bad;
}

fanin_object *fan_api_leaf_new(const fanin_value *array, fanin_object *name)
{
    if (!array->array || fan_api_device_of(array) != fan_cpu()) {
        return (fanin_object *)PyErr_Format(PyExc_TypeError,
                                            "leaf_new: expected an array on the CPU");
    }
    PyObject *leaf = NULL;
    PyObject *x = host_to_python(array);
    PyObject *names = Py_BuildValue("(s)", "name");
    if (x && names) {
        PyObject *args[] = {x, fan_or_none(name)};
        leaf = PyObject_Vectorcall((PyObject *)fan_state_get()->leaf_type, args, 1, names);
    }
    Py_XDECREF(names);
    Py_XDECREF(x);
    return (fanin_object *)leaf;
}

int fan_api_leaf_grad(fanin_object *leaf, fanin_value *out)
{
    PyObject *o = (PyObject *)leaf;
    fan_c_show(NULL, out);
    if (!o || !PyObject_TypeCheck(o, fan_state_get()->leaf_type)) {
        return fan_set_error(PyExc_TypeError, "leaf_grad: expected a fanin.Leaf, got %s",
                             o ? FAN_TYPE_TEXT(o) : "NULL");
    }
    PyObject *grad = PyObject_GetAttrString(o, "grad");
    if (!grad)
        return -1;
    int bad = fan_c_import(grad, NULL, out);
    Py_DECREF(grad);
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
    if (!fn || !fan_is_function(fn)) {
        return (fanin_object *)PyErr_Format(PyExc_TypeError,
                                            "node_new: expected a function of function_new, got %s",
                                            fn ? FAN_TYPE_TEXT(fn) : "NULL");
    }
    return (fanin_object *)fan_node_new((function_object *)fn, edges, nedges, (PyObject *)name);
}

fanin_object *fan_api_to_python(const fanin_value *v)
{
    fan_device *d = fan_api_device_of(v);
    if (v->array && d->backend->has_streams)
        return (fanin_object *)fan_array_wrap(fan_c_array(v), d);
    return (fanin_object *)host_to_python(v);
}

int fan_api_of_python(fanin_object *object, fanin_value *out)
{
    PyObject *o = (PyObject *)object;
    fan_device *d;
    fan_c_show(NULL, out);
    if (!o)
        return fan_set_error(PyExc_TypeError, "of_python: expected an array or None, got NULL");
    fan_array *a = fan_array_arg(o, &d);
    if (!a)
        return fan_c_import(o, NULL, out);
    if (fan_array_usable(a) < 0)
        return -1;
    fan_api_show(fan_array_hold(a), d, out);
    return 0;
}
