/* handles: streams, events and device arrays as Python objects: wrapped, and unwrapped. The types are in stream.c,
 * event.c and array.c. fan_stream_arg and the like: py.h. */
#ifndef FAN_PY_HANDLES_H
#define FAN_PY_HANDLES_H

#include "py/py.h"

typedef struct fan_stream_object {
    PyObject_HEAD fan_stream *s; /* held; never NULL after new */
} fan_stream_object;

typedef struct fan_event_object {
    PyObject_HEAD fan_event *e; /* held; never NULL after new */
} fan_event_object;

typedef struct fan_array_object {
    PyObject_HEAD fan_array *a; /* held; never NULL */
    fan_device *d;              /* held; never NULL */
    PyObject *weakrefs;
} fan_array_object;

static inline fan_stream *fan_stream_of(PyObject *o) { return ((fan_stream_object *)o)->s; }
static inline fan_event *fan_event_of(PyObject *o) { return ((fan_event_object *)o)->e; }
static inline fan_array_object *fan_array_self(PyObject *o) { return (fan_array_object *)o; }

int fan_stream_open(const fan_stream *s); /* fan_stream_check_open: 0, or -1 with an exception */
/* fan_stream_make, fan_event_make: a new object of this type or subclass, with its own hold. */
PyObject *fan_stream_make(PyTypeObject *type, fan_stream *s);
PyObject *fan_event_make(PyTypeObject *type, fan_event *e);

#endif
