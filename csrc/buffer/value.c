#include "buffer/value.h"

#include "base/mem.h"

fan_status fan_value_copy(const fan_frontend *f, const fan_value *v, fan_value *dst, fan_error *err)
{
    fan_array **parts = NULL;
    if (v->nparts) {
        parts = fan_alloc(v->nparts * sizeof(fan_array *));
        if (!parts)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        for (size_t i = 0; i < v->nparts; i++)
            parts[i] = fan_array_hold(v->parts[i]);
    }
    *dst = *v;
    dst->parts = parts;
    if (v->array)
        fan_array_hold(v->array);
    if (v->sparse)
        fan_sparse_hold(v->sparse);
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
    for (size_t i = 0; i < gone.nparts; i++)
        fan_array_drop(gone.parts[i]);
    fan_free(gone.parts);
    if (gone.object)
        f->drop(gone.object);
}

fan_status fan_value_use(const fan_value *v, const char *name, bool donate, fan_error *err)
{
    fan_array *own[3];
    size_t n, used = 0;
    fan_status status = FAN_OK;
    if (!v->device || !v->device->backend->use || v->form == FAN_FORM_OBJECT)
        return FAN_OK;
    fan_array *const *all = fan_value_arrays(v, own, &n);
    while (used < n &&
           (status = v->device->backend->use(v->device, all[used], name, donate, err)) == FAN_OK)
        used++;
    while (status != FAN_OK && donate && used > 0)
        v->device->backend->returned(v->device, all[--used]);
    return status;
}

void fan_value_returned(const fan_value *v)
{
    fan_array *own[3];
    size_t n;
    if (!v->device || !v->device->backend->returned || v->form == FAN_FORM_OBJECT)
        return;
    fan_array *const *all = fan_value_arrays(v, own, &n);
    for (size_t i = 0; i < n; i++)
        v->device->backend->returned(v->device, all[i]);
}

int fan_value_shape(const fan_value *v, const int64_t **shape)
{
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

fan_array *const *fan_value_arrays(const fan_value *v, fan_array *own[3], size_t *n)
{
    *n = 0;
    if (v->form == FAN_FORM_DENSE) {
        own[(*n)++] = v->array;
    } else if (v->form == FAN_FORM_SPARSE) {
        own[(*n)++] = v->sparse->values;
        own[(*n)++] = v->sparse->indices;
        if (v->sparse->pointers)
            own[(*n)++] = v->sparse->pointers;
    } else if (v->form == FAN_FORM_OBJECT) {
        *n = v->nparts;
        return v->parts;
    }
    return own;
}

uint64_t fan_value_bytes(const fan_value *v)
{
    fan_array *own[3];
    size_t n;
    fan_array *const *all = fan_value_arrays(v, own, &n);
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t one = fan_dtype_size(all[i]->dtype);
        for (int k = 0; k < all[i]->ndim; k++)
            if (all[i]->strides[k] != 0 || all[i]->shape[k] == 0)
                one *= (uint64_t)all[i]->shape[k];
        bytes += one;
    }
    return bytes;
}

fan_value fan_value_dense(fan_array *a, fan_device *d)
{
    return (fan_value){.form = FAN_FORM_DENSE, .dtype = a->dtype, .device = d, .array = a};
}

fan_value fan_value_sparse(fan_sparse *s, fan_device *d)
{
    return (fan_value){
        .form = FAN_FORM_SPARSE, .dtype = s->values->dtype, .device = d, .sparse = s};
}

bool fan_int_run_put(fan_int_run *r, fan_dtype dtype, const char *data)
{
    char kind = fan_dtype_kind(dtype);
    size_t bytes = fan_dtype_size(dtype);
    uint64_t bits = 0;
    if (kind != 'b' && kind != 'i' && kind != 'u')
        return false;
    memcpy(&bits, data, bytes); /* little-endian, as all that we are built for */
    bool negative = kind == 'i' && (bits >> (8 * bytes - 1) & 1);
    r->ints = r->ints || kind != 'b';
    r->sum += negative ? (__int128)(int64_t)(bytes < 8 ? bits | ~UINT64_C(0) << (8 * bytes) : bits)
                       : (__int128)bits;
    r->sum = r->ints ? r->sum : r->sum != 0; /* bools sum by logical or */
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

int64_t fan_value_number(const fan_value *v)
{
    int64_t number = 0;
    char kind = fan_dtype_kind(v->dtype);
    if (v->weak && v->form == FAN_FORM_DENSE && (kind == 'b' || kind == 'i' || kind == 'u'))
        memcpy(&number, v->array->data, fan_dtype_size(v->dtype));
    return number;
}

bool fan_weak_int_fits(int64_t i, fan_dtype d)
{
    unsigned bits = (unsigned)fan_dtype_size(d) * 8;
    switch (fan_dtype_kind(d)) {
    case 'u':
        return i >= 0 && (bits >= 63 || i < (INT64_C(1) << bits));
    case 'i':
        return bits == 64 || (i >= -(INT64_C(1) << (bits - 1)) && i < (INT64_C(1) << (bits - 1)));
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

bool fan_int_run_leaves(const fan_int_run *r, const fan_value *next, const fan_scale *scale,
                        fan_dtype d)
{
    unsigned bits = 8 * (unsigned)fan_dtype_size(d);
    char kind = fan_dtype_kind(d);
    char after = next && next->form != FAN_FORM_OBJECT ? fan_dtype_kind(next->dtype) : '-';
    __int128 sum = r->sum;
    if (!r->ints || (kind != 'i' && kind != 'u') || after == 'b' || after == 'i' || after == 'u')
        return false;
    if (scale && !next && __builtin_mul_overflow(sum, (__int128)scale->i, &sum))
        return true;
    if (kind == 'u')
        return sum < 0 || sum >> bits;
    return sum >= (__int128)1 << (bits - 1) || sum < -((__int128)1 << (bits - 1));
}
