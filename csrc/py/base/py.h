/* py: what the files of this folder share. The one header with Python.h; nothing outside this
 * folder includes it.
 *
 * Everything that Python allows to be per module lives in `fan_state`; there are no static
 * PyObjects. */
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
#include "base/thread.h"
#include "device/device.h"

#include <string.h>

/* X(field, name): names that are looked up or compared often, interned once. */
#define FAN_NAME_LIST(X)                  \
    X(str_budget, "budget")               \
    X(str_key, "key")                     \
    X(str_stream, "stream")               \
    X(str_donate, "donate")               \
    X(str_copy, "copy")                   \
    X(str_weight, "weight")               \
    X(str_mean, "mean")                   \
    X(str_out, "out")                     \
    X(str_scale, "scale")                 \
    X(str_slot, "slot")                   \
    X(str_writable, "writable")           \
    X(str_shape, "shape")                 \
    X(str_dtype, "dtype")                 \
    X(str_device, "device")               \
    X(str_accumulate, "accumulate")       \
    X(str_combine, "combine")             \
    X(str_partial, "partial")             \
    X(str_name, "name")                   \
    X(str_is_neg, "is_neg")               \
    X(str_is_conj, "is_conj")             \
    X(str_requires_grad, "requires_grad") \
    X(str_begin, "_begin")                \
    X(str_end, "_end")                    \
    X(str_reduced, "_reduced")            \
    X(str_increment_version, "increment_version")

/* X(type, field): what Python allows to be per module: a strong reference each; NULL: not looked up
 * yet. */
#define FAN_STATE_LIST(X)                                                                          \
    X(PyTypeObject, buffer_type)                                                                   \
    X(PyTypeObject, stream_type)                                                                   \
    X(PyTypeObject, event_type)                                                                    \
    X(PyTypeObject, array_type)                                                                    \
    X(PyTypeObject, machine_type)                                                                  \
    X(PyTypeObject, trace_type)                                                                    \
    X(PyTypeObject, target_type)                                                                   \
    X(PyTypeObject, exporter_type)                                                                 \
    X(PyTypeObject, function_type)                                                                 \
    X(PyTypeObject, node_type)                                                                     \
    X(PyTypeObject, leaf_type)                                                                     \
    X(PyObject, edges_type) /* fanin._engine.Edges, HookHandle (fan_lazy) */                       \
    X(PyObject, hook_type)                                                                         \
    X(PyTypeObject, graph_tree_type)                                                               \
    X(PyTypeObject, graph_function_type)                                                           \
    X(PyTypeObject, graph_step_type)                                                               \
    X(PyTypeObject, graph_pipeline_type)                                                           \
    X(PyTypeObject, walk_type)                                                                     \
    X(PyTypeObject, event_count_type)                                                              \
    X(PyTypeObject, block_type)                                                                    \
    X(PyObject, race_error)                                                                        \
    X(PyObject, device_error)                                                                      \
    X(PyObject, device_oom_error)                                                                  \
    X(PyObject, capture_error)                                                                     \
    X(PyObject, dtype_error)                                                                       \
    X(PyObject, deadlock_error) /* fanin.sim.DeadlockError (fan_lazy) */                           \
    X(PyObject, mismatch_warning)                                                                  \
    X(PyObject, foreign_stream) /* _interop.streams.foreign (fan_lazy) */                          \
    X(PyObject, arrays)    /* the module _interop.arrays: the slow path in and out (fan_arrays) */ \
    X(PyObject, zero_type) /* fanin.Zero (fan_lazy) */                                             \
    X(PyObject, partial_type) /* fanin.Partial (fan_lazy) */                                       \
    X(PyObject, slot_type)    /* fanin.Slot */                                                     \
    X(PyObject,                                                                                    \
      table_types) /* a dict: types that are read by an exchange table, and how (library.c) */     \
    X(PyTypeObject, torch_type)                                                                    \
    X(PyObject, parameter_type)                                                                    \
    X(PyObject, torch_is_neg) /* torch.Tensor.is_neg, requires_grad: descriptors */                \
    X(PyObject, torch_requires_grad)                                                               \
    X(PyObject, torch_plain)   /* a tuple: what the exchange table reads (fan_tensor_is_plain) */  \
    X(PyObject, torch_graph)   /* torch.autograd.graph, whose increment_version counts writes */   \
    X(PyObject, stats_type)    /* fanin.Stats */                                                   \
    X(PyObject, counters_type) /* fanin.Counters */                                                \
    X(PyObject, process_counters_type)                                                             \
    X(PyObject,                                                                                    \
      memory_of) /* fanin._interop.sharing.memory_of: where foreign memory lies (region.c) */      \
    X(PyObject, parts_alone) /* fanin._interop.sharing.has_parts_alone: L3 (leaf.c) */             \
    X(PyObject, masked_type) /* numpy.ma.MaskedArray */                                            \
    X(PyObject, zero)        /* the int 0 */                                                       \
    X(PyObject, site_cache)

