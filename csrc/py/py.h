/* py: what the files of this folder share. The one header with Python.h; nothing outside this folder includes it.
 *
 * Everything that Python allows to be per module lives in `fan_state`; there are no static PyObjects.
 */
#ifndef FAN_PY_PY_H
#define FAN_PY_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef NPY_NO_DEPRECATED_API
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#endif
#define PY_ARRAY_UNIQUE_SYMBOL fan_numpy_api
#ifndef FAN_PY_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <structmember.h>

#include "buffer/plain.h"
#include "device/sim/sim.h"

#include <string.h>

/* X(field, name): names that are looked up or compared often, interned once. */
#define FAN_NAME_LIST(X)                  \
    X(str_budget, "budget")               \
    X(str_key, "key")                     \
    X(str_stream, "stream")               \
    X(str_donate, "donate")               \
    X(str_copy, "copy")                   \
    X(str_out, "out")                     \
    X(str_scale, "scale")                 \
    X(str_slot, "slot")                   \
    X(str_writable, "writable")           \
    X(str_shape, "shape")                 \
    X(str_dtype, "dtype")                 \
    X(str_device, "device")               \
    X(str_accumulate, "accumulate")       \
    X(str_combine, "combine")             \
    X(str_name, "name")                   \
    X(str_is_neg, "is_neg")               \
    X(str_is_conj, "is_conj")             \
    X(str_requires_grad, "requires_grad") \
    X(str_increment_version, "increment_version")

/* X(type, field): what Python allows to be per module: a strong reference each; NULL: not looked up yet. */
#define FAN_STATE_LIST(X)                                                                                   \
    X(PyTypeObject, buffer_type)                                                                            \
    X(PyTypeObject, stream_type)                                                                            \
    X(PyTypeObject, event_type)                                                                             \
    X(PyTypeObject, graph_type)                                                                             \
    X(PyTypeObject, array_type)                                                                             \
    X(PyTypeObject, machine_type)                                                                           \
    X(PyTypeObject, trace_type)                                                                             \
    X(PyTypeObject, target_type)                                                                            \
    X(PyTypeObject, exporter_type)                                                                          \
    X(PyTypeObject, recording_type)                                                                         \
    X(PyTypeObject, function_type)                                                                          \
    X(PyTypeObject, node_type)                                                                              \
    X(PyTypeObject, leaf_type)                                                                              \
    X(PyTypeObject, edges_type)                                                                             \
    X(PyTypeObject, hook_type)                                                                              \
    X(PyTypeObject, graph_tree_type)                                                                        \
    X(PyTypeObject, graph_function_type)                                                                    \
    X(PyTypeObject, graph_step_type)                                                                        \
    X(PyObject, outcome_type) /* fanin.graph.trees.Outcome, GraphStats */                                   \
    X(PyObject, graph_stats_type)                                                                           \
    X(PyTypeObject, walk_type)                                                                              \
    X(PyTypeObject, event_count_type)                                                                       \
    X(PyObject, race_error)                                                                                 \
    X(PyObject, device_error)                                                                               \
    X(PyObject, device_oom_error)                                                                           \
    X(PyObject, capture_error)                                                                              \
    X(PyObject, dtype_error)                                                                                \
    X(PyObject, mismatch_warning)                                                                           \
    X(PyObject, foreign_stream) /* _interop.streams.foreign (fan_lazy) */                                   \
    X(PyObject, arrays)         /* the module _interop.arrays: the slow path in and out (fan_arrays) */     \
    X(PyObject, zero_type)      /* fanin.Zero (fan_lazy) */                                                 \
    X(PyObject, slot_type)      /* fanin.Slot */                                                            \
    X(PyObject, table_types)    /* a dict: types that are read by an exchange table, and how (library.c) */ \
    X(PyTypeObject, torch_type)                                                                             \
    X(PyObject, parameter_type)                                                                             \
    X(PyObject, torch_is_neg) /* torch.Tensor.is_neg, requires_grad: descriptors */                         \
    X(PyObject, torch_requires_grad)                                                                        \
    X(PyObject, torch_plain)   /* a tuple: what the exchange table reads (fan_tensor_is_plain) */           \
    X(PyObject, torch_graph)   /* torch.autograd.graph, whose increment_version counts writes */            \
    X(PyObject, stats_type)    /* fanin.Stats */                                                            \
    X(PyObject, counters_type) /* fanin.Counters */                                                         \
    X(PyObject, process_counters_type)                                                                      \
    X(PyObject, memory_of)   /* fanin._interop.sharing.memory_of: where foreign memory lies (region.c) */   \
    X(PyObject, parts_alone) /* fanin._interop.sharing.has_parts_alone: L3 (leaf.c) */                      \
    X(PyObject, masked_type) /* numpy.ma.MaskedArray */                                                     \
    X(PyObject, zero)        /* the int 0 */                                                                \
    X(PyObject, site_cache)

