#include "array/sparse.h"

#include "array/nditer.h"
#include "base/mem.h"

#include <string.h>

/* X(FORMAT, name) */
#define FORMAT_LIST(X)       \
    X(FAN_FORMAT_COO, "coo") \
    X(FAN_FORMAT_CSR, "csr") \
    X(FAN_FORMAT_CSC, "csc") \
    X(FAN_FORMAT_BSR, "bsr") \
    X(FAN_FORMAT_BSC, "bsc")

static const char *const names[] = {
#define X(FORMAT, name) [FORMAT] = name,
    FORMAT_LIST(X)
#undef X
};
#define FORMATS (sizeof names / sizeof names[0])

const char *fan_format_name(fan_format f) { return (size_t)f < FORMATS ? names[f] : "none"; }

bool fan_format_from_name(const char *name, fan_format *out)
{
    for (size_t f = 0; name && f < FORMATS; f++) {
        if (strcmp(names[f], name) == 0) {
            *out = (fan_format)f;
            return true;
        }
    }
    return false;
}

int64_t fan_sparse_nnz(const fan_sparse *s) { return s->values->shape[0]; }

/* ---- one sparse array ---- */

static fan_status check_index_dtype(const char *what, const fan_array *a, fan_error *err)
{
    if (a->dtype == FAN_DT_INT32 || a->dtype == FAN_DT_INT64)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_TYPE, "sparse %s: expected int32 or int64, got %s", what, fan_dtype_name(a->dtype));
}

static fan_status check_shape(fan_format f, const char *what, const fan_array *a, int ndim, const int64_t *want,
                              fan_error *err)
{
    bool same = a->ndim == ndim;
    for (int i = 0; same && i < ndim; i++)
        same = a->shape[i] == want[i];
    if (same)
        return FAN_OK;
    char got[128], expected[128];
    return fan_fail(err, FAN_ERR_VALUE, "%s %s have shape %s: expected %s", fan_format_name(f), what,
                    fan_shape_text(a->ndim, a->shape, got, sizeof got),
                    fan_shape_text(ndim, want, expected, sizeof expected));
}

fan_status fan_sparse_new(fan_format f, int ndim, const int64_t *shape, fan_array *indices, fan_array *pointers,
                          fan_array *values, bool coalesced, fan_sparse **out, fan_error *err)
{
    *out = NULL;
    if ((size_t)f >= FORMATS)
        return fan_fail(err, FAN_ERR_VALUE, "no such sparse format");
    /* The dense shape of a sparse array may be larger than any memory, so its extents are checked one by one. */
    if (ndim < 0 || ndim > FAN_MAX_NDIM)
        return fan_fail(err, FAN_ERR_VALUE, "a sparse array has 0 to %d axes, got %d", FAN_MAX_NDIM, ndim);
    for (int i = 0; i < ndim; i++)
        if (shape[i] < 0)
            return fan_fail(err, FAN_ERR_VALUE, "axis %d: expected a non-negative extent, got %lld", i,
                            (long long)shape[i]);
    FAN_TRY(check_index_dtype("indices", indices, err));
    if (f == FAN_FORMAT_COO) {
        if (indices->ndim != 2 || indices->shape[0] > ndim) {
            char text[128];
            return fan_fail(err, FAN_ERR_VALUE,
                            "coo indices have shape %s: expected (sparse_dim, nnz) with sparse_dim <= %d",
                            fan_shape_text(indices->ndim, indices->shape, text, sizeof text), ndim);
        }
        int dim = (int)indices->shape[0];
        if (1 + ndim - dim > FAN_MAX_NDIM)
            return fan_fail(err, FAN_ERR_VALUE, "coo values need more than %d axes", FAN_MAX_NDIM);
        int64_t want[FAN_MAX_NDIM];
        want[0] = indices->shape[1];
        for (int i = dim; i < ndim; i++)
            want[1 + i - dim] = shape[i];
        FAN_TRY(check_shape(FAN_FORMAT_COO, "values", values, 1 + ndim - dim, want, err));
    } else {
        if (ndim != 2)
            return fan_fail(err, FAN_ERR_VALUE, "%s: expected 2 axes, got %d", fan_format_name(f), ndim);
        if (!pointers)
            return fan_fail(err, FAN_ERR_VALUE, "%s needs pointers", fan_format_name(f));
        FAN_TRY(check_index_dtype("pointers", pointers, err));
        int64_t nnz = indices->ndim == 1 ? indices->shape[0] : -1, block[2] = {1, 1};
        FAN_TRY(check_shape(f, "indices", indices, 1, &nnz, err));
        if (fan_format_is_blocked(f)) {
            for (int i = 0; i < 2; i++) {
                block[i] = values->ndim == 3 ? values->shape[1 + i] : 0;
                if (block[i] < 1 || shape[i] % block[i]) {
                    char text[128], all[128];
                    return fan_fail(err, FAN_ERR_VALUE,
                                    "%s values have shape %s: expected (blocks, h, w) whose blocks fill %s",
                                    fan_format_name(f), fan_shape_text(values->ndim, values->shape, text, sizeof text),
                                    fan_shape_text(ndim, shape, all, sizeof all));
                }
            }
        }
        int64_t want[3] = {nnz, block[0], block[1]};
        FAN_TRY(check_shape(f, "values", values, fan_format_is_blocked(f) ? 3 : 1, want, err));
        int axis = fan_format_compressed_axis(f);
        want[0] = shape[axis] / block[axis] + 1;
        FAN_TRY(check_shape(f, "pointers", pointers, 1, want, err));
    }
    fan_sparse *s = fan_alloc(sizeof *s);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a sparse array");
    atomic_init(&s->refs, 1);
    s->format = f;
    s->ndim = ndim;
    if (ndim)
        memcpy(s->shape, shape, (size_t)ndim * sizeof *shape);
    s->indices = fan_array_hold(indices);
    s->pointers = f == FAN_FORMAT_COO ? NULL : fan_array_hold(pointers);
    s->values = fan_array_hold(values);
    s->coalesced = coalesced;
    s->nnz_coalesced = fan_sparse_nnz(s);
    *out = s;
    return FAN_OK;
}

fan_sparse *fan_sparse_hold(fan_sparse *s)
{
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

void fan_sparse_drop(fan_sparse *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_array_drop(s->indices);
    fan_array_drop(s->pointers);
    fan_array_drop(s->values);
    fan_free(s);
}

fan_status fan_sparse_cast(const fan_sparse *s, fan_dtype dtype, fan_sparse **out, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *values = NULL;
    *out = NULL;
    if (dtype == s->values->dtype) {
        values = fan_array_hold(s->values);
    } else {
        FAN_GO(fan_array_new(dtype, s->values->ndim, s->values->shape, NULL, &values, err));
        fan_array_copy(values, s->values);
    }
    FAN_GO(fan_sparse_new(s->format, s->ndim, s->shape, s->indices, s->pointers, values, s->coalesced, out, err));
    (*out)->nnz_coalesced = s->nnz_coalesced;
done:
    fan_array_drop(values);
    return status;
}