#define FAN_FREELIST 8
#define FAN_CALL_SITES 64
/* The name of a place in a code object (call_site.c). */
typedef struct fan_call_site_known {
    PyObject *code; /* held; NULL: there is none here */
    int at;         /* its instruction */
    char text[96];  /* "": plumbing */
} fan_call_site_known;
typedef struct fan_state {
#define X(type, field) type *field;
    FAN_STATE_LIST(X)
#undef X
#define X(field, name) PyObject *field;
    FAN_NAME_LIST(X)
#undef X
    /* scalar types of ml_dtypes, once the caller has imported it; else NULL */
    PyObject *ml_types[FAN_DT_COUNT];
    bool has_ml_types; /* all of them */
    /* the exchange table of each origin (fan_origin); NULL: none is known */
    const struct fan_dl_api *tables[256];
    /* how torch tensors are read without a call (dlpack.h); NULL: not known */
    const struct fan_dl_api *torch_api;
    uint8_t torch_origin;
    PyObject *freelist[FAN_FREELIST]; /* InputBuffers without references, for their next lives */
    unsigned nfreelist;
    fan_call_site_known call_sites[FAN_CALL_SITES]; /* the last ones, by a hash */
    uint64_t budget;                                /* of buffers that name none (set_options) */
    /* of passes that give none; nodes remember where they are made (set_options) */
    bool detect;
    /* of an earlier load of the module in this process, if it still lives */
    struct fan_state *older;
} fan_state;

int fan_numpy_import(void); /* state.c; -1 with an exception */

/* ---- state.c ---- */

/* fan_state_get: the module state (the newest, if the module was loaded again); borrowed. */
fan_state *fan_state_get(void);
/* fan_state_link: makes a state the newest. */
void fan_state_link(fan_state *st);
/* fan_state_unlink: forgets a state. */
void fan_state_unlink(fan_state *st);
/* fan_arrays: the module _interop.arrays, borrowed; NULL with an exception. */
PyObject *fan_arrays(void);
/* fan_module_loaded: a module that has been imported; borrowed; NULL, without an exception: it has
 * not. */
PyObject *fan_module_loaded(const char *name);
/* fan_imported: module.<name>; name: NULL: the module; new reference; NULL with an exception. */
PyObject *fan_imported(const char *module, const char *name);
/* fan_lazy: module.<name> into *cache; borrowed; NULL with an exception. */
PyObject *fan_lazy(PyObject **cache, const char *module, const char *name);
/* fan_call: calls module.<name> with a tuple, as Py_BuildValue formats it; new reference; NULL with
 * an exception. */
PyObject *fan_call(const char *module, const char *name, const char *format, ...);