#define FAN_FREELIST 8
#define FAN_CALL_SITES 64
/* What a place in a code object is called (call_site.c). */
typedef struct fan_call_site_known {
    PyObject *code; /* held; NULL: there is none here */
    int at;         /* its instruction */
    char text[96];  /* "": plumbing */
} fan_call_site_known;
#define FAN_COUNTERS_ALL (sizeof(fan_counters) / sizeof(uint64_t) + 4) /* those of the pool */
typedef struct fan_state {
#define X(type, field) type *field;
    FAN_STATE_LIST(X)
#undef X
#define X(field, name) PyObject *field;
    FAN_NAME_LIST(X)
#undef X
    PyObject *ml_types[FAN_DT_COUNT];     /* scalar types of ml_dtypes, once the caller has imported it; else NULL */
    bool has_ml_types;                    /* all of them */
    const struct fan_dl_api *tables[256]; /* the exchange table of each origin (fan_origin); NULL: none is known */
    const struct fan_dl_api *torch_api;   /* how torch tensors are read without a call (dlpack.h); NULL: not known */
    uint8_t torch_origin;
    PyObject *freelist[FAN_FREELIST]; /* InputBuffers without references, for their next lives */
    unsigned nfreelist;
    Py_ssize_t counter_offsets[FAN_COUNTERS_ALL]; /* of the slots of these two classes, once `counters_known` */
    bool counters_known;
    fan_call_site_known call_sites[FAN_CALL_SITES]; /* the last ones, by a hash */
    uint64_t budget;                                /* of buffers that name none (set_options) */
    bool detect;             /* of passes that give none; nodes remember where they are made (set_options) */
    struct fan_state *older; /* of an earlier load of the module in this process, if it still lives */
} fan_state;

int fan_numpy_import(void); /* numpy.c; -1 with an exception */

/* state.c */
fan_state *fan_state_get(void);     /* the module state (the newest, if the module was loaded again); borrowed */
void fan_state_link(fan_state *st); /* makes it the newest */
void fan_state_unlink(fan_state *st);
PyObject *fan_arrays(void); /* the module _interop.arrays, borrowed; NULL with an exception */
/* fan_lazy: module.<name> into *cache; borrowed; NULL with an exception. */
PyObject *fan_lazy(PyObject **cache, const char *module, const char *name);

/* gil.c. fan_gil: may this thread call Python? A callback on an unknown thread enters first. */
typedef struct fan_gil {
    bool taken; /* by fan_gil_enter, which had to */
    PyGILState_STATE state;
} fan_gil;
bool fan_gil_held(void);
bool fan_finalizing(void);      /* the interpreter is gone or going: what others gave may be gone, too */
bool fan_gil_enter(fan_gil *g); /* false: the interpreter is gone or going: touch nothing of Python's, leak instead */
void fan_gil_leave(fan_gil *g);
/* fan_allow_threads_begin: other threads may run from here to the end; what it gives is handed on there. A thread that
 * has no GIL to give, a device's for one, gives none. */
void *fan_allow_threads_begin(void);
void fan_allow_threads_end(void *left);

static inline void fan_error_clear(fan_error *err)
{
    err->status = FAN_OK;
    err->code = 0;
    err->text[0] = '\0';
}

