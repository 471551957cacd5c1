/* value: arrays and streams of the C API. In this order: devices and streams by number; views of
 * the caller's memory; fanin's arrays, and memory with a function that releases it; tensors that
 * own their memory. */
#include "py/api/api.h"
#include "py/base/api_lock.h"
#include "py/device/backends.h"

#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"

#include <limits.h>
#include <stdio.h>

/* ---- devices and streams ---- */

static int32_t device_type(const fan_device *d)
{
    return d->backend->dlpack[0] ? d->backend->dlpack[0] : FANIN_DEVICE_SIM;
}

fan_device *fan_api_device_of(const fanin_value *v)
{
    if (!v->array)
        return fan_cpu();
    fan_device *d = fan_memory_device(fan_c_array(v)->storage);
    return d ? d : fan_cpu();
}

void fan_api_show(fan_array *a, const fan_device *d, fanin_value *out)
{
    fan_c_show(a, out);
    if (!a || !d || d == fan_cpu())
        return;
    out->device_type = (int16_t)device_type(d);
    out->device_id = (int16_t)d->index;
}

fan_status fan_api_device(int32_t type, int32_t id, fan_device **out, fan_error *err)
{
    const fan_backend_entry *entry = NULL;
    if (type == FANIN_DEVICE_SIM)
        entry = fan_backend_named("sim");
    else
        entry = fan_backend_of_dlpack(type);
    *out = NULL;
    if (!entry) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "no device of type %d is known: expected DLPack's number, or %d for the "
                        "simulated machine",
                        (int)type, FANIN_DEVICE_SIM);
    }
    if (entry->backend->has_streams)
        return entry->find(id, out, err);
    *out = fan_cpu();
    return FAN_OK;
}

fan_status fan_api_stream(const fanin_stream *s, fan_device *near, fan_stream **out, fan_error *err)
{
    fan_device *d;
    fan_status status;
    *out = NULL;
    if (!s)
        return FAN_OK;
    if (near && near->backend->has_streams) {
        if (device_type(near) == s->device_type && near->index == s->device_id)
            return near->backend->find_stream(near, s->handle, out, err);
    }
    FAN_TRY(fan_api_device(s->device_type, s->device_id, &d, err));
    if (d->backend->has_streams)
        status = d->backend->find_stream(d, s->handle, out, err);
    else
        status = fan_fail(err, FAN_ERR_TYPE, "the CPU has no streams: give NULL");
    fan_device_drop(d);
    return status;
}

/* ---- memory of the caller's ---- */

/* lent_gone, kept_gone: the caller's memory stays the caller's. Two functions, of which
 * fan_api_is_lent reads the address. */
static void lent_gone(fan_storage *st)
{
    (void)st;
}
static void kept_gone(fan_storage *st)
{
    (void)st;
}

bool fan_api_is_lent(const fan_array *a)
{
    return a && a->storage && a->storage->release == lent_gone;
}

fan_status fan_api_lend(char *data, fan_dtype dtype, int ndim, const int64_t *shape,
                        const int64_t *strides, fan_array **out, fan_error *err)
{
    const fan_storage st = {.data = data, .release = lent_gone};
    return fan_array_foreign(&st, data, dtype, ndim, shape, strides, false, out, err);
}

fan_status fan_api_view(const fanin_tensor *t, bool lent, fan_array **out, fan_error *err)
{
    *out = NULL;
    if (!t)
        return fan_fail(err, FAN_ERR_TYPE, "expected a tensor, got NULL");
    const fan_dl_tensor *tensor = fan_api_tensor(t);
    if (tensor->device.type != FAN_DL_CPU && tensor->device.type != FAN_DL_CUDA_HOST) {
        return fan_fail(
            err, FAN_ERR_BUFFER,
            "a view is of memory on the CPU, and this one is on device type %d: give the tensor "
            "itself "
            "(of_managed, buffer_add_value), that its memory stays until its streams have used it",
            (int)tensor->device.type);
    }
    fan_storage *st = fan_storage_wrap(NULL, 0, lent ? lent_gone : kept_gone, NULL);
    if (!st)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    fan_status status = fan_dl_view(tensor, true, st, fan_cpu(), out, err);
    fan_storage_drop(st);
    return status;
}

