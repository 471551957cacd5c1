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

/* fan_name_at: the name of a slot, in a tuple of str or None (NULL: no slot has a name); borrowed.
 *   NULL: it has none */
static inline PyObject *fan_name_at(PyObject *names, size_t slot)
{
    if (!names)
        return NULL;
    return fan_given(PyTuple_GET_ITEM(names, (Py_ssize_t)slot));
}
/* fan_slot_name: the same of a slot of a buffer. */
static inline PyObject *fan_slot_name(const buffer_object *self, size_t slot)
{
    return fan_name_at(self->names, slot);
}
/* fan_buffer_context: for messages about the buffer. */
static inline fan_error_context fan_buffer_context(const buffer_object *self)
{
    return (fan_error_context){
        .buffer = fan_buffer_name(self->core),
        .slot = -1,
        .key = -1,
    };
}
/* fan_slot_context: for messages about one of its slots. */
static inline fan_error_context fan_slot_context(const buffer_object *self, size_t slot)
{
    return (fan_error_context){
        .buffer = fan_buffer_name(self->core),
        .slot = (Py_ssize_t)slot,
        .slot_name = fan_slot_name(self, slot),
        .key = -1,
    };
}
/* fan_slot_arg: S1: reads an argument that names a slot: 0, or -1 with an exception. */
int fan_slot_arg(const buffer_object *self, PyObject *o, size_t *out);
/* fan_slot_of_add: fan_slot_arg of an add; the message for an array has the call as it is right. */
int fan_slot_of_add(const buffer_object *self, PyObject *o, const char *call, size_t *out);

/* The declarations of the slots, gathered before the core's buffer is made. */
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
/* fan_slot_specs_note: writes self->flags and self->declared, which add reads. 0, or -1 with an
 * exception. */
int fan_slot_specs_note(buffer_object *self, const fan_slot_specs *d);
/* fan_slot_specs_forget: frees them, and the slots' names. */
void fan_slot_specs_forget(buffer_object *self);
void fan_slot_specs_fini(fan_slot_specs *d);
/* fan_slot_spec_shape: copies the shape into `spec`: 0, or -1 with an exception. */
int fan_slot_spec_shape(fan_slot_spec *spec, int ndim, const int64_t *shape);

/* ---- buffer.c ---- */

PyObject *fan_process_counters(void); /* a fanin.options.ProcessCounters */
void fan_buffer_freelist_free(fan_state *st);

/* fan_buffer_plain: InputBuffer(n, budget=budget). */
PyObject *fan_buffer_plain(size_t n, uint64_t budget);
/* fan_buffer_declared: an InputBuffer of slots that were declared (specs NULL: of so many), with
 * the name, stream, leaf, stats, create_graph and budget of `config`; `names`: of slots, or NULL.
 */
PyObject *fan_buffer_declared(const fan_slot_specs *d, PyObject *names, fan_buffer_config config);

/* ---- add.c ---- */

/* fan_add_flags: donate= and copy=: one gives the array away, the other keeps it the caller's. */
int fan_add_flags(const buffer_object *self, PyObject *donate, PyObject *copy, bool *donated,
                  bool *copied);
/* fan_contribution_of: one gradient as the core takes it, but for its stream. */
int fan_contribution_of(buffer_object *self, size_t slot, PyObject *gradient, PyObject *key,
                        fan_contribution *c);
/* fan_add_on_library_stream: fan_add_owned, with the current stream of the gradient's library as
 * that of the device, where the caller made none the current one (S4, S5). 0, or -1 with an
 * exception. */
int fan_add_on_library_stream(fan_buffer *core, size_t slot, fan_contribution *c);
/* fan_add_owned: checks that the caller has not donated the memory, then fan_buffer_add. Needs no
 * interpreter. */
fan_status fan_add_owned(fan_buffer *core, size_t slot, fan_contribution *c, fan_error *err);
/* fan_buffer_add_plain: adds args[1] to slot args[0] where it is a plain contribution.
 *   1: added
 *   0: it is not plain, and nothing happened
 *   -1, with an exception: a fold that was due failed */
int fan_buffer_add_plain(buffer_object *self, PyObject *const *args, PyObject *kwnames);
/* fan_plain_add_only: the same to a buffer of one slot, with a key (-1: none). */
int fan_plain_add_only(fan_buffer *core, PyObject *gradient, int64_t key);
/* fan_buffer_add_one: InputBuffer.add, with its parameters in the order of core.pyi; as are the
 * other methods that take `a`. */
PyObject *fan_buffer_add_one(PyObject *o, PyObject *const *a);
/* fan_buffer_add_fast: the same for a plain contribution, of the arguments as they come; it comes
 * first.
 *   0: it is none, and nothing happened: fan_buffer_add_one is called */
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
/* fan_add_many_owned: fan_buffer_add_many, as fan_add_owned. */
fan_status fan_add_many_owned(fan_buffer *core, fan_contribution *c, const size_t *slots, size_t n,
                              fan_error *err);

/* ---- take.c ---- */

/* The arguments of a take, as Python gives them. Zeroed: all slots, and nothing is given. */
typedef struct fan_take_args {
    const size_t *only;              /* the one slot that is taken; NULL: all */
    PyObject *slot_names;            /* for messages; NULL: the slots have none */
    fan_stream *stream;              /* the consumer's; NULL: the buffer's */
    PyObject *out, *scale, *weights; /* NULL or None: not given */
    /* a tuple of floats whose exact sum is the divisor of a mean; NULL: the sum of the weights is
     */
    PyObject *over;
    bool writable;
    bool mean;
} fan_take_args;
/* fan_take_list: the sums as a list, with one item where `only` is given; NULL with an exception.
 */
PyObject *fan_take_list(fan_buffer *core, const fan_take_args *args);
/* fan_plain_take_over: the means of all slots, or of one, that hold small plain sums, over a
 * divisor; NULL: the general path takes them. */
PyObject *fan_plain_take_over(buffer_object *self, const size_t *only, PyObject *out,
                              const fan_divisor *divisor);
/* fan_plain_take_only: of a buffer of one slot: the sum, which is the caller's alone. out, scale:
 * None: not given.
 *   NULL, without an exception: it is not that of plain contributions, and nothing happened */
PyObject *fan_plain_take_only(fan_buffer *core, PyObject *out, PyObject *scale);
/* fan_plain_scale_arg: reads a scale, or None; false: reading its value needs a call, or it is
 * wrong. */
bool fan_plain_scale_arg(PyObject *value, fan_take *options);
/* fan_plain_writable_now: whether `o` is an array that such a sum may be written into. */
bool fan_plain_writable_now(PyObject *o, fan_plain_kind *kind, char **data);
/* fan_buffer_take_sums: InputBuffer.take. */
PyObject *fan_buffer_take_sums(PyObject *o, PyObject *const *a);
/* fan_buffer_take_fast: the same of slots of plain contributions, as fan_buffer_add_fast. */
int fan_buffer_take_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                         PyObject **result);
/* fan_stats_wrap: a fanin.Stats, or None of a sum that is undefined or no array. */
PyObject *fan_stats_wrap(fan_buffer *core, size_t slot);

/* ---- explain ---- */

/* fan_slot_look: reads the state of a slot: *items is as long as v->items and the caller's to free.
 * Needs no interpreter. */
fan_status fan_slot_look(fan_buffer *core, size_t slot, fan_slot_view *v, fan_item_view **items,
                         fan_error *err);
/* fan_slot_text: explains it; new reference. */
PyObject *fan_slot_text(const char *buffer, size_t slot, PyObject *name, const fan_slot_view *v,
                        const fan_item_view *items);

#endif