/* fan_word_of: a str that is held against known words, in UTF-8; "", which is none of them, where it has a NUL; NULL
 * with an exception. Lives as long as the str. */
static inline const char *fan_word_of(PyObject *text)
{
    Py_ssize_t n;
    const char *word = PyUnicode_AsUTF8AndSize(text, &n);
    return !word || strlen(word) == (size_t)n ? word : "";
}

/* errors.c. fan_raise: raises `err` and returns NULL (FAN_ERR_EXTERN: an exception is set already). A live
 * exception becomes __context__. The fields of an error about a place are attributes of its exception: object, slot,
 * slot_name, key, expected, got, each if it has it, and reason: the message without the place. */
PyObject *fan_raise(fan_status s, const fan_error *err);
/* fan_from_python: the other way: keeps the live exception where it is and returns FAN_ERR_EXTERN. */
fan_status fan_from_python(fan_error *err);
/* fan_exception_replace_place: gives a live exception about a place the message "<place>: <reason>"; `place` may be
 * NULL, after an error. */
void fan_exception_replace_place(PyObject *e, PyObject *place, PyObject *reason);
/* fan_raise_sim: fan_raise, and fanin.sim.DeadlockError for FAN_ERR_DEADLOCK. */
PyObject *fan_raise_sim(fan_status s, const fan_error *err);
/* fan_check_signals: whether a signal wants the work ended. On any thread. */
fan_status fan_check_signals(fan_error *err);
/* fan_exception_take: the live exception, taken off the thread; NULL: none. put: back again, over any that came
 * meanwhile. */
PyObject *fan_exception_take(void);
void fan_exception_put(PyObject *e);
/* fan_error_context: a prefix for messages, "grads: slot 2 (w1), key 3: ". Push and pop on one thread. */
typedef struct fan_error_context {
    const char *buffer;
    PyObject *slot_name; /* a str, or NULL; borrowed */
    Py_ssize_t slot;     /* -1: none */
    int64_t key;         /* -1: none */
    fan_stream *stream;  /* on which the imported object is ready; NULL: unknown; borrowed */
    struct fan_error_context *outer;
} fan_error_context;
void fan_error_context_push(fan_error_context *w);
void fan_error_context_pop(fan_error_context *w);
fan_stream *fan_error_context_stream(void); /* of the innermost; borrowed */
/* fan_type_text: "an int", "a list", "None": what messages call an object that is of no use; returns buf.
 * FAN_TYPE_TEXT: the same, in memory of the block around. */
const char *fan_type_text(const PyObject *o, char *buf, size_t size);
PyObject *fan_add_two(PyObject *a, PyObject *b); /* add_n([a, b]) */
#define FAN_TYPE_TEXT(o) fan_type_text((o), (char[208]){""}, 208)
/* fan_refuse: an exception of ours that begins with where; PyErr_FormatV's directives. Returns -1. */
int fan_refuse(PyObject *type, const char *fmt, ...);
int fan_refuse_error(fan_status s, const fan_error *err); /* the same for the box */

/* holds.c. fan_object_hold, _drop: a reference of the core's, on any thread; _hold_here, _drop_here: on a thread
 * that has the interpreter. fan_value_release: all that a value holds; the live exception stays. */
void fan_object_hold(void *object);
void fan_object_drop(void *object);
void fan_object_hold_here(void *object);
void fan_object_drop_here(void *object);
void fan_value_release(fan_value *v);

/* dtype.c (numpy <-> fan): */
/* fan_dtype_of_descr: FAN_DT_NONE: not ours (object, strings ..) or foreign byte order. fan_descr_of_dtype: new
 * reference; TypeError for a dtype of ml_dtypes that the caller has not imported. */
fan_dtype fan_dtype_of_descr(PyArray_Descr *d);
PyArray_Descr *fan_descr_of_dtype(fan_dtype d);
/* fan_dtype_parse: reads a NumPy dtype, torch dtype, name or type; None: FAN_DT_NONE. Returns -1 with TypeError or
 * ValueError. */
