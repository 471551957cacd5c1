/* exchange: what fanin._interop and fanin.slots ask and tell: exchange tables, dtypes. */
#include "py/dlpack_export.h"
#include "py/library.h"

/* is_own: a descriptor of this kind, for objects of this type: its function may be called as it is. */
static bool is_own(PyObject *type, PyObject *descriptor, const PyTypeObject *kind)
{
    return Py_TYPE(descriptor) == kind && PyType_IsSubtype((PyTypeObject *)type, ((PyDescrObject *)descriptor)->d_type);
}

/* is_no_args: a builtin function without arguments. */
static bool is_no_args(PyObject *f) { return PyCFunction_CheckExact(f) && PyCFunction_GET_FLAGS(f) == METH_NOARGS; }

static bool is_getter(PyObject *type, PyObject *descriptor)
{
    return is_own(type, descriptor, &PyGetSetDescr_Type) && ((PyGetSetDescrObject *)descriptor)->d_getset->get;
}

/* is_plain_table: what fan_tensor_look reads: a function, then pairs of a getter and its value. */
static bool is_plain_table(PyObject *type, PyObject *plain)
{
    Py_ssize_t n = PyTuple_GET_SIZE(plain);
    bool good = n % 2 == 1 && is_no_args(PyTuple_GET_ITEM(plain, 0));
    for (Py_ssize_t i = 1; good && i < n; i += 2)
        good = is_getter(type, PyTuple_GET_ITEM(plain, i));
    return good;
}

/* quick_tensors: how exact torch tensors are read by the fast path, told by _interop.torch when it meets the first one.
 */
static PyObject *quick_tensors(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_state *st = fan_state_get();
    PyObject *type, *capsule, *is_neg, *requires_grad, *plain, *graph;
    int origin;
    if (!PyArg_ParseTuple(args, "O!OOOO!Oi:quick_tensors", &PyType_Type, &type, &capsule, &is_neg, &requires_grad,
                          &PyTuple_Type, &plain, &graph, &origin))
        return NULL;
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (!api || st->torch_api || !is_own(type, is_neg, &PyMethodDescr_Type) ||
        ((PyMethodDescrObject *)is_neg)->d_method->ml_flags != METH_NOARGS || !is_getter(type, requires_grad) ||
        !is_plain_table(type, plain))
        Py_RETURN_FALSE;
    st->torch_type = (PyTypeObject *)Py_NewRef(type);
    st->torch_is_neg = Py_NewRef(is_neg);
    st->torch_requires_grad = Py_NewRef(requires_grad);
    st->torch_plain = Py_NewRef(plain);
    st->torch_graph = Py_NewRef(graph);
    st->torch_origin = (uint8_t)origin;
    st->torch_api = api;
    Py_RETURN_TRUE;
}

/* ---- what _interop and fanin.slots ask ---- */

static PyObject *dtype_name(PyObject *Py_UNUSED(module), PyObject *o)
{
    fan_dtype d;
    if (fan_dtype_parse(o, &d) < 0)
        return NULL;
    if (d == FAN_DT_NONE)
        Py_RETURN_NONE;
    return PyUnicode_FromString(fan_dtype_name(d));
}

static PyObject *can_cast(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from, *to;
    fan_dtype one, two;
    if (!PyArg_ParseTuple(args, "OO:can_cast", &from, &to) || fan_dtype_parse(from, &one) < 0 ||
        fan_dtype_parse(to, &two) < 0)
        return NULL;
    return PyBool_FromLong(one != FAN_DT_NONE && two != FAN_DT_NONE && fan_dtype_can_cast(one, two));
}

/* table_arg: an exchange table that is known; NULL with TypeError. */
static const fan_dl_api *table_arg(PyObject *capsule)
{
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (!api)
        PyErr_Format(PyExc_TypeError, "expected DLPack's exchange table of version %d, got %.200s", FAN_DL_MAJOR,
                     Py_TYPE(capsule)->tp_name);
    return api;
}

static PyObject *table_known(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    int origin;
    if (!PyArg_ParseTuple(args, "Oi:table_known", &capsule, &origin))
        return NULL;
    const fan_dl_api *api = fan_dl_api_of(capsule);
    if (origin >= FAN_FROM_FOREIGN && origin < 256)
        fan_state_get()->tables[origin] = api;
    return PyBool_FromLong(api != NULL);
}

