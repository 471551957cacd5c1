/* sum_fold: the loops of one number type that add. No guard: sum_body.h includes it once for each,
 * after it has defined
 *
 *   KIND      the number type (sum_numbers.h)
 *   SUM       that of the accumulation dtype, in which `start`, weights, divisors and factors are
 *             stored, and sums that are not rounded; not defined: KIND itself
 *   STEPS     1: its steps are expensive, and one loop takes all variants; not defined: 4: they are
 *             cheap, where overhead counts: a loop for each variant
 *   COUNTED   defined: there is a loop that counts the results, too */
#ifndef SUM
#define SUM KIND
#define ADDED_IN_PLACE
#endif
#ifndef STEPS
#define STEPS 4
#endif
#define WAY OF(way)
#define NUMBER ONE(number)
#define MEMORY ONE(memory)
#define SUM_MEMORY SUM_ONE(memory)

/* What a fold does beside additions. */
typedef struct WAY {
    const char *start;   /* numbers of SUM with which it begins; NULL: with the first source */
    const char *weights; /* one of SUM for each source; NULL: none */
    NUMBER factor;
    NUMBER divisor;
    bool scaled;
    bool divided;
    bool raw;    /* the result is one of SUM */
    bool ahead;  /* prefetch the sources */
    bool stream; /* store past the caches */
} WAY;

ALWAYS WAY OF(way_of)(const fan_loop_options *options)
{
    WAY way = {.start = options->start, .weights = options->weights, .raw = options->raw};
    way.ahead = options->ahead;
    way.scaled = options->factor != NULL;
    way.divided = options->divisor != NULL;
    if (options->factor)
        way.factor = SUM_ONE(in)(options->factor);
    if (options->divisor)
        way.divisor = SUM_ONE(in)(options->divisor);
    return way;
}

#define WIDTH 1
#include "array/sum_fold_wide.h"

/* each: sums the numbers from i to `end` one by one; returns `end`. */
ALWAYS size_t OF(each_of)(char *dst, fan_sources from, size_t i, size_t end, const WAY *way)
{
    for (; i < end; i++) {
        NUMBER sum;
        ONE(sums)(&sum, 1, from, i, way);
        ONE(store)(dst, i, sum, way->raw, false);
    }
    return i;
}

ALONE size_t OF(each_weighed)(char *dst, fan_sources from, size_t i, size_t end, const WAY *way)
{
    WAY now = *way;
    now.ahead = false;
    return OF(each_of)(dst, from, i, end, &now);
}

ALONE size_t OF(each_plain)(char *dst, fan_sources from, size_t i, size_t end, const WAY *way)
{
    WAY now = {.start = way->start, .factor = way->factor, .scaled = way->scaled, .raw = way->raw};
    return OF(each_of)(dst, from, i, end, &now);
}

ALWAYS size_t OF(each)(char *dst, fan_sources from, size_t i, size_t end, const WAY *way)
{
    if (way->weights || way->divided)
        return OF(each_weighed)(dst, from, i, end, way);
    return OF(each_plain)(dst, from, i, end, way);
}

#define WIDTH w
#define FOLDS
#include "array/sum_fold_wide.h"
#if FAN_WIDE > 16 && STEPS == 4
#define WIDTH s
#define FOLDS
#include "array/sum_fold_wide.h"
#endif

/* one_loop: takes all variants. */
ALWAYS void OF(one_loop)(char *dst, fan_sources from, size_t count, WAY way,
                         const fan_loop_options *options)
{
    if (count < FAN_WIDE / sizeof(NUMBER)) {
        OF(each)(dst, from, 0, count, &way);
        return;
    }
    way.stream = can_flow(dst, count, sizeof(MEMORY), options);
    WIDE(fold)(dst, from, count, way);
    if (way.stream)
        flowed();
}

/* weighed: with weights or a divisor. */
ALONE void OF(weighed)(char *dst, fan_sources from, size_t count, const fan_loop_options *options)
{
    OF(one_loop)(dst, from, count, OF(way_of)(options), options);
}

#if STEPS == 4
/* few: fewer numbers than a wide vector has, but perhaps enough for a short one. */
ALONE void OF(few)(char *dst, fan_sources from, size_t count, const WAY *way)
{
#if FAN_WIDE > 16
    if (count >= 16 / sizeof(NUMBER)) {
        SHORT(fold)(dst, from, count, *way);
        return;
    }
#endif
    WAY now = {.start = way->start, .factor = way->factor, .scaled = way->scaled, .raw = way->raw};
    OF(each_of)(dst, from, 0, count, &now);
}

ALONE void OF(sum_with)(char *dst, fan_sources from, size_t count, const fan_loop_options *options)
{
    if (options->weights || options->divisor) {
        OF(weighed)(dst, from, count, options);
        return;
    }
    WAY way = OF(way_of)(options);
    bool ahead = way.ahead;
    way.weights = NULL;
    way.divided = false;
    way.ahead = false;
    if (count < FAN_WIDE / sizeof(NUMBER)) {
        OF(few)(dst, from, count, &way);
        return;
    }
    if (can_flow(dst, count, sizeof(MEMORY), options)) {
        way.raw = false;
        way.ahead = true;
        way.stream = true;
        WIDE(fold)(dst, from, count, way);
        flowed();
        return;
    }
    if (!ahead) {
        WIDE(fold)(dst, from, count, way);
        return;
    }
    way.ahead = true;
    WIDE(fold)(dst, from, count, way);
}