int fan_dtype_parse(PyObject *o, fan_dtype *out);
/* fan_dtype_refuse: raises DTypeError with the reason why an array of this dtype is not taken. Returns -1. */
int fan_dtype_refuse(PyArray_Descr *d, const char *what);
/* fan_dtype_needs_ml_dtypes: whether NumPy has the dtype from ml_dtypes alone, which the caller has not imported. */
bool fan_dtype_needs_ml_dtypes(fan_dtype d);

/* import.c, export.c: the one way in and out. Origins: what a gradient was. */
typedef enum fan_origin {
    FAN_FROM_CORE,
    FAN_FROM_NDARRAY,
    FAN_FROM_NUMPY_SCALAR,
    FAN_FROM_PYTHON_SCALAR,
    FAN_FROM_DEVICE_ARRAY,
    FAN_FROM_FANIN_SPARSE,
    FAN_FROM_ZERO,
    FAN_FROM_OBJECT,
    FAN_FROM_FOREIGN /* and above: index of a kind that _interop.arrays registered: torch, jax, scipy classes .. */
} fan_origin;
/* fan_import: any gradient (None too) as a value; the caller owns its holds. `recording`: A1, everything is an object.
 * `has_combine`: containers are objects. -1 with an exception set. */
int fan_import(PyObject *o, bool recording, bool has_combine, fan_value *out);
/* ---- import_plain.c: plain contributions (buffer/plain.h); all inside the interpreter ---- */

/* fan_plain_import: the kind and the address of a plain contribution; false, without an exception: it is none. Runs no
 * Python code. fan_plain_import_as: with `gaps`, also of an array that has gaps along one axis, for a buffer's list
 * alone. fan_plain_is_unchanged: whether one is what it was when it came: memory, dtype, shape. */
bool fan_plain_import_as(PyObject *o, bool gaps, fan_plain_kind *kind, char **data);
static inline bool fan_plain_import(PyObject *o, fan_plain_kind *kind, char **data)
{
    return fan_plain_import_as(o, false, kind, data);
}
bool fan_plain_is_unchanged(PyObject *o, const fan_plain_kind *kind, const char *data);
/* fan_plain_has_own_value: of one whose kind is checked at use: whether its memory holds its value.
 * fan_plain_is_detached: whether it requires no gradient of its own. */
bool fan_plain_has_own_value(PyObject *o);
bool fan_plain_is_detached(PyObject *o);
/* fan_tensor_on_cpu: dtype and shape, which live as long as it does, of a torch tensor on the CPU, whatever its layout;
 * false: it is none, or complex. */
bool fan_tensor_on_cpu(PyObject *o, fan_dtype *dtype, int *ndim, const int64_t **shape);
/* fan_plain_writable: whether its memory may be written. */
bool fan_plain_writable(PyObject *o, const fan_plain_kind *kind);
/* fan_plain_fresh: an array of the kind that `first` is of, to write a sum into, and where its first element is; NULL:
 * with an exception, or, without one, it is no plain one. */
PyObject *fan_plain_fresh(PyObject *first, const fan_plain_kind *kind, char **data);
/* fan_plain_number: the number of a kind (fan_plain_kind.scalar) whose value is at `value`; new reference. */
PyObject *fan_plain_number(const fan_plain_kind *kind, const char *value);
/* fan_plain_copy: a fresh one with the same elements, and where they are; NULL, without an exception: not by the short
 * way. */
PyObject *fan_plain_copy(PyObject *o, const fan_plain_kind *kind, char **data);
/* fan_owner_has: whether the bytes [lo, hi) lie in the memory that the owner of a view has now:
 * `ndarray.resize(refcheck=False)` may have moved or cut it. True where the owner cannot be read. */
bool fan_owner_has(PyObject *view, const char *lo, const char *hi);

/* ---- import*.c, export.c, library.c ---- */

/* fan_value_is_unchanged: the frontend's is_unchanged. */
bool fan_value_is_unchanged(const fan_value *v);
/* fan_library_stream: the current stream of the library that owns a gradient on a CUDA device, as S4 requires: a
 * hold; NULL: there is none, or a stream was made the current one by the caller. `last`: one that was read in the same
 * call and may be meant again; NULL: none. -1 with an exception. */
