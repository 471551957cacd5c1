/* node_object: what the engine's files in this folder share (csrc/engine). */
#ifndef FAN_PY_NODE_OBJECT_H
#define FAN_PY_NODE_OBJECT_H

#include "base/fault.h"
#include "engine/leaf.h"
#include "engine/engine.h"
#include "py/buffer/buffer_object.h"
#include "py/engine/c_function.h"
#include "py/arrays/objects.h"

typedef enum fan_hook_when {
    FAN_HOOK_SLOT,
    FAN_HOOK_PRE,
    FAN_HOOK_POST,
    FAN_HOOK_TIMES
} fan_hook_when;

/* Rare fields of a node, allocated at first use. */
typedef struct node_more {
    fan_slot_specs slots; /* the declarations; specs NULL: none */
    /* of the slots: a tuple of str or None; NULL: no slot has a name */
    PyObject *names;
    PyObject *group; /* nodes with the same one run one at a time; NULL: none */
    /* tuples of pairs (function, slot); NULL: none. Replaced, never changed */
    PyObject *hooks[FAN_HOOK_TIMES];
    /* where it was made, "file.py:3"; NULL: without set_options(detect=True) */
    PyObject *call_site;
    PyObject *kept; /* retain_grad: {slot: sum so far, or None}; NULL: no slot */
    /* a tuple: memory for the sums of its slots (S22); NULL: fresh */
    PyObject *out_buffers;
    bool boxed; /* its function gets a list of its sums, and owns them */
} node_more;

typedef struct node_object {
    PyObject_HEAD PyObject *fn; /* NULL: of a leaf, and after the graph was freed */
    node_more *more;            /* may be NULL */
    fan_node node;
    PyObject *name;    /* a str; NULL: none */
    PyObject *release; /* NULL: none, or already called */
    PyObject *weakrefs;
} node_object;

typedef struct leaf_object {
    node_object base;
    PyObject *array;      /* None: with like= */
    PyObject *grad;       /* NULL: None */
    PyObject *accumulate; /* a function; NULL: none */
    PyObject *divert;     /* where the sums go meanwhile, as leaves_divert has it; NULL: to .grad */
    PyObject *wide;       /* an InputBuffer that sums over passes; NULL: none */
    PyObject *wide_slots; /* .. its declarations */
    bool stale;           /* .. `grad` lacks its newest sums */
    bool arrays;          /* of an array: .grad is an array that is added to in place */
    bool outside;         /* the gradient is array.grad (torch) */
    fan_leaf_claim claim;
} leaf_object;

static inline node_object *fan_node_object(const fan_node *n)
{
    return (node_object *)(void *)((char *)(uintptr_t)n - offsetof(node_object, node));
}

/* fan_node_is_boxed: whether its function gets a list (boxed=True). */
static inline bool fan_node_is_boxed(const node_object *self)
{
    return self->more && self->more->boxed;
}

/* fan_node_specs: the declarations of its slots. NULL: it declares nothing. */
static inline fan_slot_spec *fan_node_specs(const fan_node *n)
{
    const node_more *more = fan_node_object(n)->more;
    if (!more)
        return NULL;
    return more->slots.specs;
}

/* ---- guard.c ---- */

/* A sum with other references, during a function that must not write it. */
typedef struct fan_guard {
    PyObject *object; /* an ndarray or a torch tensor; borrowed */
    bool tensor;
    struct fan_guard *outer; /* of an ndarray */
    bool gives_back;         /* .. whose WRITEABLE flag is set again at the end */
    long long version;       /* of a tensor, at the beginning */
    uint32_t slot;
} fan_guard;

#define FAN_GUARDS_INSIDE 2

typedef struct fan_guards {
    uint32_t n;
    fan_guard inside[FAN_GUARDS_INSIDE];
    fan_guard *more;
} fan_guards;

/* of ndarrays, on all threads, the newest first (engine/node.h, One thread at a time) */
extern fan_guard *fan__guards;
/* a single writable array with other references */
void fan__guard_array(fan_guards *all, PyArrayObject *a);
int fan__guards_begin(fan_guards *all, void *const *sums, uint32_t n);
int fan__guards_end(fan_guards *all, const fan_node *n);

/* fan_guards_shared: a list of the objects that are guarded, which lives as long as they must;
 * NULL with an exception. */
PyObject *fan_guards_shared(const fan_guards *all);

/* fan_guards_begin: guards, until fan_guards_end, those of these objects that have references
 * besides the caller's one; skips NULLs. *all must not move meanwhile.
 *   0: begun
 *   -1, with an exception: there is nothing to end
 * fan_guards_end:
 *   0: ended; an exception that is live already stays
 *   -1, with an exception: a tensor was written
 * The inline part is the usual case: one ndarray. */