fan_status fan_api_out(const fanin_tensor *t, const char *what, fan_array **out, fan_error *err)
{
    fan_verdict itself;
    FAN_TRY(fan_api_view(t, false, out, err));
    const fan_region region = fan_region_of(*out);
    fan_status status = fan_overlap_itself(&region, 0, NULL, NULL, &itself, err);
    if (status == FAN_OK && itself != FAN_OVERLAP_DISJOINT) {
        status = fan_fail(err, FAN_ERR_BUFFER,
                          "%s: expected memory that can be written, got a tensor that %s itself",
                          what, itself == FAN_OVERLAP_YES ? "overlaps" : "may overlap");
    }
    if (status != FAN_OK) {
        fan_array_drop(*out);
        *out = NULL;
    }
    return status;
}

/* ---- fanin's arrays, and memory with a function that releases it ---- */

/* status_of: converts the core's error to that of fanin.h. */
static fanin_status status_of(fan_status status, const fan_error *from, fanin_error *err)
{
    if (status == FAN_OK)
        return FANIN_OK;
    if (err)
        snprintf(err->text, sizeof err->text, "%.511s", from->text);
    return fan_api_status(status);
}

/* check_given: FAN_ERR_TYPE: there is no such dtype; FAN_ERR_VALUE: there are axes and no shape. */
static fan_status check_given(fanin_dtype dtype, int ndim, const int64_t *shape, fan_error *err)
{
    fan_error_clear(err);
    if ((unsigned)dtype >= FAN_DT_COUNT)
        return fan_fail(err, FAN_ERR_TYPE, "there is no dtype %d", (int)dtype);
    if (ndim > 0 && !shape)
        return fan_fail(err, FAN_ERR_VALUE, "expected a shape of %d extents, got NULL", ndim);
    return FAN_OK;
}

fanin_status fan_api_empty(fanin_dtype dtype, int ndim, const int64_t *shape, fanin_value *out,
                           fanin_error *err)
{
    FAN_UNINITIALIZED fan_error e;
    fan_array *a = NULL;
    fan_status status = check_given(dtype, ndim, shape, &e);
    if (status == FAN_OK)
        status = fan_array_new((fan_dtype)dtype, ndim, shape, NULL, &a, &e);
    fan_c_show(status == FAN_OK ? a : NULL, out);
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
    fan_api_release end;
    void (*release)(void *ctx);
    void *ctx;
} wrapped;

static void wrapped_release(fan_api_release *end)
{
    wrapped *w = (wrapped *)end;
    w->release(w->ctx);
    fan_free(w);
}

static void wrapped_gone(fan_storage *s)
{
    wrapped *w = s->ctx;
    if (w->release)
        fan_api_release_call(&w->end);
    else
        fan_free(w);
}

/* value_wrap: an array over the caller's memory, which the caller keeps on failure. */
static fan_status value_wrap(void *data, fanin_dtype given, int ndim, const int64_t *shape,
                             const int64_t *strides, void (*release)(void *ctx), void *ctx,
                             fan_array **out, fan_error *err)
{
    int64_t dense[FAN_MAX_NDIM];
    int64_t size;
    fan_dtype dtype = (fan_dtype)given;
    FAN_TRY(check_given(given, ndim, shape, err));
    FAN_TRY(fan_shape_check(ndim, shape, fan_dtype_size(dtype), &size, err));
    if (!strides) {
        fan_dense_strides(ndim, shape, fan_dtype_size(dtype), NULL, dense);
        strides = dense;
    }
    wrapped *w = fan_alloc(sizeof *w);
    fan_storage *st = NULL;
    if (w)
        st = fan_storage_wrap(data, 0, wrapped_gone, w);
    if (!st) {
        fan_free(w);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    }
    *w = (wrapped){.release = NULL};
    fan_status status = fan_array_view(st, data, dtype, ndim, shape, strides, false, out, err);
    if (status == FAN_OK) {
        *w = (wrapped){
            .end.run = wrapped_release,
            .release = release,
            .ctx = ctx,
        };
    }
    fan_storage_drop(st);
    return status;
}

fanin_status fan_api_wrap(void *data, fanin_dtype dtype, int ndim, const int64_t *shape,
                          const int64_t *strides, void (*release)(void *ctx), void *ctx,
                          fanin_value *out, fanin_error *err)
{
    FAN_UNINITIALIZED fan_error e;
    fan_array *a = NULL;
    fan_status status = value_wrap(data, dtype, ndim, shape, strides, release, ctx, &a, &e);
    fan_c_show(status == FAN_OK ? a : NULL, out);
    return status_of(status, &e, err);
}

int fan_api_may_write(const fanin_value *v)
{
    return v->array && fan_unboxed_is_unique(fan_unboxed(fan_c_array(v)));
}

