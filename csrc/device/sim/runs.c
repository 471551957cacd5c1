#include "device/sim/runs.h"

void fan__runs_of(const fan_array *a, fan__runs *out)
{
    out->base = (uintptr_t)a->data;
    out->bytes = fan_dtype_size(a->dtype);
    out->n = 0;
    /* Axes with a width, strides made positive, narrowest first. */
    for (int i = 0; i < a->ndim; i++) {
        int64_t extent = a->shape[i], stride = a->strides[i];
        if (extent == 0) {
            out->bytes = 0;
            return;
        }
        if (extent == 1 || stride == 0)
            continue;
        if (stride < 0) {
            out->base -= (uintptr_t)(-stride) * (uintptr_t)(extent - 1);
            stride = -stride;
        }
        int k = out->n++;
        for (; k > 0 && out->stride[k - 1] > stride; k--) {
            out->stride[k] = out->stride[k - 1];
            out->extent[k] = out->extent[k - 1];
        }
        out->stride[k] = stride;
        out->extent[k] = extent;
    }
    /* An axis whose step is no wider than the run makes the run longer. */
    int kept = 0;
    for (int i = 0; i < out->n; i++) {
        if (kept == 0 && (uintptr_t)out->stride[i] <= out->bytes) {
            out->bytes += (uintptr_t)out->stride[i] * (uintptr_t)(out->extent[i] - 1);
            continue;
        }
        out->stride[kept] = out->stride[i];
        out->extent[kept] = out->extent[i];
        kept++;
    }
    out->n = kept;
    for (int i = 0; i < kept; i++)
        out->at[i] = 0;
}

bool fan__runs_next(fan__runs *r)
{
    for (int i = 0; i < r->n; i++) {
        if (++r->at[i] < r->extent[i]) {
            r->base += (uintptr_t)r->stride[i];
            return true;
        }
        r->base -= (uintptr_t)r->stride[i] * (uintptr_t)(r->extent[i] - 1);
        r->at[i] = 0;
    }
    return false;
}