static void OF(sum)(char *dst, fan_sources from, size_t count, const fan_loop_options *options)
{
    static const WAY plain;
    if (options)
        OF(sum_with)(dst, from, count, options);
    else if (count < FAN_WIDE / sizeof(NUMBER))
        OF(few)(dst, from, count, &plain);
    else
        WIDE(fold)(dst, from, count, (WAY){.start = NULL});
}
#else
static void OF(sum)(char *dst, fan_sources from, size_t count, const fan_loop_options *options)
{
    static const fan_loop_options nothing;
    static const WAY plain;
    if (!options && count < FAN_WIDE / sizeof(NUMBER)) {
        OF(each_plain)(dst, from, 0, count, &plain);
        return;
    }
    if (!options)
        options = &nothing;
    if (options->weights || options->divisor) {
        OF(weighed)(dst, from, count, options);
        return;
    }
    WAY way = OF(way_of)(options);
    way.weights = NULL;
    way.divided = false;
    OF(one_loop)(dst, from, count, way, options);
}
#endif

#ifdef COUNTED
/* watching: a fold that counts its results. stream: 1: past the caches, sixteen bytes at a time; 2:
 * whole vectors. */
ALWAYS size_t OF(watching)(char *dst, fan_sources from, size_t count, WAY way, int stream,
                           fan_stats_run *r)
{
    const size_t lanes = FAN_WIDE / sizeof(NUMBER);
    const size_t step = 4 * lanes;
    size_t i = 0;
    vf64_w sum[VECTORS_OF_LANES];
    vf64_w top[VECTORS_OF_LANES];
    memcpy(sum, r->lane, sizeof sum);
    memset(top, 0, sizeof top);
    for (; i + step <= count; i += step) {
        WIDE(number) x[4];
        WIDE(memory) y[4];
        vu64_w endless = {0};
        WIDE(sums)(x, 4, from, i, &way);
        for (size_t v = 0; v < 4; v++) {
            y[v] = WIDE(down)(x[v]);
            endless |= OF_SUM(endless)(WIDE(up)(y[v]));
        }
        if (any(endless))
            break;
        for (size_t v = 0; v < 4; v++) {
            char *to = dst + (i + v * lanes) * sizeof(MEMORY);
            OF_SUM(count)(sum, top, v * lanes % FAN_STATS_LANES, WIDE(up)(y[v]));
            if (stream == 2)
                flow(to, &y[v], sizeof y[v]);
            else if (stream)
                flow_split(to, &y[v], sizeof y[v]);
            else
                memcpy(to, &y[v], sizeof y[v]);
        }
        if ((r->numbers + i + step) % FAN_STATS_BLOCK == 0)
            block_end(r, sum);
    }
    double most[FAN_STATS_LANES];
    memcpy(r->lane, sum, sizeof sum);
    memcpy(most, top, sizeof top);
    for (size_t k = 0; k < FAN_STATS_LANES; k++) {
        if (most[k] > r->top)
            r->top = most[k];
    }
    r->numbers += i;
    return i;
}

static size_t OF(watch)(char *dst, fan_sources from, size_t count, const fan_loop_options *options,
                        fan_stats_run *r)
{
    const size_t step = 4 * FAN_WIDE / sizeof(NUMBER);
    const size_t vector = sizeof(WIDE(memory));
    WAY way = {.ahead = true, .scaled = options->factor != NULL};
    size_t done;
    if (way.scaled)
        way.factor = SUM_ONE(in)(options->factor);
    if (step % FAN_STATS_LANES || r->numbers % step)
        return 0;
    bool splits = (uintptr_t)dst % 16 == 0 && vector >= 16;
    if (!options->stream || !splits)
        return OF(watching)(dst, from, count, way, 0, r);
    if ((uintptr_t)dst % vector == 0)
        done = OF(watching)(dst, from, count, way, 2, r);
    else
        done = OF(watching)(dst, from, count, way, 1, r);
    flowed();
    return done;
}
#undef COUNTED
#endif

#ifdef ADDED_IN_PLACE
/* add_at, add_up, scale: see fan_loops. */
static void OF(add_at)(char *dst, const int64_t *to, const char *src, const int64_t *from, size_t n,
                       size_t run)
{
    typedef MEMORY FAN_ANYWHERE memory;
    for (size_t k = 0; k < n; k++) {
        memory *d = (memory *)(dst + to[k]);
        const char *p = src + k * run * sizeof(memory);
        if (from)
            p = src + from[k];
        const memory *s = (const memory *)p;
        if (run == 1) {
            d[0] = ONE(down)(ONE(plus)(ONE(up)(d[0]), ONE(up)(s[0])));
            continue;
        }
        if (STEPS == 1) {
            const char *both[] = {(const char *)d, p};
            OF(sum)((char *)d, (fan_sources){both, 2}, run, NULL);
            continue;
        }
        FAN_VECTOR
        for (size_t i = 0; i < run; i++)
            d[i] = ONE(down)(ONE(plus)(ONE(up)(d[i]), ONE(up)(s[i])));
    }
}

static void OF(add_up)(char *acc, const char *src, size_t n)
{
    NUMBER sum = ONE(in)(acc);
    for (size_t i = 0; i < n; i++)
        sum = ONE(plus)(sum, ONE(in)(src + i * sizeof(MEMORY)));
    ONE(store)(acc, 0, sum, false, false);
}

static void OF(scale)(char *dst, const char *factor, size_t n)
{
    const char *src = dst;
    OF(sum)(dst, (fan_sources){&src, 1}, n, &(fan_loop_options){.factor = factor});
}
#undef ADDED_IN_PLACE
#endif
#undef WAY
#undef NUMBER
#undef MEMORY
#undef SUM_MEMORY
#undef KIND
#undef SUM
#undef STEPS
