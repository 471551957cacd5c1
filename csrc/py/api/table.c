/* table: the function table of include/fanin.h, in a capsule. */
#include "py/api/api.h"
#include "py/base/api_lock.h"
#include "py/engine/node_object.h"

#include "base/mem.h"

#include <stdio.h>

#define X(NAME, ...) _Static_assert((int)FANIN_##NAME == (int)FAN_DT_##NAME, "fanin.h numbers dtypes as the core does");
FAN_DTYPE_LIST(X)
#undef X

/* ---- values ---- */

/* status_of: converts the core's error to that of fanin.h. */
static fanin_status status_of(fan_status status, const fan_error *from, fanin_error *err)
{
    if (status == FAN_OK)
        return FANIN_OK;
    if (err)
        snprintf(err->text, sizeof err->text, "%.511s", from->text);
    return fan_api_status(status);
}

static fanin_status no_dtype(fanin_dtype dtype, fanin_error *err)
{
    if (err)
        snprintf(err->text, sizeof err->text, "there is no dtype %d", (int)dtype);
    return FANIN_ERR_TYPE;
}

/* shape_given: false, with a message: there are axes and no shape. */
static bool shape_given(int ndim, const int64_t *shape, fanin_error *err)
{
    if (ndim <= 0 || shape)
        return true;
    if (err)
        snprintf(err->text, sizeof err->text, "expected a shape of %d extents, got NULL", ndim);
    return false;
}

fanin_status fan_api_empty(fanin_dtype dtype, int ndim, const int64_t *shape, fanin_value *out, fanin_error *err)
{
    FAN_UNINITIALIZED fan_error e;
    fan_array *a;
    fan_status status;
    fan_c_show(NULL, out);
    if ((unsigned)dtype >= FAN_DT_COUNT)
        return no_dtype(dtype, err);
    if (!shape_given(ndim, shape, err))
        return FANIN_ERR_VALUE;
    fan_error_clear(&e);
    status = fan_array_new((fan_dtype)dtype, ndim, shape, NULL, &a, &e);
    if (status == FAN_OK)
        fan_c_show(a, out);
    return status_of(status, &e, err);
}

fanin_status fan_api_like(const fanin_value *v, fanin_value *out, fanin_error *err)
{
    fan_array *a = NULL;
    fanin_status status = FANIN_OK;
    if (!v->array) {
        if (err)
            snprintf(err->text, sizeof err->text, "like: the value is undefined");
        status = FANIN_ERR_VALUE;
    } else if (fan_array_like(fan_c_array(v), &a, NULL) != FAN_OK) {
        status = FANIN_ERR_NOMEM;
    }
    fan_c_show(a, out);
    return status;
}

void fan_api_share(const fanin_value *v, fanin_value *out)
{
    if (v->array)
        fan_array_hold(fan_c_array(v));
    *out = *v;
}

/* The caller's memory, and the function that releases it. */
typedef struct wrapped {
    void (*release)(void *ctx);
    void *ctx;
} wrapped;

static void wrapped_gone(fan_storage *s)
{
    const wrapped w = *(wrapped *)s->ctx;
    fan_free(s->ctx);
    if (!w.release)
        return;
    bool left = fan_api_leave();
    w.release(w.ctx);
    fan_api_return(left);
}

fanin_status fan_api_wrap(void *data, fanin_dtype dtype, int ndim, const int64_t *shape, const int64_t *strides,
                          void (*release)(void *ctx), void *ctx, fanin_value *out, fanin_error *err)
{
    int64_t dense[FAN_MAX_NDIM], size;
    FAN_UNINITIALIZED fan_error e;
    wrapped *w = NULL;
    fan_storage *s = NULL;
    fan_array *a = NULL;
    fan_status status;
    fan_c_show(NULL, out);
    if ((unsigned)dtype >= FAN_DT_COUNT)
        return no_dtype(dtype, err);
    if (!shape_given(ndim, shape, err))
        return FANIN_ERR_VALUE;
    fan_error_clear(&e);
    status = fan_shape_check(ndim, shape, fan_dtype_size((fan_dtype)dtype), &size, &e);
    if (status == FAN_OK) {
        w = fan_alloc(sizeof *w);
        s = w ? fan_storage_wrap(data, 0, wrapped_gone, w) : NULL;
        status = s ? FAN_OK : fan_fail(&e, FAN_ERR_NOMEM, "out of memory");
    }
    if (status == FAN_OK) {
        *w = (wrapped){NULL, NULL}; /* on failure the caller keeps the memory */
        if (!strides)
            fan_dense_strides(ndim, shape, fan_dtype_size((fan_dtype)dtype), NULL, dense);
        status = fan_array_view(s, data, (fan_dtype)dtype, ndim, shape, strides ? strides : dense, false, &a, &e);
    }
    if (status == FAN_OK) {
        *w = (wrapped){release, ctx};
        fan_c_show(a, out);
    }
    if (s)
        fan_storage_drop(s);
    else
        fan_free(w);
    return status_of(status, &e, err);
}

int fan_api_may_write(const fanin_value *v) { return v->array && fan_unboxed_is_unique(fan_unboxed(fan_c_array(v))); }

void fan_api_drop(fanin_value *v)
{
    fan_array *a = fan_c_array(v);
    fan_c_show(NULL, v);
    fan_array_drop(a);
}

/* ---- objects ---- */

fanin_object *fan_api_function_new(const fanin_function *f) { return (fanin_object *)fan_function_new(f); }

fanin_object *fan_api_node_new(fanin_object *function, const fanin_edge *edges, size_t nedges, fanin_object *name)
{
    PyObject *fn = (PyObject *)function;
    if (!fn || !fan_is_function(fn))
        return (fanin_object *)PyErr_Format(PyExc_TypeError, "node_new: expected a function of function_new, got %s",
                                            fn ? FAN_TYPE_TEXT(fn) : "NULL");
    return (fanin_object *)fan_node_new((function_object *)fn, edges, nedges, (PyObject *)name);
}

fanin_object *fan_api_to_python(const fanin_value *v)
{
    fan_device *d = fan_api_device_of(v);
    if (v->array && d->backend->has_streams)
        return (fanin_object *)fan_array_wrap(fan_c_array(v), d);
    return (fanin_object *)(v->array ? fan_export_array(fan_c_array(v)) : Py_NewRef(Py_None));
}

int fan_api_of_python(fanin_object *object, fanin_value *out)
{
    PyObject *o = (PyObject *)object;
    fan_device *d;
    fan_c_show(NULL, out);
    if (!o) {
        PyErr_SetString(PyExc_TypeError, "of_python: expected an array or None, got NULL");
        return -1;
    }
    fan_array *a = fan_array_arg(o, &d);
    if (!a)
        return fan_c_import(o, NULL, out);
    if (fan_array_usable(a) < 0)
        return -1;
    fan_api_show(fan_array_hold(a), d, out);
    return 0;
}

static const fanin_api table = {.version = FANIN_API_VERSION,
                                .size = sizeof(fanin_api),
#define X(name) .name = fan_api_##name,
                                FAN_API_LIST(X)
#undef X
};

int fan_c_api_add(PyObject *m)
{
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)&table, FANIN_CAPSULE, NULL);
    int bad = capsule ? PyModule_AddObjectRef(m, "_C_API", capsule) : -1;
    Py_XDECREF(capsule);
    return bad;
}