static inline int fan_guards_begin(fan_guards *all, void *const *sums, uint32_t n)
{
    if (n != 1 || !sums[0])
        return fan__guards_begin(all, sums, n);
    PyArrayObject *a = sums[0];
    if (fan_is_unboxed(a) || !PyArray_CheckExact((PyObject *)a))
        return fan__guards_begin(all, sums, n);
    if (!PyArray_CHKFLAGS(a, NPY_ARRAY_WRITEABLE) || FAN_FAULT(SUM_UNGUARDED))
        return fan__guards_begin(all, sums, n);
    bool shared = Py_REFCNT(a) > 1;
    if (!shared && PyArray_BASE(a))
        return fan__guards_begin(all, sums, n);
    all->n = 0;
    if (shared)
        fan__guard_array(all, a);
    return 0;
}
static inline int fan_guards_end(fan_guards *all, const fan_node *n)
{
    if (!all->n)
        return 0;
    if (fan__guards != &all->inside[0] || all->inside[0].outer || all->n > 1)
        return fan__guards_end(all, n);
    all->n = 0; /* the only guard of the process */
    fan__guards = NULL;
    if (all->inside[0].gives_back)
        PyArray_ENABLEFLAGS((PyArrayObject *)all->inside[0].object, NPY_ARRAY_WRITEABLE);
    return 0;
}

/* ---- hooks.c ---- */

/* fan_gradients_of: the gradients in the result of a function or post-hook, one hold per edge (V1);
 * takes `result`. Messages begin with `who`; NULL: the node's name. */
int fan_gradients_of(PyObject *result, const fan_node *n, const char *who, void **gradients,
                     uint32_t ngradients);

node_more *fan_node_more(node_object *self); /* allocates it if needed; NULL with an exception */

/* fan_hooks_add: a new HookHandle. */
PyObject *fan_hooks_add(node_object *owner, PyObject *fn, fan_hook_when when, uint32_t slot);
/* fan_hooks_remove: removes its pair, if it is there; None, or NULL with an exception. */
PyObject *fan_hooks_remove(node_object *owner, PyObject *hook);
/* fan_hooks_sums: fan_engine_frontend.hooks. The others: -1 with an exception; node_hooks: as of
 * fan_hooks_sums. */
fan_status fan_hooks_sums(fan_node *n, void **sums, void **node_hooks, fan_error *err);
int fan_hooks_of_node(node_object *self, void **node_hooks);
int fan_hooks_pre(node_object *self, PyObject *node_hooks, void **sums);
int fan_hooks_post(node_object *self, PyObject *node_hooks, void **sums, void **gradients,
                   uint32_t ngradients);
int fan__hooks_accumulated(node_object *self, PyObject *node_hooks);
static inline int fan_hooks_accumulated(node_object *self, PyObject *node_hooks)
{
    if (!node_hooks)
        return 0;
    return fan__hooks_accumulated(self, node_hooks);
}
/* fan_hooks_produced: whether a post-hook returned the gradient. */
bool fan_hooks_produced(const void *node_hooks, uint32_t index);
/* fan_from_hook: a prefix for messages about such a gradient. */
static inline const char *fan_from_hook(const fan_producer *producer)
{
    if (producer->from_hook)
        return "a post-hook of ";
    return "";
}

/* ---- node.c ---- */

/* fan_node_declare: slots=: as many as *inputs; if that is 0, sets *inputs to their number. */
int fan_node_declare(node_object *self, PyObject *slots, uint32_t *inputs);
/* fan_node_place: sets its stream: stream=, device=, else of the device that `slots` (or NULL)
 * declare, else the current one. */
int fan_node_place(node_object *self, PyObject *stream, PyObject *device, PyObject *slots);
/* fan_node_set_name: 0, or -1 with an exception. */
int fan_node_set_name(node_object *self, PyObject *name);
PyObject *fan_node_get_stream(PyObject *o, void *closure);
/* fan_node_arg: a Node or a Leaf, borrowed; NULL, without an exception, of anything else. */
node_object *fan_node_arg(PyObject *o);
int fan_node_release(node_object *self);
/* Shared by Node and Leaf: */
void fan_node_text(const fan_node *n, char *buf, size_t size);
bool fan_node_is_numbered(const fan_node *n); /* it was given no name */
/* fan_node_new: for the C API: edges to Nodes, Leaves or NULL; new reference. */
PyObject *fan_node_new(function_object *fn, const fanin_edge *edges, size_t nedges, PyObject *name);
void fan_node_hold(fan_node *n);
void fan_node_drop(fan_node *n);
int fan_node_traverse(PyObject *o, visitproc visit, void *arg);
int fan_node_clear(PyObject *o);
void fan_node_dealloc(PyObject *o);
void fan_node_free_parts(node_object *self); /* and the object */
PyObject *fan_node_get_name(PyObject *o, void *closure);
PyObject *fan_node_get_number(PyObject *o, void *closure);
PyObject *fan_node_register_hook(PyObject *o, PyObject *const *a);