/* fan_gil: may this thread call Python? A callback on an unknown thread enters first. */
typedef struct fan_gil {
    bool taken; /* by fan_gil_enter, which had to */
    bool left;  /* a buffer of the C API is unlocked meanwhile (api_lock.h) */
    PyGILState_STATE state;
} fan_gil;
bool fan_gil_held(void);
/* fan_finalizing: whether the interpreter is gone or going: objects of others may be gone, too. */
bool fan_finalizing(void);
/* fan_gil_enter: takes the GIL. false: the interpreter is gone or going: use nothing of Python,
 * leak instead. */
bool fan_gil_enter(fan_gil *g);
/* fan_gil_leave: releases the GIL, if fan_gil_enter took it. */
void fan_gil_leave(fan_gil *g);
/* fan_allow_threads_begin: other threads may run from here to the end, which gets the result. A
 * thread that has no GIL to release, a device's for one, releases none, and then NULL is
 * returned. */
void *fan_allow_threads_begin(void);
void fan_allow_threads_end(void *left);

static inline void fan_error_clear(fan_error *err)
{
    err->status = FAN_OK;
    err->code = 0;
    err->text[0] = '\0';
}

/* fan_word_of: a str to compare with words, in UTF-8; "", which is none of them, where it has a
 * NUL; NULL with an exception. Lives as long as the str. */
static inline const char *fan_word_of(PyObject *text)
{
    Py_ssize_t n;
    const char *word = PyUnicode_AsUTF8AndSize(text, &n);
    if (word && strlen(word) != (size_t)n)
        return "";
    return word;
}

/* errors.c. fan_raise: raises `err` and returns NULL (FAN_ERR_EXTERN: an exception is set already).
 * A live exception becomes __context__. The fields of an error about a place are attributes of its
 * exception: object, slot, slot_name, key, expected, got, each if it has it, and reason: the
 * message without the place. */
PyObject *fan_raise(fan_status s, const fan_error *err);
/* fan_check: 0, or -1 with the exception. */
static inline int fan_check(fan_status s, const fan_error *err)
{
    if (s == FAN_OK)
        return 0;
    (void)fan_raise(s, err);
    return -1;
}
/* fan_done: None, or NULL with the exception. */
static inline PyObject *fan_done(fan_status s, const fan_error *err)
{
    if (s == FAN_OK)
        return Py_NewRef(Py_None);
    return fan_raise(s, err);
}
/* FAN_CHECK, FAN_DONE: fan_check and fan_done of a call of the core, which gets `&err`. _UNLOCKED:
 * other threads of Python's run meanwhile. */
#define FAN_CHECK(call)                  \
    __extension__({                      \
        FAN_UNINITIALIZED fan_error err; \
        fan_error_clear(&err);           \
        fan_status called = (call);      \
        fan_check(called, &err);         \
    })
#define FAN_CHECK_UNLOCKED(call)                   \
    __extension__({                                \
        FAN_UNINITIALIZED fan_error err;           \
        fan_error_clear(&err);                     \
        PyThreadState *left = PyEval_SaveThread(); \
        fan_status called = (call);                \
        PyEval_RestoreThread(left);                \
        fan_check(called, &err);                   \
    })
#define FAN_DONE(call) (FAN_CHECK(call) < 0 ? NULL : Py_NewRef(Py_None))
#define FAN_DONE_UNLOCKED(call) (FAN_CHECK_UNLOCKED(call) < 0 ? NULL : Py_NewRef(Py_None))
/* fan_from_python: the other way: keeps the live exception where it is and returns
 * FAN_ERR_EXTERN. */
fan_status fan_from_python(fan_error *err);
/* fan_check_signals: whether a signal wants the work ended. On any thread. */
fan_status fan_check_signals(fan_error *err);
/* fan_exception_take: the live exception, taken off the thread; NULL: none. put: back again, over
 * any that came meanwhile. */
