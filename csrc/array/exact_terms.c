#include "array/exact_terms.h"

const fan_array *fan__exact_operand(const exact_job *j, size_t k)
{
    return *(const fan_array *const *)(const void *)(j->in + k * j->step);
}

void fan__exact_job_begin(exact_job *j, const void *in, size_t step, size_t n, fan_dtype d)
{
    j->in = in;
    j->step = step;
    j->n = n;
    j->d = d;
    j->k = fan__exact_kind_of(d);
    j->parts = fan__exact_parts(d);
    j->read = fan__exact_is_wide(d) || d == FAN_DT_COMPLEX64 ? d : FAN_DT_FLOAT32;
    j->how = fan__exact_loops();
    j->j = (judge){.n = n,
                   .digits = j->k.digits,
                   .always = j->k.always && n <= FAN_EXACT_ALWAYS,
                   .grid = TO_DOUBLE,
                   .shifts = true,
                   .by = 1.0};
}

const low_ways *fan__exact_low_ways(const exact_loops *how, fan_dtype d)
{
    return how->low[d].up ? &how->low[d] : NULL;
}

const char *fan__exact_term(const exact_job *j, size_t k, int64_t at, int64_t len, char *room)
{
    const fan_array *a = fan__exact_operand(j, k);
    const char *p = a->dtype == j->d || j->d == j->read ? fan_nditer_whole(&j->iter, a, at, len) : NULL;
    const low_ways *low = p && j->read == FAN_DT_FLOAT32 ? fan__exact_low_ways(j->how, a->dtype) : NULL;
    if (p && a->dtype == j->read)
        return p;
    if (low) {
        low->up((float *)(void *)room, p, (size_t)len);
        return room;
    }
    if (a->dtype == j->d || j->d == j->read) {
        fan_nditer_read(&j->iter, a, at, len, j->read, room);
        return room;
    }
    FAN_UNINITIALIZED char
        rounded_first[FAN_EXACT_TILE * 2]; /* converted from another dtype to a low one: rounded to that first */
    fan_nditer_read(&j->iter, a, at, len, j->d, rounded_first);
    fan_convert(room, j->read, (int64_t)fan_dtype_size(j->read), rounded_first, j->d, (int64_t)fan_dtype_size(j->d),
                len);
    return room;
}

bool fan__exact_scale_begin(judge *j, const fan_scale *scale, bool is_complex)
{
    if (!scale || !scale->on)
        return false;
    if (is_complex && scale->im != 0) {
        j->grid = TO_DOUBLE;
        return true;
    }
    j->scaled = true;
    j->by = scale->re;
    j->shifts = !(bits_of(scale->re) << 12);
    return false;
}

void fan__exact_turn(double *parts, int64_t len, const fan_scale *scale)
{
    for (int64_t i = 0; i < len; i++) {
        double re = parts[2 * i], im = parts[2 * i + 1];
        parts[2 * i] = re * scale->re - im * scale->im;
        parts[2 * i + 1] = re * scale->im + im * scale->re;
    }
}

void fan__exact_set_grid(judge *j, fan_dtype out)
{
    j->grid = fan__exact_is_wide(out)                            ? TO_DOUBLE
              : out == FAN_DT_FLOAT32 || out == FAN_DT_COMPLEX64 ? TO_SINGLE
                                                                 : TO_LOW;
}
