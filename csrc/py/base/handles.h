/* handles: streams, events and device arrays as Python objects: wrapped, and unwrapped. The types
 * are in stream.c, event.c and array.c. */
#ifndef FAN_PY_HANDLES_H
#define FAN_PY_HANDLES_H

#include "py/base/py.h"

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
    /* held: what `a` was when its step ended, which a call on another thread may still use
     * (keep="held"); NULL: `a` was never replaced */
    fan_array *replaced;
} fan_array_object;

/* An InputBuffer begins like this (py/buffer/buffer_object.h). */
typedef struct fan_buffer_handle {
    PyObject_HEAD fan_buffer *core;
} fan_buffer_handle;

static inline fan_buffer *fan_buffer_of(PyObject *o)
{
    return ((fan_buffer_handle *)o)->core;
}
static inline fan_stream *fan_stream_of(PyObject *o)
{
    return ((fan_stream_object *)o)->s;
}
static inline fan_event *fan_event_of(PyObject *o)
{
    return ((fan_event_object *)o)->e;
}
static inline fan_array_object *fan_array_self(PyObject *o)
{
    return (fan_array_object *)o;
}

int fan_stream_open(const fan_stream *s); /* fan_stream_check_open: 0, or -1 with an exception */
/* fan_stream_make: a new object of this type or subclass, with its own hold of s. */
PyObject *fan_stream_make(PyTypeObject *type, fan_stream *s);
/* fan_event_make: the same for an event. */
PyObject *fan_event_make(PyTypeObject *type, fan_event *e);

/* fan_stream_arg: a stream from whatever is one (fanin.Stream, torch's, CuPy's, anything with
 * __cuda_stream__: _interop.streams.foreign); None: NULL. A hold in *out. -1: TypeError where it is
 * no stream, RuntimeError where it is closed. */
int fan_stream_arg(PyObject *o, fan_stream **out);
PyObject *fan_stream_wrap(fan_stream *s); /* new reference; takes a hold of its own */
PyObject *fan_stream_give(fan_stream *s); /* as fan_stream_wrap, takes the hold; None of NULL */
PyObject *fan_event_wrap(fan_event *e);
/* fan_event_arg: the event of an object; borrowed; NULL without exception if it is no Event. */
fan_event *fan_event_arg(PyObject *o);
PyObject *fan_array_wrap(fan_array *a, fan_device *d); /* takes holds of its own */
/* fan_array_arg: the array of an object; borrowed; NULL without exception if it is none. */
fan_array *fan_array_arg(PyObject *o, fan_device **d);
/* fan_handles_begin, _end: around a function of a graph tree on the CPU: on this thread the core
 * returns handles, whose work can be recorded. fan_wants_handles: whether the thread is inside such
 * a function, or `a` (may be NULL) is memory of a tree. */
typedef struct fan_handles_scope {
    const char *function;
    fan_array *const *in; /* its operands; NULL: no array */
    size_t n;
    /* whether operand i stays where it is */
    bool (*stays)(const struct fan_handles_scope *s, size_t i);
    const char *foreign;  /* the message for other memory, a format: the function, the operation */
    const uint8_t *roles; /* of each operand, or one for all: what `stays` reads */
    bool each;
} fan_handles_scope;

void fan_handles_begin(const fan_handles_scope *scope);
void fan_handles_end(const fan_handles_scope *scope);
/* fan_handles_outermost: the scope of the outermost function on this thread, which records all
 * work; NULL: none. */
const fan_handles_scope *fan_handles_outermost(void);
/* fan_kernel_running: the name of the kernel of a graph tree that this thread runs, borrowed; NULL:
 * none. _set: from now on; returns the one before. */
PyObject *fan_kernel_running(void);
PyObject *fan_kernel_running_set(PyObject *name);
bool fan_wants_handles(const fan_array *a);
/* fan_array_usable: 0, or -1 with an exception if the array's memory was lent and has been taken
 * back. */
int fan_array_usable(const fan_array *a);

#endif
