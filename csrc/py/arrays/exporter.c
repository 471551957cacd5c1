/* exporter: an object that offers a host array of ours by __dlpack__. */
#include "py/base/declared.h"
#include "py/arrays/dlpack_export.h"

#include "array/nditer.h"

typedef struct exporter {
    PyObject_HEAD fan_array *a; /* held; never NULL after new */
} exporter;

PyObject *fan_exporter_new(fan_array *a)
{
    PyTypeObject *type = fan_state_get()->exporter_type;
    exporter *self = (exporter *)type->tp_alloc(type, 0);
    if (self)
        self->a = fan_array_hold(a);
    return (PyObject *)self;
}

static void exporter_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    fan_array_drop(((exporter *)o)->a);
    type->tp_free(o);
    Py_DECREF(type);
}

static PyObject *exporter_dlpack(PyObject *o, PyObject *const *values)
{
    fan_dl_request q = {.type = FAN_DL_CPU};
    PyObject *capsule;
    fan_array *a = ((exporter *)o)->a, *copied = NULL;
    fan_error err = {0};
    if (fan_dl_request_parse(values, &q) < 0)
        return NULL;
    if (q.stream != Py_None)
        return PyErr_Format(PyExc_ValueError, "__dlpack__: a host array has no streams; expected stream=None, got %R",
                            q.stream);
    if (q.type != FAN_DL_CPU || q.id != 0)
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: the array is on the host and is not copied to device (%ld, %ld)", q.type,
                            q.id);
    if (fan_dl_request_decide(a, &q) < 0)
        return NULL;
    if (q.copy > 0) {
        fan_status status = fan_array_new(a->dtype, a->ndim, a->shape, a, &copied, &err);
        if (status != FAN_OK)
            return fan_raise(status, &err);
        fan_array_copy(copied, a);
        a = copied;
    }
    capsule = fan_dlpack_offer(a, (fan_dl_device){FAN_DL_CPU, 0}, q.major >= 1, q.copy > 0);
    fan_array_drop(copied);
    return capsule;
}

static PyObject *exporter_dlpack_device(PyObject *Py_UNUSED(o), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("(ii)", FAN_DL_CPU, 0);
}

static PyObject *exporter_numpy(PyObject *o, PyObject *Py_UNUSED(none)) { return fan_export_array(((exporter *)o)->a); }

#include "py/declared/Exporter.h"

static PyType_Slot exporter_slots[] = {
    {Py_tp_doc, (void *)exporter_doc},
    {Py_tp_dealloc, exporter_dealloc},
    {Py_tp_methods, exporter_methods},
    {0, NULL},
};

PyType_Spec fan_exporter_spec = {
    .name = "fanin._core._Exporter",
    .basicsize = sizeof(exporter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = exporter_slots,
};