/* fan_node_buffer: a new buffer for a node's gradients, with the stream (NULL: the current one),
 * create_graph (A1), stats (E11) and budget of `config`; NULL with an exception. */
buffer_object *fan_node_buffer(const node_object *n, fan_buffer_config config);

typedef struct fan_node_sum_options {
    PyObject *out;     /* where the sum is written; NULL: a new object */
    bool writable;     /* the sum shares no memory with the gradients */
    bool create_graph; /* the sum is recorded (A1, L6) */
    fan_weight weight; /* multiplies the last of the gradients (W1) */
} fan_node_sum_options;
/* fan_node_sum: the sum of one or two gradients (NULL: one) of a slot, by a buffer of the node's
 * slots. New reference, or NULL with an exception. */
PyObject *fan_node_sum(const node_object *n, size_t slot, PyObject *one, PyObject *two,
                       fan_node_sum_options options);

/* ---- leaf.c ---- */

/* fan_leaf_accumulate: may take *sum, and sets it to NULL then, or replace it. recording: L6.
 * weight: multiplies the sum (W8). */
int fan_leaf_accumulate(leaf_object *self, void **sum, bool recording, fan_weight weight);
/* fan_leaf_divert: gives the sum to `divert`; may take it, and sets *sum to NULL then. */
int fan_leaf_divert(leaf_object *self, void **sum);
/* fan_leaf_grad_now: .grad of a leaf without accumulate=; new reference; NULL: none, or an
 * exception. */
PyObject *fan_leaf_grad_now(leaf_object *self);

/* ---- explain.c ---- */

fan_status fan_explain_read_stats(void *buffer, uint32_t slot, fan_nonfinite *found,
                                  fan_error *err);
fan_status fan_explain_nonfinite(const fan_nonfinite *found, const fan_producer *producer,
                                 fan_error *err);
/* fan_explain_pass: fan_pass_explain as a str; NULL with an exception. */
PyObject *fan_explain_pass(const fan_pass *pass, const fan_node *only);
/* fan_error_take, fan_error_both, fan_error_orphaned: see fan_engine_frontend. */
void *fan_error_take(const fan_pass *pass, const fan_node *n, uint32_t ran, fan_status status,
                     const fan_error *err);
void *fan_error_both(void *first, void *second);
void fan_error_orphaned(void *error);
/* fan_py_pass_failed: raises the error, with notes: where the pass ended, and which gradients are
 * lost (E14). */
void fan_py_pass_failed(const fan_pass *pass, fan_status status, const fan_error *err);

/* ---- carry.c, pass.c ---- */

/* fan_digest: see fan_engine_frontend. */
void fan_digest(void *object, fan_stream *on, uint64_t known, fan_trace_line *line);

extern const fan_engine_frontend fan_python_engine;

/* The parameters of backward and, but for the last two, grad, and, but for the last three, walk, as
 * core.pyi declares them. */
enum {
    FAN_PASS_ROOTS,
    FAN_PASS_INPUTS,
    FAN_PASS_KEEP_GRAPH,
    FAN_PASS_CREATE_GRAPH,
    FAN_PASS_DETECT,
    FAN_PASS_SCHEDULE,
    FAN_PASS_PROGRESS,
    FAN_PASS_ONE,
    FAN_PASS_BUDGET,
    FAN_PASS_WORKERS,
    FAN_PASS_REDUCER,
    FAN_PASS_WEIGHT,
    FAN_PASS_ARGS
};

/* fan_py_pass_begin: begins a pass with the arguments of a call; NULL with an exception. */
fan_pass *fan_py_pass_begin(const char *call, PyObject *const *a, size_t *nwanted);
/* fan_py_pass_run: runs a pass: 0, or -1 with an exception. */
int fan_py_pass_run(fan_pass *pass);
/* fan_py_pass_end: ends and frees it (NULL: nothing); a live exception stays. */
void fan_py_pass_end(fan_pass *pass);

#endif
