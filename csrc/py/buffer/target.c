/* target: `with buf.target(slot) as out:`, a context that lends an array to add into.
 *
 * The core lends the running sum (fan_buffer_target) and takes it back at the end, when the sum is
 * poisoned if the block raised. */
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"

#include <string.h>

typedef struct target_object {
    PyObject_HEAD PyObject *buffer; /* held */
    fan_target t;
    size_t slot;
    int64_t key;
    fan_stream *stream; /* held; NULL: S4 */
    fan_weight weight;
    int origin; /* of the library whose array is lent; less than FAN_FROM_FOREIGN: of ours */
    enum {
        FRESH,
        LENT,
        OVER
    } state;
} target_object;

static target_object *of(PyObject *o)
{
    return (target_object *)o;
}

PyObject *fan_target_new(PyObject *buffer, size_t slot, int64_t key, fan_stream *stream,
                         fan_weight weight)
{
    PyTypeObject *type = fan_state_get()->target_type;
    target_object *self = (target_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->buffer = Py_NewRef(buffer);
    self->slot = slot;
    self->key = key;
    self->weight = weight;
    if (stream)
        self->stream = fan_stream_hold(stream);
    return (PyObject *)self;
}

static int end(target_object *self, bool good)
{
    FAN_UNINITIALIZED fan_error err;
    int origin = self->origin;
    if (origin < FAN_FROM_FOREIGN && self->t.device->backend->has_streams)
        origin = FAN_FROM_DEVICE_ARRAY;
    self->state = OVER;
    fan_error_clear(&err);
    fan_status status =
        fan_buffer_target_end(fan_buffer_of(self->buffer), &self->t, good, (uint8_t)origin, &err);
    if (!good)
        return 0;
    return fan_check(status, &err);
}

/* lent_wrap: the lent array as a Python object; new reference; NULL with an exception. */
static PyObject *lent_wrap(const target_object *self)
{
    if (self->origin >= FAN_FROM_FOREIGN) {
        fan_value lent = fan_value_dense(fan_array_hold(self->t.array), self->t.device);
        lent.origin = (uint8_t)self->origin;
        return fan_export(&lent);
    }
    if (self->t.device->backend->has_streams)
        return fan_array_wrap(self->t.array, self->t.device);
    if (!fan_dtype_needs_ml_dtypes(self->t.array->dtype))
        return fan_export_array(self->t.array);
    /* NumPy would get a copy */
    fan_refuse(PyExc_TypeError, "the sum runs in a dtype that NumPy has only through ml_dtypes: "
                                "import ml_dtypes first");
    return NULL;
}

static PyObject *target_begin(target_object *self, int origin, fan_dtype undeclared)
{
    if (self->state != FRESH) {
        return PyErr_Format(PyExc_RuntimeError,
                            "a target is entered once; make another with buffer.target()");
    }
    if (FAN_CHECK(fan_buffer_target(fan_buffer_of(self->buffer), self->slot, self->key,
                                    self->stream, undeclared, &self->weight, &self->t, &err)) < 0)
        return NULL;
    self->state = LENT;
    self->origin = origin;
    PyObject *out = lent_wrap(self);
    if (!out) {
        PyObject *live = fan_exception_take();
        /* Nothing was written: the running sum is what it was, so a failure here must not poison
         * it. */
        fan_buffer_target_cancel(fan_buffer_of(self->buffer), &self->t);
        self->state = OVER;
        fan_exception_put(live);
    }
    return out;
}

static PyObject *target_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    return target_begin(of(o), FAN_FROM_NDARRAY, FAN_DT_NONE);
}

static PyObject *target_lend(PyObject *o, PyObject *const *a)
{
    int64_t origin;
    fan_dtype undeclared;
    if (fan_number_arg(a[0], "_lend: origin", &origin) < 0)
        return NULL;
    if (origin < FAN_FROM_FOREIGN || origin > 255)
        return PyErr_Format(PyExc_ValueError, "_lend: expected the number of a library");
    if (fan_dtype_parse(a[1], &undeclared) < 0)
        return NULL;
    return target_begin(of(o), (int)origin, undeclared);
}

static PyObject *target_exit(PyObject *o, PyObject *const *a)
{
    target_object *self = of(o);
    if (self->state != LENT)
        return PyErr_Format(PyExc_RuntimeError, "this target was not entered");
    if (end(self, a[0] == Py_None) < 0)
        return NULL;
    Py_RETURN_FALSE;
}

static PyObject *target_cancel(PyObject *o, PyObject *Py_UNUSED(none))
{
    target_object *self = of(o);
    if (self->state == LENT) {
        self->state = OVER;
        fan_buffer_target_cancel(fan_buffer_of(self->buffer), &self->t);
    }
    Py_RETURN_NONE;
}

static int target_traverse(PyObject *o, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(of(o)->buffer);
    return 0;
}

static int target_clear(PyObject *o)
{
    target_object *self = of(o);
    if (self->state == LENT)
        end(self, false);
    Py_CLEAR(self->buffer);
    return 0;
}

static void target_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject *live = fan_exception_take();
    PyObject_GC_UnTrack(o);
    target_clear(o);
    fan_stream_drop(of(o)->stream);
    fan_exception_put(live);
    type->tp_free(o);
    Py_DECREF(type);
}

#include "py/declared/Target.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)target_doc},   {Py_tp_dealloc, target_dealloc},
    {Py_tp_traverse, target_traverse}, {Py_tp_clear, target_clear},
    {Py_tp_methods, target_methods},   {0, NULL},
};

PyType_Spec fan_target_spec = {
    .name = "fanin._core.Target",
    .basicsize = sizeof(target_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