PyObject *fan_exception_take(void);
void fan_exception_put(PyObject *e);
/* fan_exception_note: adds a note to an exception that has not the same one; takes the reference to
 * a str, NULL: none. Where that fails, the exception stays as it is. */
void fan_exception_note(PyObject *e, PyObject *note);
/* fan_error_context: a prefix for messages, "grads: slot 2 (w1), key 3: ". Push and pop on one
 * thread. */
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
/* fan_error_producer: names the source of a gradient (V3). While it is pushed, errors of this
 * thread about a slot of `buffer` begin with its text, "Mul returned an invalid gradient at index
 * 0", instead of the slot. */
typedef struct fan_error_producer {
    const char *buffer; /* the name of the buffer to which the gradient is added; borrowed */
    void (*text)(const void *source, char *buf, size_t size);
    const void *source;
    const struct fan_error_producer *outer;
} fan_error_producer;
void fan_error_producer_push(fan_error_producer *p);
void fan_error_producer_pop(const fan_error_producer *p);
/* fan_type_text: "an int", "a list", "None": what messages call an object that is of no use;
 * returns buf. FAN_TYPE_TEXT: the same, in memory of the block around. */
const char *fan_type_text(const PyObject *o, char *buf, size_t size);
#define FAN_TYPE_TEXT(o) fan_type_text((o), (char[208]){""}, 208)
/* fan_refuse: an exception of ours that begins with where; PyErr_FormatV's directives. Returns
 * -1. */
int fan_refuse(PyObject *type, const char *fmt, ...);
int fan_refuse_error(fan_status s, const fan_error *err); /* the same for the box */
/* fan_set_error: PyErr_Format that returns -1. */
int fan_set_error(PyObject *type, const char *fmt, ...);
/* fan_iteration_failed: Replaces a live exception of the class `end`, which Python would take for
 * the end of the iteration, by a RuntimeError with that exception as its cause, as a generator
 * does. */
void fan_iteration_failed(const char *iteration, PyObject *end);

/* FAN_DEALLOC: tp_dealloc: the statement ends what `o` has. */
#define FAN_DEALLOC(name, statement)     \
    static void name(PyObject *o)        \
    {                                    \
        PyTypeObject *type = Py_TYPE(o); \
        statement;                       \
        type->tp_free(o);                \
        Py_DECREF(type);                 \
    }

/* fan_or_none: the object, or None for NULL; borrowed. */
static inline PyObject *fan_or_none(void *object)
{
    if (object)
        return (PyObject *)object;
    return Py_None;
}
/* fan_take_or_none: as fan_or_none, but takes a reference and returns one. */
static inline PyObject *fan_take_or_none(void *object)
{
    if (object)
        return (PyObject *)object;
    return Py_NewRef(Py_None);
}
/* fan_given: an argument; NULL if the caller did not give it, or gave None; borrowed. */
static inline PyObject *fan_given(PyObject *argument)
{
    if (argument == Py_None)
        return NULL;
    return argument;
}
/* fan_none_unless: None, or NULL after a failure. */
static inline PyObject *fan_none_unless(bool bad)
{
    if (bad)
        return NULL;
    return Py_NewRef(Py_None);
}
/* fan_drop_result: drops the result of a call: 0, or -1 for NULL. */
static inline int fan_drop_result(PyObject *result)
{
    if (!result)
        return -1;
    Py_DECREF(result);
    return 0;
}
/* fan_no_memory: raises MemoryError, and returns -1. */
static inline int fan_no_memory(void)
{
    (void)PyErr_NoMemory();
    return -1;
}

/* fan_device_name: fan_device_text as a str. */
static inline PyObject *fan_device_name(const fan_device *d)
{
    char text[32];
    return PyUnicode_FromString(fan_device_text(d, text, sizeof text));
}
/* fan_list_add: appends an item, whose reference it takes; without an item or room *list becomes
 * NULL. */