static PyObject *read_by_table(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_state *st = fan_state_get();
    PyObject *type, *how = NULL;
    int origin, asks_value;
    if (!PyArg_ParseTuple(args, "O!ip:read_by_table", &PyType_Type, &type, &origin, &asks_value) ||
        (!st->table_types && !(st->table_types = PyDict_New())))
        return NULL;
    if (origin < FAN_FROM_FOREIGN || origin > 255) {
        if (PyDict_Contains(st->table_types, type) > 0 && PyDict_DelItem(st->table_types, type) < 0)
            return NULL;
    } else if (!(how = PyLong_FromLong(origin + (asks_value ? FAN_ASKS_VALUE : 0))) ||
               PyDict_SetItem(st->table_types, type, how) < 0) {
        Py_XDECREF(how);
        return NULL;
    }
    Py_XDECREF(how);
    Py_RETURN_NONE;
}

static PyObject *table_take(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *object, *made;
    fan_dl_versioned *managed = NULL;
    const fan_dl_api *api;
    if (!PyArg_ParseTuple(args, "OO:table_take", &capsule, &object) || !(api = table_arg(capsule)))
        return NULL;
    if (api->take(object, &managed) != 0 || !managed)
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_BufferError, "the exchange table of %.200s gave no tensor",
                                               Py_TYPE(object)->tp_name);
    made = fan_dlpack_capsule(managed);
    if (!made && managed->deleter)
        managed->deleter(managed);
    return made;
}

static PyObject *table_give(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *tensor;
    const fan_dl_api *api;
    void *object = NULL;
    if (!PyArg_ParseTuple(args, "OO:table_give", &capsule, &tensor) || !(api = table_arg(capsule)))
        return NULL;
    fan_dl_versioned *managed = PyCapsule_GetPointer(tensor, "dltensor_versioned");
    if (!managed || PyCapsule_SetName(tensor, "used_dltensor_versioned") < 0)
        return NULL;
    if (api->give(managed, &object) != 0 || !object) /* which had it, errors too */
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_BufferError, "the exchange table gave no array");
    return object;
}

static PyObject *table_stream(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    const fan_dl_api *api;
    void *stream = NULL;
    int index;
    if (!PyArg_ParseTuple(args, "Oi:table_stream", &capsule, &index) || !(api = table_arg(capsule)))
        return NULL;
    if (api->current_stream(FAN_DL_CUDA, index, &stream) != 0)
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_BufferError,
                                               "the exchange table has no current stream of CUDA device %d", index);
    return PyLong_FromVoidPtr(stream);
}

PyMethodDef fan_exchange_functions[] = {
    {"table_known", table_known, METH_VARARGS,
     "table_known(table, origin, /)\n--\n\n"
     "Allocate sums of this origin by this exchange table from now on (None: by the core); return whether the\n"
     "table is known."},
    {"read_by_table", read_by_table, METH_VARARGS,
     "read_by_table(type, origin, asks_value, /)\n--\n\n"
     "Read arrays of exactly this type on a CUDA device by the exchange table of their origin from now on;\n"
     "origin -1: no longer. asks_value: check is_neg, is_conj and requires_grad first."},
    {"table_take", table_take, METH_VARARGS,
     "table_take(table, x, /)\n--\n\nA capsule over x by its exchange table: nothing waits for anything."},
    {"table_give", table_give, METH_VARARGS,
     "table_give(table, capsule, /)\n--\n\nA library's array over what a capsule holds."},
    {"table_stream", table_stream, METH_VARARGS,
     "table_stream(table, device, /)\n--\n\nThe handle of a library's current stream on a CUDA device."},
    {"hold_for", fan_hold_for, METH_VARARGS,
     "hold_for(owner, streams, /)\n--\n\n"
     "An object that, after its last reference, keeps `owner` until the work that the streams have queued so far\n"
     "has run."},
    {"quick_tensors", quick_tensors, METH_VARARGS,
     "quick_tensors(type, table, is_neg, requires_grad, plain, graph, origin, /)\n--\n\n"
     "Read exact torch tensors through torch's exchange table from now on; return whether the table is known.\n\n"
     "plain: a function that returns whether getters of tensors run Python code, then pairs of a getter and its value\n"
     "for tensors that the table reads."},
    {"dtype_name", dtype_name, METH_O,
     "dtype_name(dtype, /)\n--\n\nThe name of a dtype that is summed (NumPy's, torch's, a name); None for None."},
    {"can_cast", can_cast, METH_VARARGS,
     "can_cast(from_dtype, to_dtype, /)\n--\n\nWhether a gradient is cast so (D6)."},
    {NULL, NULL, 0, NULL},
};
