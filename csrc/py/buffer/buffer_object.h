/* buffer_object: what the files of InputBuffer share. */
#ifndef FAN_PY_BUFFER_OBJECT_H
#define FAN_PY_BUFFER_OBJECT_H

#include "py/base/args.h"
#include "py/arrays/arrays.h"

#define FAN_HAS_COMBINE 1u /* what the slot takes need not be an array */
#define FAN_LOW_DTYPE 2u   /* its declared dtype is one that NumPy has from ml_dtypes alone */
#define FAN_NUMBERS 8u     /* shape or dtype, and no combine: an ndarray of objects has none such */
/* an array's leaf: what has a + of its own cannot be added to its .grad */
#define FAN_ARRAYS 16u
/* shape or dtype, in a buffer that records itself (A1): conversions are Python's */
#define FAN_DECLARED 4u

typedef struct buffer_object {
    PyObject_HEAD fan_buffer *core; /* NULL only while it is being made */
    size_t n;                       /* slots */
    unsigned char *flags;           /* of each slot; NULL: all 0; `few_flags`, or on the heap */
    unsigned char few_flags[8];
    PyObject *names; /* tuple of str or None; NULL: no slot has a name */
    /* with create_graph: tuple of (shape or None, dtype's name or None); else NULL */
    PyObject *declared;
    bool create_graph;
    PyObject *weakrefs;
} buffer_object;

_Static_assert(offsetof(buffer_object, core) == offsetof(fan_buffer_handle, core),
               "fan_buffer_of reads it");

static inline buffer_object *fan_buffer_self(PyObject *o)
{
    return (buffer_object *)o;
}

/* ---- target.c, add_n.c ---- */

/* fan_target_new: the context of InputBuffer.target. */
PyObject *fan_target_new(PyObject *buffer, size_t slot, int64_t key, fan_stream *stream,
                         fan_weight weight);
PyObject *fan_add_two(PyObject *a, PyObject *b); /* add_n([a, b]) */

/* ---- slots.c ---- */

/* fan_name_at: of a tuple of str or None, or NULL; borrowed, NULL: none. fan_slot_name: of a slot.
 * fan_slot_arg: S1. */
static inline PyObject *fan_name_at(PyObject *names, size_t slot)
{
    if (!names)
        return NULL;
    return fan_given(PyTuple_GET_ITEM(names, (Py_ssize_t)slot));
}
static inline PyObject *fan_slot_name(const buffer_object *self, size_t slot)
{
    return fan_name_at(self->names, slot);
}
/* fan_buffer_context: for messages about the buffer. fan_slot_context: about one of its slots. */
static inline fan_error_context fan_buffer_context(const buffer_object *self)
{
    return (fan_error_context){.buffer = fan_buffer_name(self->core), .slot = -1, .key = -1};
}
static inline fan_error_context fan_slot_context(const buffer_object *self, size_t slot)
{
    return (fan_error_context){.buffer = fan_buffer_name(self->core),
                               .slot = (Py_ssize_t)slot,
                               .slot_name = fan_slot_name(self, slot),
                               .key = -1};
}
int fan_slot_arg(const buffer_object *self, PyObject *o, size_t *out);
/* fan_slot_of_add: fan_slot_arg of an add; the message for an array has the call as it is right. */
int fan_slot_of_add(const buffer_object *self, PyObject *o, const char *call, size_t *out);

/* What is gathered of the slots before the core's buffer is made. */
typedef struct fan_slot_specs {
    size_t n;
    fan_slot_spec *specs; /* NULL: nothing declared */
    /* of each spec: its combine, which the spec borrows; in the block of the specs */
    PyObject **held;
    bool nones; /* a None declares nothing; else it is an error */
} fan_slot_specs;
/* fan_slot_specs_of: of a sequence of arrays and Slots, for a buffer of this name; *names: a tuple,
 * or NULL. */
int fan_slot_specs_of(PyObject *slots, const char *name, fan_slot_specs *d, PyObject **names);
/* fan_slot_specs_note: what add reads of each slot. fan_slot_specs_forget: that, and the slots'
 * names. */
int fan_slot_specs_note(buffer_object *self, const fan_slot_specs *d);
void fan_slot_specs_forget(buffer_object *self);
void fan_slot_specs_fini(fan_slot_specs *d);
/* fan_slot_spec_shape: copies the shape into `spec`: 0, or -1 with an exception. */
int fan_slot_spec_shape(fan_slot_spec *spec, int ndim, const int64_t *shape);

/* ---- buffer.c ---- */

PyObject *fan_process_counters(void); /* a fanin.options.ProcessCounters */
void fan_buffer_freelist_free(fan_state *st);

/* fan_buffer_plain: InputBuffer(n, budget=budget). fan_buffer_declared: of slots that were declared
 * (specs NULL: of so many), with the name, stream, leaf, stats, create_graph and budget of
 * `config`; `names`: of slots, or NULL. */
