/* fanin.h: nodes of fanin's engine in C (docs/c-api.md).
 *
 *   #include <Python.h>
 *   #include <fanin.h>                               found by fanin.get_include(); nothing is
 * linked
 *
 *   static const fanin_api *api;                     once, when the module is made: api =
 * fanin_import()
 *
 * A node's function gets the sums of its node's slots, and gives one gradient for each of its
 * edges. Between two functions in C no object of Python's is made.
 *
 * What this header declares stays as it is: later versions add to the end of structs that say their
 *
 * size. */
#ifndef FANIN_H
#define FANIN_H

#include <stddef.h>
#include <stdint.h>

#define FANIN_API_VERSION 1

typedef struct _object fanin_object; /* a PyObject */

typedef enum fanin_status {
    FANIN_OK = 0,
    FANIN_ERR_TYPE = 1,   /* TypeError */
    FANIN_ERR_VALUE = 2,  /* ValueError */
    FANIN_ERR_STATE = 3,  /* RuntimeError */
    FANIN_ERR_NOMEM = 4,  /* MemoryError */
    FANIN_ERR_PYTHON = 5, /* an exception is set already; for functions that have the interpreter */
    FANIN_STATUS_SIZE = 0x7fffffff
} fanin_status;

/* What went wrong, in words; empty where the status says it all. */
typedef struct fanin_error {
    char text[512];
} fanin_error;

typedef enum fanin_dtype {
    FANIN_BOOL = 0,
    FANIN_INT8 = 1,
    FANIN_INT16 = 2,
    FANIN_INT32 = 3,
    FANIN_INT64 = 4,
    FANIN_UINT8 = 5,
    FANIN_UINT16 = 6,
    FANIN_UINT32 = 7,
    FANIN_UINT64 = 8,
    FANIN_FLOAT16 = 9,
    FANIN_BFLOAT16 = 10,
    FANIN_FLOAT8_E4M3FN = 11,
    FANIN_FLOAT8_E5M2 = 12,
    FANIN_FLOAT32 = 13,
    FANIN_FLOAT64 = 14,
    FANIN_COMPLEX64 = 15,
    FANIN_COMPLEX128 = 16,
    FANIN_DTYPE_SIZE = 0x7fffffff
} fanin_dtype;

/* counted; what it shows does not change, but for its elements */
typedef struct fanin_array fanin_array;

/* An array on the CPU; all zero: undefined (None). Who makes one, by a function of the table, owns
 * it until it is dropped, or given to the engine; what a node's function gets as sums is
 * borrowed. */
typedef struct fanin_value {
    fanin_array *array;
    void *data;             /* the first element; NULL where there is none */
    const int64_t *shape;   /* ndim extents */
    const int64_t *strides; /* in bytes */
    int64_t size;           /* elements */
    fanin_dtype dtype;
    int32_t ndim;
    int32_t contiguous; /* not 0: in C order, without gaps */
    int32_t reserved;
} fanin_value;

/* fanin_node_fn: sums[i] is the finished sum of slot i, undefined where nothing came; out[i],
 * undefined before, gets the gradient of edge i, and is the engine's from then on, failing too.
 * Sums are not written, but for those of which `may_write` says so.
 *
 * Called on the thread of the pass, or on one of its workers, inside the interpreter or not: who
 * calls Python takes PyGILState_Ensure() first. Anything but FANIN_OK ends the pass with an
 * exception that names the node. */
typedef fanin_status (*fanin_node_fn)(void *ctx, const fanin_value *sums, size_t n,
                                      fanin_value *out, size_t m, fanin_error *err);

/* other threads may run Python meanwhile: for what takes longer than a microsecond or so */
#define FANIN_LONG 1u

typedef struct fanin_function {
    size_t struct_size; /* sizeof(fanin_function) */
    fanin_node_fn call;
    void *ctx;
    /* once, inside the interpreter, when the function is let go; NULL: nothing to do */
    void (*release)(void *ctx);
    uint32_t inputs;    /* sums that it takes, at least 1 */
    uint32_t gradients; /* .. and gradients that it gives */
    uint32_t flags;
    uint32_t reserved; /* 0 */
} fanin_function;

/* An edge of a node: to slot `slot` of `next`, a fanin.Node or fanin.Leaf; NULL: nobody needs that
 * gradient. */
typedef struct fanin_edge {
    fanin_object *next;
    uint32_t slot;
} fanin_edge;

/* The table. Later versions are longer. */
typedef struct fanin_api {
    uint32_t version; /* FANIN_API_VERSION of the fanin that runs */
    uint32_t reserved;

    /* ---- values: on any thread, inside the interpreter or not ---- */

    /* empty: a new array in C order, not zeroed. */
    fanin_status (*empty)(fanin_dtype dtype, int ndim, const int64_t *shape, fanin_value *out,
                          fanin_error *err);
    /* like: of a value's dtype and shape. */
    fanin_status (*like)(const fanin_value *v, fanin_value *out, fanin_error *err);
    /* share: the same array once more: a sum handed on as it is. An undefined one gives that. */
    void (*share)(const fanin_value *v, fanin_value *out);
    /* wrap: memory of the caller's, which stays as it is until release(ctx) is called, once, on any
     * thread; failing, it is not called. strides in bytes; NULL: in C order. */
    fanin_status (*wrap)(void *data, fanin_dtype dtype, int ndim, const int64_t *shape,
                         const int64_t *strides, void (*release)(void *ctx), void *ctx,
                         fanin_value *out, fanin_error *err);
    /* may_write: not 0: nobody but the node's function sees this sum: it may be overwritten, and
     * shared as gradient. */
    int (*may_write)(const fanin_value *sum);
    /* drop: what is owned goes; the value is undefined then. */
    void (*drop)(fanin_value *v);

    /* ---- objects: inside the interpreter; NULL or not 0: an exception is set ---- */

    /* function_new: a callable for fanin.Node(function, edges=..), of which it is the `fn`: new
     * reference. Failing, it does not call release. */
    fanin_object *(*function_new)(const fanin_function *f);
    /* node_new: a fanin.Node: new reference. `name` is a str, or NULL. */
    fanin_object *(*node_new)(fanin_object *function, const fanin_edge *edges, size_t nedges,
                              fanin_object *name);
    /* to_python: the value as an ndarray over the same memory, or None: new reference. of_python:
     * an array on the CPU, or None, as a value over the same memory. */
    fanin_object *(*to_python)(const fanin_value *v);
    int (*of_python)(fanin_object *o, fanin_value *out);
} fanin_api;

#define FANIN_CAPSULE "fanin._core._C_API"

#ifdef Py_PYTHON_H
/* fanin_import: the table; NULL: ImportError. */
static inline const fanin_api *fanin_import(void)
{
    const fanin_api *api = (const fanin_api *)PyCapsule_Import(FANIN_CAPSULE, 0);
    if (api && api->version < FANIN_API_VERSION) {
        PyErr_Format(PyExc_ImportError,
                     "this module was built for version %d of fanin's C API, and the fanin that is "
                     "installed has "
                     "version %d: upgrade fanin",
                     FANIN_API_VERSION, (int)api->version);
        api = NULL;
    }
    return api;
}
#endif

#endif
