/* value: copied, dropped, donated, measured; Python's ints as they are summed (D5). */
#include "buffer/value.h"

#include "base/mem.h"

fan_status fan_value_copy(const fan_frontend *f, const fan_value *v, fan_value *dst, fan_error *err)
{
    fan_array **parts = NULL;
    if (v->nparts) {
        parts = fan_alloc(v->nparts * sizeof(fan_array *));
        if (!parts)
            return fan_fail_memory(err);
        for (size_t i = 0; i < v->nparts; i++)
            parts[i] = fan_array_hold(v->parts[i]);
    }
    *dst = *v;
    dst->parts = parts;
    if (v->array)
        fan_array_hold(v->array);
    if (v->sparse)
        fan_sparse_hold(v->sparse);
    if (v->patch)
        fan_patch_hold(v->patch);
    if (v->object)
        f->hold(v->object);
    return FAN_OK;
}

void fan_value_drop(const fan_frontend *f, fan_value *v)
{
    fan_value gone = *v;
    *v = fan_value_none();
    fan_array_drop(gone.array);
    fan_sparse_drop(gone.sparse);
    fan_patch_drop(gone.patch);
    for (size_t i = 0; i < gone.nparts; i++)
        fan_array_drop(gone.parts[i]);
    fan_free(gone.parts);
    if (gone.object)
        f->drop(gone.object);
}

fan_status fan_value_use(const fan_value *value, const char *name, bool donate, fan_error *err)
{
    fan_device *d = value->device;
    fan_array *own[3];
    size_t n;
    if (!d || !d->backend->use || value->form == FAN_FORM_OBJECT)
        return FAN_OK;
    fan_array *const *arrays = fan_value_arrays(value, own, &n);
    for (size_t used = 0; used < n; used++) {
        fan_status status = d->backend->use(d, arrays[used], name, donate, err);
        if (status == FAN_OK)
            continue;
        while (donate && used > 0)
            d->backend->returned(d, arrays[--used]);
        return status;
    }
    return FAN_OK;
}

void fan_value_returned(const fan_value *value)
{
    fan_device *d = value->device;
    fan_array *own[3];
    size_t n;
    if (!d || !d->backend->returned || value->form == FAN_FORM_OBJECT)
        return;
    fan_array *const *arrays = fan_value_arrays(value, own, &n);
    for (size_t i = 0; i < n; i++)
        d->backend->returned(d, arrays[i]);
}

int fan_value_shape(const fan_value *v, const int64_t **shape)
{
    if (v->patch) {
        *shape = v->patch->shape;
        return v->patch->ndim;
    }
    if (v->sparse) {
        *shape = v->sparse->shape;
        return v->sparse->ndim;
    }
    if (v->array) {
        *shape = v->array->shape;
        return v->array->ndim;
    }
    *shape = NULL;
    return -1;
}

fan_array *const *fan_value_arrays(const fan_value *value, fan_array *own[3], size_t *n)
{
    const fan_sparse *sparse = value->sparse;
    *n = 0;
    switch (value->form) {
    case FAN_FORM_DENSE:
    case FAN_FORM_PARTIAL:
        own[0] = value->array;
        *n = 1;
        return own;
    case FAN_FORM_SPARSE:
        own[0] = sparse->values;
        own[1] = sparse->indices;
        own[2] = sparse->pointers;
        *n = sparse->pointers ? 3 : 2;
        return own;
    case FAN_FORM_OBJECT:
        *n = value->nparts;
        return value->parts;
    default:
        return own;
    }
}

/* The bytes of an array, expanded axes counted once. */
static uint64_t value_array_bytes(const fan_array *a)
{
    uint64_t bytes = fan_dtype_size(a->dtype);
    for (int i = 0; i < a->ndim; i++) {
        if (a->strides[i] != 0 || a->shape[i] == 0)
            bytes *= (uint64_t)a->shape[i];
    }
    return bytes;
}

uint64_t fan_value_bytes(const fan_value *value)
{
    fan_array *own[3];
    size_t n;
    fan_array *const *arrays = fan_value_arrays(value, own, &n);
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += value_array_bytes(arrays[i]);
    return bytes;
}

fan_value fan_value_dense(fan_array *a, fan_device *d)
{
    return (fan_value){
        .form = FAN_FORM_DENSE,
        .dtype = a->dtype,
        .device = d,
        .array = a,
    };
}