PyObject *fan_buffer_plain(size_t n, uint64_t budget);
PyObject *fan_buffer_declared(const fan_slot_specs *d, PyObject *names, fan_buffer_config config);

/* ---- add.c ---- */

/* fan_add_flags: donate= and copy=: one gives the array away, the other keeps it the caller's. */
int fan_add_flags(const buffer_object *self, PyObject *donate, PyObject *copy, bool *donated,
                  bool *copied);
/* fan_contribution_of: one gradient as the core takes it, but for its stream. */
int fan_contribution_of(buffer_object *self, size_t slot, PyObject *gradient, PyObject *key,
                        fan_contribution *c);
/* fan_add_on: fan_buffer_add, with the current stream of the gradient's library as that of the
 * device, where the caller made none the current one (S4, S5). */
int fan_add_on(fan_buffer *core, size_t slot, fan_contribution *c);
/* fan_add_used: fan_buffer_add of memory that its device may know to be donated. Needs no
 * interpreter. */
fan_status fan_add_used(fan_buffer *core, size_t slot, fan_contribution *c, fan_error *err);
/* fan_buffer_add_plain: adds args[1] to slot args[0] where it is a plain contribution.
 * fan_plain_add_only: the same to a buffer of one slot, with a key (-1: none). 1: added; 0: it is
 * not plain, and nothing happened; -1 with an
 * exception. */
int fan_buffer_add_plain(buffer_object *self, PyObject *const *args, PyObject *kwnames);
int fan_plain_add_only(fan_buffer *core, PyObject *gradient, int64_t key);
/* fan_buffer_add_one: InputBuffer.add, with its parameters in the order of core.pyi; as are the
 * other methods that take `a`. fan_buffer_add_fast: the same for a plain contribution, of the
 * arguments as they come; 0: it is none, and nothing happened. */
PyObject *fan_buffer_add_one(PyObject *o, PyObject *const *a);
int fan_buffer_add_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                        PyObject **result);

/* ---- add_many.c ---- */

/* The arguments of add_many: sequences of one length. */
typedef struct fan_batch_args {
    PyObject *slots, *gradients; /* tuples, held */
    PyObject *keys, *weights;    /* the same; may be NULL */
    Py_ssize_t n;
} fan_batch_args;
PyObject *fan_buffer_add_batch(PyObject *o, PyObject *const *a);
/* fan_add_many_used: fan_buffer_add_many, as fan_add_used. */
fan_status fan_add_many_used(fan_buffer *core, fan_contribution *c, const size_t *slots, size_t n,
                             fan_error *err);

/* ---- take.c ---- */

/* fan_take_all: the sums as a list, of `only`, where that is not NULL, of this slot alone. */
PyObject *fan_take_all(fan_buffer *core, const size_t *only, PyObject *slot_names,
                       fan_stream *stream, PyObject *out, PyObject *scale, bool writable);
/* fan_plain_take_over: the means of all slots, or of one, that hold small plain sums, over a
 * divisor; NULL: the general path takes them. */
PyObject *fan_plain_take_over(buffer_object *self, const size_t *only, PyObject *out,
                              const fan_divisor *divisor);
/* fan_take_weighted: the same of a mean, or with weights= (None: not given). over: a tuple of
 * floats whose exact sum is the divisor of the mean; NULL: that of the weights. */
PyObject *fan_take_weighted(fan_buffer *core, const size_t *only, PyObject *slot_names,
                            fan_stream *stream, PyObject *out, PyObject *scale, bool writable,
                            bool mean, PyObject *weights, PyObject *over);
/* fan_plain_take_only: of a buffer of one slot: the sum, which is the caller's alone. out, scale:
 * None: not given. NULL without an exception: it is not that of plain contributions, and nothing
 * happened. fan_plain_writable_now: `o` is an array that such a sum may be written into. */
PyObject *fan_plain_take_only(fan_buffer *core, PyObject *out, PyObject *scale);
bool fan_plain_writable_now(PyObject *o, fan_plain_kind *kind, char **data);
PyObject *fan_buffer_take_sums(PyObject *o, PyObject *const *a);
int fan_buffer_take_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                         PyObject **result);
/* fan_stats_wrap: a fanin.Stats, or None of a sum that is undefined or no array. */
PyObject *fan_stats_wrap(fan_buffer *core, size_t slot);

/* fan_slot_look: reads the state of a slot: *items is as long as v->items and the caller's to free.
 * Needs no interpreter. fan_slot_text: explains it; new reference. */
fan_status fan_slot_look(fan_buffer *core, size_t slot, fan_slot_view *v, fan_item_view **items,
                         fan_error *err);
PyObject *fan_slot_text(const char *buffer, size_t slot, PyObject *name, const fan_slot_view *v,
                        const fan_item_view *items);

#endif