int fan_library_stream(const fan_value *v, fan_stream *last, fan_stream **out);
/* fan_import_object: what a combine or an operator gave: an object whatever it is. */
int fan_import_object(PyObject *o, fan_value *out);
/* fan_import_out: a writable array to write a sum into (out=). BufferError if it cannot be written. */
int fan_import_out(PyObject *o, fan_value *out);
/* fan_export: new reference to what Python gets for a value: its own object, or an array of the value's origin. Takes
 * the value's holds, errors too. */
PyObject *fan_export(fan_value *v);
/* ndarray.c. fan_export_array: a host array as an ndarray over the same memory, or as a handle (fan_wants_handles);
 * takes a hold of its own. fan_ndarray_over: an ndarray in any case, over memory that `base` keeps. */
#define FAN_ARRAY_CAPSULE "fanin.array" /* the base of such an ndarray: has the array */
PyObject *fan_export_array(fan_array *a);
PyObject *fan_ndarray_over(const fan_array *a, bool write, PyObject *base);
/* fan_ndarray_extent: the bytes that an ndarray shows. */
void fan_ndarray_extent(PyObject *o, const char **lo, size_t *bytes);
/* fan_ndarray_check_known: 0, or -1 with CaptureError where a function of a graph tree on the CPU is warmed up or
 * recorded on this thread, and an ndarray that it uses is neither memory of the tree nor of an operand that stays where
 * it is: a recording could not find it again. `op`: the operation that uses it. */
int fan_ndarray_check_known(PyObject *o, const char *op);
#define FAN_KERNEL_MEMORY "fanin.storage" /* the capsule under the views that a kernel is called with */
/* fan_visit_behind: tp_traverse of what holds o, as the value v (NULL: with one reference): visits what o keeps alive
 * where the collector cannot visit it: it skips ndarrays, so we visit the base of one without other references.
 */
int fan_visit_behind(PyObject *o, const fan_value *v, visitproc visit, void *arg);
/* fan_alone: with just these references, as far as can be seen: whose memory goes when they go. A view of an ndarray
 * without other references counts, too. */
bool fan_alone(PyObject *o, Py_ssize_t refs);
/* fan_only_ours: an ndarray that owns its memory and has just these references: no view, no buffer of another and no
 * weak reference leads to it, and no other code can make one. */
bool fan_only_ours(PyObject *o, Py_ssize_t refs);
/* target.c: the context of InputBuffer.target. */
PyObject *fan_target_new(PyObject *buffer, size_t slot, int64_t key, fan_stream *stream);
void fan_buffer_freelist_free(fan_state *st);
PyObject *fan_buffer_call(PyObject *type, PyObject *const *args, size_t nargsf,
                          PyObject *kwnames); /* InputBuffer's vectorcall; Node's, Leaf's: */
PyObject *fan_node_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames);
PyObject *fan_leaf_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames);
/* fan_fresh: an array allocated by the library of an origin (value.h: fresh). */
fan_status fan_fresh(uint8_t origin, fan_device *d, fan_stream *on, fan_dtype dtype, int ndim, const int64_t *shape,
                     const fan_array *like, fan_array **out, fan_error *err);
extern const fan_frontend fan_python; /* the frontend of every buffer made from Python */

/* fan_index: an exact integer: bool is a TypeError, a negative one an exception of class `negative`; NULL: *out is -1
 * then, as for one that 64 bits do not hold. `what` begins the message. -1 with an exception. */
int fan_index(PyObject *o, const char *what, PyObject *negative, int64_t *out);

/* handles.c */
/* fan_stream_arg: a stream from whatever is one (fanin.Stream, torch's, CuPy's, anything with __cuda_stream__:
 * _interop.streams.foreign); None: NULL. A hold in *out. -1: TypeError where it is no stream. */