fan_value fan_value_sparse(fan_sparse *s, fan_device *d)
{
    return (fan_value){
        .form = FAN_FORM_SPARSE,
        .dtype = s->values->dtype,
        .device = d,
        .sparse = s,
    };
}

void fan_value_set_patch(fan_value *v, fan_patch *patch)
{
    v->form = FAN_FORM_PARTIAL;
    v->patch = fan_patch_hold(patch);
}

static bool value_is_integral(char kind)
{
    return kind == 'b' || kind == 'i' || kind == 'u';
}

bool fan_int_run_put(fan_int_run *run, fan_dtype dtype, const char *data)
{
    char kind = fan_dtype_kind(dtype);
    size_t bytes = fan_dtype_size(dtype);
    uint64_t bits = 0;
    if (!value_is_integral(kind))
        return false;
    memcpy(&bits, data, bytes); /* little-endian, as all that we are built for */
    bool negative = kind == 'i' && (bits >> (8 * bytes - 1) & 1);
    if (negative && bytes < 8)
        bits |= ~UINT64_C(0) << (8 * bytes);
    run->ints = run->ints || kind != 'b';
    if (negative)
        run->sum += (int64_t)bits;
    else
        run->sum += bits;
    if (!run->ints)
        run->sum = run->sum != 0; /* bools sum by logical or */
    return true;
}

void fan_value_set_origin(const fan_frontend *f, fan_value *v, uint8_t origin, uint8_t rank)
{
    bool other_kind = v->origin != origin && v->form != FAN_FORM_OBJECT;
    v->origin = origin;
    v->rank = rank;
    if (!other_kind || !v->object)
        return;
    f->drop(v->object);
    v->object = NULL;
    v->own_memory = false;
}

int64_t fan_value_number(const fan_value *value)
{
    int64_t number = 0;
    if (!value->weak || value->form != FAN_FORM_DENSE)
        return 0;
    if (value_is_integral(fan_dtype_kind(value->dtype)))
        memcpy(&number, value->array->data, fan_dtype_size(value->dtype));
    return number;
}

bool fan_weak_int_fits(int64_t i, fan_dtype dtype)
{
    unsigned bits = (unsigned)fan_dtype_size(dtype) * 8;
    int64_t half;
    switch (fan_dtype_kind(dtype)) {
    case 'u':
        if (i < 0)
            return false;
        return bits >= 63 || i < (INT64_C(1) << bits);
    case 'i':
        if (bits == 64)
            return true;
        half = INT64_C(1) << (bits - 1);
        return i >= -half && i < half;
    default:
        return true;
    }
}

bool fan_int_run_add(fan_int_run *r, const fan_value *v, int64_t number)
{
    if (v->form != FAN_FORM_DENSE || !v->weak || v->array->size != 1)
        return false;
    return fan_int_run_put(r, v->dtype, (const char *)&number);
}

bool fan_int_run_leaves(const fan_int_run *run, const fan_value *next, const fan_scale *scale,
                        fan_dtype dtype)
{
    unsigned bits = 8 * (unsigned)fan_dtype_size(dtype);
    char kind = fan_dtype_kind(dtype);
    __int128 sum = run->sum;
    if (!run->ints || (kind != 'i' && kind != 'u'))
        return false;
    bool array_next = next && next->form != FAN_FORM_OBJECT;
    if (array_next && value_is_integral(fan_dtype_kind(next->dtype)))
        return false;
    if (scale && !next && __builtin_mul_overflow(sum, (__int128)scale->i, &sum))
        return true;
    if (kind == 'u')
        return sum < 0 || sum >> bits;
    __int128 half = (__int128)1 << (bits - 1);
    return sum >= half || sum < -half;
}

fan_status fan_sparse_parts_end(fan_sparse_parts *parts, fan_status status, const fan_sparse *like,
                                fan_sparse **out, fan_error *err)
{
    if (status == FAN_OK) {
        status = fan_sparse_new(like->format, like->ndim, like->shape, parts->indices,
                                parts->pointers, parts->values, like->coalesced, out, err);
    }
    if (status == FAN_OK)
        (*out)->nnz_coalesced = like->nnz_coalesced;
    fan_array_drop(parts->indices);
    fan_array_drop(parts->pointers);
    fan_array_drop(parts->values);
    return status;
}