void fan_api_drop(fanin_value *v)
{
    fan_array *a = fan_c_array(v);
    fan_c_show(NULL, v);
    fan_api_place was = fan_api_releases_begin();
    if (FAN_FAULT(API_DROP_AT_ONCE))
        fan_api_here.place.in_call = false;
    fan_array_drop(a);
    fan_api_releases_end(was);
}

/* ---- tensors that own their memory ---- */

/* A tensor of the caller's, until its deleter has been called. */
typedef struct managed {
    fan_api_release end;
    fan_dl_versioned *tensor;
} managed;

static void managed_delete(fan_api_release *end)
{
    managed *m = (managed *)end;
    if (m->tensor->deleter)
        m->tensor->deleter(m->tensor);
}

static void managed_release(fan_api_release *end)
{
    managed_delete(end);
    fan_free(end);
}

static void managed_gone(void *ctx)
{
    fan_api_release_call(&((managed *)ctx)->end);
}

static void managed_gone_host(fan_storage *st)
{
    managed_gone(st->ctx);
}

/* managed_check: the checks that do not need the tensor to be ours; its device. */
static fan_status managed_check(const fan_dl_versioned *m, fan_device **d, fan_error *err)
{
    if (m->major != FAN_DL_MAJOR) { /* no field after the flags may be read */
        return fan_fail(err, FAN_ERR_BUFFER,
                        "the tensor is of DLPack version %u.%u; expected major version %d",
                        (unsigned)m->major, (unsigned)m->minor, FAN_DL_MAJOR);
    }
    if (m->tensor.device.type == FANIN_DEVICE_SIM) {
        return fan_fail(err, FAN_ERR_BUFFER,
                        "no tensor shows a simulated machine's memory: use its values");
    }
    return fan_api_device(m->tensor.device.type, m->tensor.device.id, d, err);
}

/* managed_take: an array over a tensor that this takes. *m: its end, which the storage *st calls;
 * without a storage the caller frees *m and ends the tensor. */
static fan_status managed_take(fan_dl_versioned *t, managed **m, fan_storage **st, fan_device **d,
                               fan_array **out, fan_error *err)
{
    FAN_TRY(managed_check(t, d, err));
    *m = fan_alloc(sizeof **m);
    if (!*m)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    **m = (managed){
        .end.run = managed_release,
        .tensor = t,
    };
    FAN_TRY(fan_dl_storage(*d, managed_gone_host, managed_gone, *m, st, err));
    bool writable = !(t->flags & (FAN_DL_READ_ONLY | FAN_DL_IS_COPIED));
    return fan_dl_view(&t->tensor, writable, *st, *d, out, err);
}

fanin_status fan_api_of_managed(fanin_managed *tensor, fanin_value *out, fanin_failure *why)
{
    fan_dl_versioned *t = (void *)tensor;
    FAN_UNINITIALIZED fan_error err;
    fan_device *d = NULL;
    fan_storage *st = NULL;
    fan_array *a = NULL;
    managed *m = NULL;
    fan_status status;
    fan_error_clear(&err);
    fan_c_show(NULL, out);
    if (!t) {
        status = fan_fail(&err, FAN_ERR_TYPE, "of_managed: expected a tensor, got NULL");
        return fan_api_fail(why, status, &err);
    }
    fan_api_place was = fan_api_releases_begin();
    managed refused = {
        .end.run = managed_delete,
        .tensor = t,
    };
    status = managed_take(t, &m, &st, &d, &a, &err);
    fan_api_show(a, d, out);
    if (st) {
        fan_storage_drop(st);
    } else {
        fan_free(m);
        fan_api_release_call(&refused.end);
    }
    fan_device_drop(d);
    fan_api_releases_end(was); /* `refused` lives until here */
    return fan_api_fail(why, status, &err);
}

fanin_status fan_api_to_managed(const fanin_value *v, fanin_managed **out, fanin_failure *why)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    fan_dl_versioned *m = NULL;
    fan_error_clear(&err);
    const fan_device *d = fan_api_device_of(v);
    fan_dl_device at = {device_type(d), d->index < 0 ? 0 : d->index};
    if (!v->array)
        status = fan_fail(&err, FAN_ERR_VALUE, "to_managed: the value is undefined");
    else if (d->backend->has_streams && !d->backend->dlpack[0]) {
        status = fan_fail(&err, FAN_ERR_BUFFER,
                          "no tensor shows a simulated machine's memory: use its values");
    } else {
        status = fan_dlpack_send(fan_c_array(v), at, &m, &err);
    }
    *out = (void *)m;
    return fan_api_fail(why, status, &err);
}