int fan_stream_arg(PyObject *o, fan_stream **out);
PyObject *fan_stream_wrap(fan_stream *s); /* new reference; takes a hold of its own */
PyObject *fan_event_wrap(fan_event *e);
fan_event *fan_event_arg(PyObject *o); /* borrowed; NULL without exception if o is no Event */
/* backends.c. fan_device_arg: "cpu", "sim:0" (innermost machine entered on this thread); None: NULL. A hold in *out. */
int fan_device_arg(PyObject *o, fan_device **out);

/* handles.c: fanin's own array on a device. */
PyObject *fan_array_wrap(fan_array *a, fan_device *d); /* takes holds of its own */
fan_array *fan_array_arg(PyObject *o, fan_device **d); /* borrowed; NULL without exception if o is none */
/* fan_handles_begin, _end: around a function of a graph tree on the CPU: on this thread the core returns handles, whose
 * work can be recorded. fan_wants_handles: whether the thread is inside such a function, or `a` (may be NULL) is memory
 * of a tree. */
typedef struct fan_handles_scope {
    const char *function;
    fan_array *const *in; /* its operands; NULL: no array */
    size_t n;
    bool (*stays)(const struct fan_handles_scope *s, size_t i); /* whether operand i stays where it is */
    const char *foreign;  /* the message for other memory, a format: the function, the operation */
    const uint8_t *roles; /* of each operand, or one for all: what `stays` reads */
    bool each;
} fan_handles_scope;

void fan_handles_begin(const fan_handles_scope *scope);
void fan_handles_end(const fan_handles_scope *scope);
/* fan_handles_outermost: the scope of the outermost function on this thread, which records all work; NULL: none. */
const fan_handles_scope *fan_handles_outermost(void);
/* fan_kernel_running_set: the name of the kernel of tape.compiled that this thread runs from now on, borrowed; NULL:
 * none. Returns the one before. leaf.c. */
PyObject *fan_kernel_running_set(PyObject *name);
bool fan_wants_handles(const fan_array *a);
/* fan_array_usable: 0, or -1 with an exception if the array's memory was lent and has been taken back. */
int fan_array_usable(const fan_array *a);

/* call_site.c: "file.py:31" of the innermost frame outside fanin, of the calling thread. */
void fan_call_site(char *buf, size_t size);
void fan_call_site_forget(fan_state *st); /* before the state goes */

/* Every type's file offers its spec; module.c adds them in order. */
extern PyType_Spec fan_buffer_spec, fan_stream_spec, fan_event_spec, fan_array_spec, fan_machine_spec, fan_graph_spec,
    fan_trace_spec, fan_exporter_spec, fan_target_spec, fan_recording_spec, fan_graph_tree_spec,
    fan_graph_function_spec, fan_graph_step_spec, fan_function_spec, fan_node_spec, fan_leaf_spec, fan_edges_spec,
    fan_hook_spec, fan_backward_walk_spec, fan_event_count_spec;
/* Functions of the module, one table per file, joined in module.c. */
/* fan_budget_arg: a number of bytes, math.inf for no bound. -1 with an exception. fan_buffer_budget_arg: or "auto". */
int fan_budget_arg(PyObject *o, uint64_t *out);
int fan_buffer_budget_arg(PyObject *o, uint64_t *out);
PyObject *fan_budget_wrap(uint64_t budget);         /* "auto", a number or math.inf */
PyObject *fan_counters_wrap(const fan_counters *n); /* a fanin.Counters */
PyObject *fan_process_counters(void);               /* a fanin.options.ProcessCounters */
extern PyMethodDef fan_add_n_functions[], fan_collector_functions[], fan_stream_functions[], fan_machine_functions[],
    fan_options_functions[], fan_exchange_functions[], fan_overlap_functions[], fan_analysis_functions[],
    fan_cuda_functions[], fan_backends_functions[], fan_pass_functions[], fan_walk_functions[],
    fan_cpu_kernel_functions[], fan_window_functions[], fan_ranks_functions[];
/* fan_cuda_compile_in_python: kernels that a device lacks are compiled by fanin._kernels from now on. */
void fan_cuda_compile_in_python(void);
#ifdef FAN_TEST
extern PyMethodDef fan_test_functions[];
#endif
int fan_c_api_add(PyObject *m); /* c_api.c; -1 with an exception */

#endif