static inline void fan_list_add(PyObject **list, PyObject *item)
{
    if (!item || PyList_Append(*list, item) < 0)
        Py_CLEAR(*list);
    Py_XDECREF(item);
}
/* fan_tuple_of: the tuple of a list, which it takes; NULL of NULL. */
static inline PyObject *fan_tuple_of(PyObject *list)
{
    PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return tuple;
}

/* dtype.c (numpy <-> fan): */
/* fan_dtype_of_descr: FAN_DT_NONE: not ours (object, strings ..) or foreign byte order. */
fan_dtype fan_dtype_of_descr(PyArray_Descr *d);
/* fan_descr_of_dtype: new reference; TypeError for a dtype of ml_dtypes that the caller has not
 * imported. */
PyArray_Descr *fan_descr_of_dtype(fan_dtype d);
/* fan_dtype_parse: reads a NumPy dtype, torch dtype, name or type; None: FAN_DT_NONE. Returns -1
 * with TypeError or ValueError. */
int fan_dtype_parse(PyObject *o, fan_dtype *out);
/* fan_dtype_refuse: raises DTypeError with the reason why an array of this dtype is not taken.
 * Returns -1. */
int fan_dtype_refuse(PyArray_Descr *d, const char *what);
/* fan_dtype_needs_ml_dtypes: whether NumPy has the dtype from ml_dtypes alone, which the caller has
 * not imported. */
bool fan_dtype_needs_ml_dtypes(fan_dtype d);

/* fan_call_site: writes "file.py:31", of the innermost frame outside fanin, of the calling
 * thread. */
void fan_call_site(char *buf, size_t size);
/* fan_call_site_level: makes fan_call_site write, from now on, on this thread, the level-th such
 * frame, or the outermost; returns the level before. */
int64_t fan_call_site_level(int64_t level);

/* Every type's file offers its spec; module.c adds them in order. */
extern PyType_Spec fan_buffer_spec, fan_stream_spec, fan_event_spec, fan_array_spec,
    fan_machine_spec, fan_trace_spec, fan_exporter_spec, fan_target_spec, fan_graph_tree_spec,
    fan_graph_function_spec, fan_graph_step_spec, fan_graph_pipeline_spec, fan_function_spec,
    fan_node_spec, fan_leaf_spec, fan_pass_walk_spec, fan_event_count_spec, fan_block_spec;
/* fan_block_begin: calls __enter__ of a Block. A new reference; NULL: it failed, and the end of the
 * block has run. */
PyObject *fan_block_begin(PyObject *block);
/* fan_block_end: calls __exit__ of a Block; `error` may be NULL. 0, or -1 with an exception. */
int fan_block_end(PyObject *block, PyObject *error);
/* fan_buffer_call: the vectorcall of InputBuffer. */
PyObject *fan_buffer_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames);
/* fan_node_call: the vectorcall of Node. */
PyObject *fan_node_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames);
/* fan_leaf_call: the vectorcall of Leaf. */
PyObject *fan_leaf_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames);
/* Functions of the module, one table per file, joined in module.c. */
extern PyMethodDef fan_add_n_functions[], fan_add_rows_functions[], fan_collector_functions[],
    fan_producers_functions[], fan_stream_functions[], fan_search_functions[],
    fan_options_functions[], fan_exchange_functions[], fan_overlap_functions[],
    fan_analysis_functions[], fan_cuda_functions[], fan_backends_functions[], fan_pass_functions[],
    fan_walk_functions[], fan_cpu_kernel_functions[], fan_window_functions[], fan_ranks_functions[],
    fan_float_mode_functions[], fan_elements_functions[], fan_requests_functions[];

/* fan_cuda_compile_in_python: kernels that a device lacks are compiled by fanin._kernels from now
 * on. */
void fan_cuda_compile_in_python(void);
#ifdef FAN_TEST
extern PyMethodDef fan_for_tests_functions[], fan_machine_tests_functions[];
#endif

#endif
