/* place: the streams of a new node or leaf (E4). */
#include "py/engine/node_object.h"

#include "py/device/backends.h"

/* The arguments. */
typedef struct place_args {
    fan_stream *stream; /* held; NULL: not given */
    fan_device *device; /* held; NULL: not given */
    fan_stream_set *now;
} place_args;

static const fan_slot_specs *specs_of(const node_object *self)
{
    return self->more && self->more->slots.specs ? &self->more->slots : NULL;
}

/* current_for: the current stream of a device, in the example array's library if it has one; a hold; NULL with an
 * exception. */
static fan_stream *current_for(fan_device *d, PyObject *example)
{
    fan_stream *s = NULL;
    fan_value v;
    if (example && fan_is_shared(d)) {
        if (fan_import(example, false, true, &v) < 0 || fan_library_stream(&v, NULL, &s) < 0)
            PyErr_Clear(); /* a Slot, or a library without streams */
        fan_value_release(&v);
    }
    if (!s && !(s = fan_stream_current(d)))
        PyErr_NoMemory();
    return s;
}

/* own_by_slots: *own: a hold on the current stream of the first device with streams that a slot declares; *host: all
 * slots declare the CPU. */
static int own_by_slots(const fan_slot_specs *specs, PyObject *slots, fan_stream **own, bool *host)
{
    *host = specs != NULL;
    for (size_t i = 0; specs && i < specs->n; i++) {
        fan_device *d = specs->specs[i].device;
        if (d && d->backend->has_streams) {
            PyObject *example = slots && PyList_Check(slots) && (Py_ssize_t)i < PyList_GET_SIZE(slots)
                                    ? PyList_GET_ITEM(slots, (Py_ssize_t)i)
                                    : NULL;
            *host = false;
            *own = current_for(d, example);
            return *own ? 0 : -1;
        }
        *host = *host && d;
    }
    return 0;
}

/* check_slots: stream= must be of the device of a slot, and able to wait for what every slot holds. */
static int check_slots(const fan_slot_specs *specs, const fan_stream *own)
{
    const fan_slot_spec *wrong = specs ? specs->specs : NULL;
    char one[32], two[32];
    for (size_t i = 0; specs && i < specs->n; i++) {
        const fan_device *d = specs->specs[i].device;
        if (d && d->backend->has_streams && (d->backend != own->device->backend || d->self != own->device->self)) {
            wrong = &specs->specs[i];
            break;
        }
        if (!d || d == own->device)
            wrong = NULL;
    }
    if (!wrong)
        return 0;
    const fan_device *d = wrong->device;
    bool machine = d->backend == own->device->backend && d->self != own->device->self;
    return fan_refuse(PyExc_ValueError, "stream: expected one of %s, the device of slot %zu, got stream %llu of %s%s",
                      fan_device_text(d, one, sizeof one), (size_t)(wrong - specs->specs),
                      (unsigned long long)own->handle, fan_device_text(own->device, two, sizeof two),
                      machine ? " of another machine" : "");
}

static int own_of(node_object *self, place_args *a, PyObject *slots)
{
    char one[32], two[32];
    if (a->stream && a->device && a->device != a->stream->device)
        return fan_refuse(PyExc_ValueError, "stream: expected one of %s, its device, got stream %llu of %s",
                          fan_device_text(a->device, one, sizeof one), (unsigned long long)a->stream->handle,
                          fan_device_text(a->stream->device, two, sizeof two));
    if (!a->stream && a->device && a->device->backend->has_streams && !(a->stream = current_for(a->device, NULL)))
        return -1;
    if (a->stream)
        return check_slots(specs_of(self), a->stream);
    if (a->device)
        self->node.host = true;
    else if (own_by_slots(specs_of(self), slots, &a->stream, &self->node.host) < 0)
        return -1;
    return 0;
}

static int place_in(node_object *self, place_args *a, PyObject *slots)
{
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    if (own_of(self, a, slots) < 0)
        return -1;
    fan_status status = fan_stream_set_now(&a->now, &err);
    if (status == FAN_OK && a->stream)
        status = fan_stream_set_with(a->now, a->stream, &self->node.streams, &err);
    else if (status == FAN_OK)
        self->node.streams = fan_stream_set_hold(a->now);
    return fan_check(status, &err);
}

/* raise_about: prefixes the exception with the node and the argument: "Mul: stream: ..". */
static int raise_about(const char *name, const char *what)
{
    PyObject *e = fan_exception_take(), *type = (PyObject *)Py_TYPE(e);
    PyErr_Format(type, "%s: %s: %S", name, what, e);
    Py_DECREF(e);
    return -1;
}

int fan_node_place(node_object *self, PyObject *stream, PyObject *device, PyObject *slots)
{
    char name[128];
    fan_error_context w = {.slot = -1, .key = -1};
    place_args a = {0};
    int bad;
    if (!(stream && stream != Py_None) && !(device && device != Py_None) && !specs_of(self)) /* the usual case */
        return FAN_CHECK(fan_stream_set_now(&self->node.streams, &err));
    w.buffer = fan_node_name(&self->node, name, sizeof name);
    if (fan_stream_arg(stream, &a.stream) < 0)
        return raise_about(name, "stream");
    if (fan_device_arg(device, &a.device) < 0) {
        fan_stream_drop(a.stream);
        return raise_about(name, "device");
    }
    fan_error_context_push(&w);
    bad = place_in(self, &a, slots);
    fan_error_context_pop(&w);
    fan_stream_drop(a.stream);
    fan_device_drop(a.device);
    fan_stream_set_drop(a.now);
    return bad;
}

PyObject *fan_node_get_stream(PyObject *o, void *Py_UNUSED(closure))
{
    fan_stream *own = fan_node_stream(&((const node_object *)o)->node);
    return own ? fan_stream_wrap(own) : Py_NewRef(Py_None);
}
