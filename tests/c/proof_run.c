#include "proof_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const verdict_words[VERDICTS] = {"fine",    "race",  "miscount", "written", "failed",
                                             "unsound", "stuck", "wrong",    "crashed"};

/* ---- content ---- */

static struct {
    const void *memory;
    uint64_t what;
} contents[64];
static size_t ncontents;

void content_reset(void)
{
    ncontents = 0;
}

void content_set(const void *memory, uint64_t what)
{
    size_t i = 0;
    while (i < ncontents && contents[i].memory != memory)
        i++;
    if (i == sizeof contents / sizeof *contents)
        abort();
    if (i == ncontents)
        ncontents++;
    contents[i].memory = memory;
    contents[i].what = what;
}

uint64_t content_of(const void *memory)
{
    for (size_t i = 0; i < ncontents; i++) {
        if (contents[i].memory == memory)
            return contents[i].what;
    }
    return 0;
}

static uint64_t behind(uint64_t a, uint64_t b)
{
    for (uint64_t n = b; n; n /= 8)
        a *= 8;
    return a + b;
}

/* Linked with --wrap=fan_device_run: every job that the buffer queues passes here. */
fan_status __real_fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
fan_status __wrap_fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err);
fan_status __wrap_fan_device_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    fan_status status = __real_fan_device_run(d, s, job, err);
    if (status == FAN_OK && (job->kind == FAN_JOB_SUM || job->kind == FAN_JOB_COPY)) {
        uint64_t what = 0;
        for (size_t i = 0; i < job->n; i++)
            what = behind(what, content_of(job->in[i].array->data));
        content_set(job->out->data, what);
    }
    return status;
}

/* ---- worlds ---- */

bool world_open(world *w, int D, int S, const fan_sim_config *how)
{
    fan_sim_config config = how ? *how : (fan_sim_config){.schedule = FAN_SIM_FIFO};
    memset(w, 0, sizeof *w);
    w->D = D;
    w->S = S;
    w->work = config.run_work;
    config.devices = D;
    if (!config.memory)
        config.memory = 1 << 20;
    if (fan_sim_new(&config, NULL, &w->m, NULL) != FAN_OK)
        return false;
    for (int d = 0; d < D; d++) {
        w->device[d] = fan_sim_device(w->m, d);
        for (int s = 0; s < S; s++) {
            fan_stream **out = &w->stream[d * S + s];
            if (s == 0) { /* the legacy stream bears the same number on every device */
                *out = fan_stream_current(w->device[d]);
            } else if (fan_sim_stream(w->m, d, false, out, NULL) != FAN_OK) {
                return false;
            }
            if (!*out)
                return false;
        }
    }
    return true;
}

void world_close(world *w)
{
    for (int i = 0; i < w->D * w->S; i++)
        fan_stream_drop(w->stream[i]);
    fan_sim_drop(w->m);
    memset(w, 0, sizeof *w);
}

/* ---- runs ---- */

static void hold(void *object)
{
    (void)object;
}
static void drop(void *object)
{
    (void)object;
}
static bool unshared(void *object)
{
    (void)object;
    return false;
}
static fan_status combine(void *c, const fan_value *a, const fan_value *b, fan_value *out,
                          fan_error *err)
{
    (void)c;
    (void)a;
    (void)b;
    (void)out;
    return fan_fail(err, FAN_ERR_TYPE, "no objects here");
}
/* poll: a wait between two steps of a thread that is alone is a wait for nobody. */
static fan_status poll(fan_error *err)
{
    return fan_thread_get_hooks()
               ? FAN_OK
               : fan_fail(err, FAN_ERR_DEADLOCK, "the only thread waits for another");
}
static const fan_frontend frontend = {
    .hold = hold, .drop = drop, .unshared = unshared, .combine = combine, .check_signals = poll};

bool run_buffer(run *r)
{
    static const uint64_t budgets[BUDGETS] = {0, sizeof(double), UINT64_MAX};
    const config *c = r->c;
    fan_buffer_config how = {.slots = 1,
                             .budget = budgets[c->budget],
                             .accumulate = FAN_DT_NONE,
                             .frontend = &frontend,
                             .stream = c->undeclared ? NULL : r->w->stream[c->c]};
    fan_buffer_free(r->b);
    r->b = NULL;
    return fan_buffer_new(&how, &r->b, NULL) == FAN_OK;
}

bool run_open(run *r, world *w, const config *c)
{
    memset(r, 0, sizeof *r);
    r->w = w;
    r->c = c;
    return run_buffer(r);
}

void run_close(run *r)
{
    fan_buffer_free(r->b);
    r->b = NULL;
}

void run_fail(run *r, verdict v, const char *why)
{
    if (r->verdict != FINE)
        return;
    r->verdict = v;
    snprintf(r->why, sizeof r->why, "%s", why);
}

/* good: notes a failed call; a race that the machine has found goes before. */
static bool good(run *r, fan_status status, const fan_error *err)
{
    if (status == FAN_ERR_RACE) {
        run_fail(r, RACED, err->text);
    } else if (status == FAN_ERR_DEADLOCK) {
        run_fail(r, STUCK, err->text);
    } else if (status != FAN_OK) {
        run_fail(r, FAILED, err->text);
    }
    return r->verdict == FINE;
}

/* look_for_elisions: a wait that was left out wrongly is what went wrong, whatever came of it. */
static void look_for_elisions(run *r)
{
    if (!fan_sim_unsound(r->w->m) || r->verdict == UNSOUND)
        return;
    r->verdict = FINE;
    run_fail(r, UNSOUND, "a wait was left out although its order did not hold");
}

void run_begin(run *r)
{
    run was = *r;
    fan_error err = {0};
    memset(r, 0, sizeof *r);
    r->w = was.w;
    r->c = was.c;
    r->b = was.b;
    r->driver = was.driver;
    r->accum = -1;
    content_reset();
    if (fan_sim_reset(r->w->m, &err) != FAN_OK)
        run_fail(r, FAILED, err.text);
    if (r->w->work)
        fan_sim_check(r->w->m, false);
    if (r->driver & DRIVER_ELIDE) {
        for (int i = 0; i < r->w->D * r->w->S; i++) {
            for (int k = 0; k < r->w->D * r->w->S; k++)
                (void)fan_clock_set(&r->w->stream[i]->clock, r->w->stream[k]->lane, UINT64_MAX / 2);
        }
    }
}

static double value_of(uint64_t what)
{
    double sum = 0;
    for (; what; what /= 8)
        sum += pow(16, (double)(what % 8));
    return sum;
}

/* look: with work: what is in memory now that everything has run. */
static double look(const fan_array *a)
{
    double x = NAN;
    if (a)
        memcpy(&x, a->data, sizeof x);
    return x;
}

void run_end(run *r)
{
    fan_error err = {0};
    if (r->verdict == FINE && r->w->work) {
        if (fan_sim_synchronize(r->w->m, &err) != FAN_OK) {
            run_fail(r, FAILED, err.text);
        } else if (r->x_saw && look(r->x_saw) != value_of(r->want_x)) {
            run_fail(r, WRONG, "who else knows the first gradient read something else");
        } else if (r->n_saw && look(r->n_saw) != value_of(content_of(r->n_saw->data))) {
            run_fail(r, WRONG, "the snapshot was something else");
        }
    }
    for (int i = 0; i < r->c->K; i++) {
        bool untouched = !r->g[i] || r->c->donate || content_of(r->g[i]->data) == (uint64_t)i + 1;
        if (!untouched)
            run_fail(r, WRITTEN, "a gradient that its giver still holds was changed");
        bool has_value = r->g[i] && r->w->work && !r->c->donate;
        if (r->verdict == FINE && has_value && look(r->g[i]) != value_of((uint64_t)i + 1))
            run_fail(r, WRONG, "a gradient that its giver still holds has another value");
        fan_array_drop(r->g[i]);
        r->g[i] = NULL;
    }
    fan_array_drop(r->g_kin);
    fan_event_drop(r->kin_event);
    fan_array_drop(r->y);
    fan_array_drop(r->z);
    fan_array_drop(r->x_saw);
    fan_array_drop(r->n_saw);
    r->g_kin = r->y = r->z = r->x_saw = r->n_saw = NULL;
    r->kin_event = NULL;
    if (!r->took || r->verdict != FINE) {
        err.text[0] = '\0';
        if (fan_buffer_clear(r->b, &err) != FAN_OK)
            run_fail(r, FAILED, err.text);
    }
    if (fan_sim_races(r->w->m))
        run_fail(r, RACED, "a release races");
    look_for_elisions(r);
}

/* kernel: queued on s; reads `from` (may be NULL) and writes `to` (may be NULL). */
typedef struct kernel_work {
    const double *from;
    double *to, value;
} kernel_work;

static fan_status kernel_fn(void *ctx, fan_error *err)
{
    kernel_work *k = ctx;
    (void)err;
    if (!k->to)
        return FAN_OK;
    *k->to = k->value;
    if (k->from)
        *k->to = *k->from;
    return FAN_OK;
}

static bool kernel(run *r, int stream, const char *name, fan_array *from, fan_array *to,
                   uint64_t what)
{
    fan_error err = {0};
    fan_array *reads[1] = {from};
    fan_array *writes[1] = {to};
    fan_sim_kernel k = {.name = name,
                        .reads = reads,
                        .nreads = from != NULL,
                        .writes = writes,
                        .nwrites = to != NULL,
                        .us = 1};
    if (r->w->work) {
        kernel_work *work = malloc(sizeof *work);
        if (!work)
            abort();
        *work = (kernel_work){.value = value_of(what)};
        if (from)
            work->from = (const double *)(const void *)from->data;
        if (to)
            work->to = (double *)(void *)to->data;
        k.fn = kernel_fn;
        k.fini = free;
        k.ctx = work;
    }
    fan_status status = fan_sim_launch(r->w->m, r->w->stream[stream], &k, &err);
    if (status != FAN_OK && r->w->work)
        free(k.ctx);
    if (status == FAN_OK && to)
        content_set(to->data, from ? content_of(from->data) : what);
    return good(r, status, &err);
}

static fan_array *array(run *r, int device, int owner)
{
    static const int64_t one = 1;
    fan_error err = {0};
    fan_array *a = NULL;
    good(r,
         fan_device_array(r->w->device[device], r->w->stream[owner], FAN_DT_FLOAT64, 1, &one, NULL,
                          &a, &err),
         &err);
    return a;
}

/* after: stream `a` comes after all that stream `b` has queued. */
static bool after(run *r, int a, int b)
{
    fan_error err = {0};
    fan_event *e = NULL;
    if (!good(r, fan_event_record(r->w->stream[b], &e, &err), &err))
        return false;
    fan_status status = fan_stream_wait(r->w->stream[a], e, NULL, &err);
    fan_event_drop(e);
    return good(r, status, &err);
}

bool run_produce(run *r, int i)
{
    const config *c = r->c;
    bool import = i == 0 && (c->kin == KIN_IMPORT || c->kin == KIN_IMPORT_READ);
    int on = import ? c->x : c->p[i];
    fan_error err = {0};
    r->g[i] = array(r, c->d, on);
    if (!r->g[i] || !kernel(r, on, "produce", NULL, r->g[i], (uint64_t)i + 1))
        return false;
    bool moves = import && c->p[0] != c->x;
    if (moves && !(r->driver & DRIVER_IMPORT) && !after(r, c->p[0], c->x))
        return false;
    if (i == 0 && (c->kin == KIN_ALIAS || c->kin == KIN_IMPORT_READ))
        r->g_kin = fan_array_hold(r->g[0]);
    if (i == 0 && c->kin == KIN_ALIAS)
        return good(r, fan_event_record(r->w->stream[c->p[0]], &r->kin_event, &err), &err);
    return true;
}

/* others_use: whether the gradient may not be donated, for another reads it; or, with
 * DRIVER_DONATE, whether he still holds it. */
static bool others_use(const run *r, int i)
{
    bool known = i == 0 && (r->c->kin == KIN_ALIAS || r->c->kin == KIN_IMPORT_READ);
    return known && (r->g_kin || !(r->driver & DRIVER_DONATE));
}

bool run_add(run *r, int i)
{
    const config *c = r->c;
    fan_error err = {0};
    fan_stream *current = r->w->stream[c->q[i]];
    fan_contribution one = {.value = fan_value_dense(fan_array_hold(r->g[i]), r->w->device[c->d]),
                            .key = c->keyed ? i : -1,
                            .stream = r->w->stream[c->p[i]],
                            .donate = c->donate && !others_use(r, i),
                            .copy = c->mode == MODE_COPY};
    if (c->let_go == LET_GO_ADDED) {
        fan_array_drop(r->g[i]);
        r->g[i] = NULL;
    }
    if (!good(r, fan_stream_push(current, &err), &err))
        return false;
    fan_status status = fan_buffer_add(r->b, 0, &one, &err);
    fan_stream_pop(current);
    fan_value_drop(&frontend, &one.value);
    return good(r, status, &err);
}

bool run_let_go(run *r, int i)
{
    fan_array *gone = r->g[i];
    r->g[i] = NULL;
    if (gone && !r->c->donate && content_of(gone->data) != (uint64_t)i + 1)
        run_fail(r, WRITTEN, "a gradient that its giver still holds was changed");
    fan_array_drop(gone);
    return r->verdict == FINE;
}

/* judge_sum: the contributions in it; notes whether a sum holds each contribution of `mask` once,
 * in the order of keys where there are any. */
static uint32_t judge_sum(run *r, uint64_t what, uint32_t mask, bool all)
{
    uint32_t seen = 0;
    uint64_t below = 8;
    bool right = true;
    for (; what; what /= 8) {
        uint64_t digit = what % 8;
        bool in_order = !r->c->keyed || digit < below;
        right = right && in_order && digit > 0;
        right = right && !(seen >> (digit - 1) & 1);
        if (digit)
            seen |= UINT32_C(1) << (digit - 1);
        below = digit;
    }
    bool whole = !all || seen == mask;
    if (!right || !whole || (seen & ~mask) != 0)
        run_fail(r, MISCOUNT, "a sum does not hold each contribution once");
    return seen;
}

/* make_out: memory of the taker's. It is in use on its stream until now; perhaps it was another
 * stream's first. */
static bool make_out(run *r, int t, fan_value *out)
{
    const config *c = r->c;
    fan_error err = {0};
    fan_array *a = array(r, c->d, c->out >= 0 ? c->out : t);
    if (!a)
        return false;
    *out = fan_value_dense(a, r->w->device[c->d]);
    if (c->mode == MODE_OUT &&
        (!good(r, fan_memory_record_stream(a->storage, r->w->stream[t], &err), &err) ||
         !kernel(r, t, "before", NULL, a, 0))) {
        fan_value_drop(&frontend, out);
        return false;
    }
    return true;
}

bool run_consume(run *r, bool all)
{
    const config *c = r->c;
    int t = config_taker(c);
    fan_error err = {0};
    fan_value sum = {.dtype = FAN_DT_NONE};
    fan_value out = {.dtype = FAN_DT_NONE};
    fan_take how = {.real = true, .integral = true, .scale = {.re = 1, .i = 1}};
    r->took = true;
    if (c->mode == MODE_CLEAR)
        return good(r, fan_buffer_clear(r->b, &err), &err);
    if (c->taker >= 0 || c->undeclared)
        how.stream = r->w->stream[t];
    if (c->mode == MODE_SCALE)
        how.scale.on = true;
    if (c->mode == MODE_OUT || c->mode == MODE_UNREAD) {
        if (!make_out(r, t, &out))
            return false;
        how.out = &out;
    }
    fan_status status = fan_buffer_take(r->b, &how, &sum, &err);
    fan_value_drop(&frontend, &out);
    if (!good(r, status, &err)) { /* this call, or another thread's */
        fan_value_drop(&frontend, &sum);
        return false;
    }
    if (sum.form != FAN_FORM_DENSE) {
        if (all)
            run_fail(r, MISCOUNT, "no sum");
        return r->verdict == FINE;
    }
    r->want_y = content_of(sum.array->data);
    uint32_t in = judge_sum(r, r->want_y, (UINT32_C(1) << c->K) - 1, all);
    if (in & r->taken)
        run_fail(r, MISCOUNT, "a contribution was taken twice");
    r->taken |= in;
    if (r->verdict != FINE) {
        fan_value_drop(&frontend, &sum);
        return false;
    }
    fan_array_drop(r->y);
    r->y = NULL;
    if (c->mode == MODE_UNREAD) {
        fan_value_drop(&frontend, &sum);
        return true;
    }
    r->y = array(r, t / c->S, t);
    bool fine = r->y && kernel(r, t, "consume", sum.array, r->y, 0);
    if (c->sum_to_caller) {
        fan_array_drop(r->y);
        r->y = fan_array_hold(sum.array);
    }
    fan_value_drop(&frontend, &sum);
    return fine;
}

bool run_kin(run *r)
{
    const config *c = r->c;
    fan_error err = {0};
    fan_array *g = r->g_kin;
    bool fine = true;
    if (content_of(g->data) != 1)
        run_fail(r, WRITTEN, "a gradient that another consumer holds was changed");
    r->want_x = 1;
    if (c->kin == KIN_ALIAS) {
        if (!(r->driver & DRIVER_ALIAS_WAIT))
            fine = good(r, fan_stream_wait(r->w->stream[c->x], r->kin_event, NULL, &err), &err);
        if (!(r->driver & DRIVER_ALIAS_MARK)) {
            fine = fine &&
                   good(r, fan_memory_record_stream(g->storage, r->w->stream[c->x], &err), &err);
        }
        fan_event_drop(r->kin_event);
        r->kin_event = NULL;
    }
    if (fine && r->w->work)
        r->x_saw = array(r, c->x / c->S, c->x);
    fine = fine && kernel(r, c->x, "read elsewhere", g, r->x_saw, 0);
    r->g_kin = NULL;
    fan_array_drop(g);
    return fine && r->verdict == FINE;
}

bool run_snapshot(run *r)
{
    const config *c = r->c;
    fan_error err = {0};
    fan_value v = {.dtype = FAN_DT_NONE};
    bool fine = good(r, fan_buffer_snapshot(r->b, 0, r->w->stream[c->snapshot], &v, &err), &err);
    if (fine && v.form == FAN_FORM_DENSE) {
        (void)judge_sum(r, content_of(v.array->data), (UINT32_C(1) << c->K) - 1, false);
        fine = r->verdict == FINE;
        if (fine && r->w->work)
            r->n_saw = array(r, c->snapshot / c->S, c->snapshot);
        fine = fine && kernel(r, c->snapshot, "look", v.array, r->n_saw, 0);
    }
    fan_value_drop(&frontend, &v);
    return fine;
}

bool run_end_of_pass(run *r)
{
    const config *c = r->c;
    int e = config_caller(c);
    int t = config_taker(c);
    fan_error err = {0};
    if (!r->y)
        return true;
    fan_value y =
        fan_value_dense(fan_array_hold(r->y), r->w->device[r->c->sum_to_caller ? c->d : t / c->S]);
    fan_stream *ran[1] = {r->w->stream[t]};
    bool fine = good(r, fan_stream_join(r->w->stream[e], ran, 1, &y, 1, &err), &err);
    r->z = NULL;
    if (fine)
        r->z = array(r, e / c->S, e);
    fine = r->z && kernel(r, e, "step", y.array, r->z, 0);
    fan_value_drop(&frontend, &y);
    fan_array_drop(r->y);
    r->y = NULL;
    return fine;
}

bool run_read_back(run *r)
{
    const config *c = r->c;
    static const int64_t one = 1;
    int e = r->driver & DRIVER_SYNC ? config_taker(c) : config_caller(c);
    fan_array *host = NULL;
    fan_error err = {0};
    if (!r->z)
        return true;
    bool fine = good(r, fan_array_new(FAN_DT_FLOAT64, 1, &one, NULL, &host, &err), &err) &&
                good(r, fan_sim_host_read(r->w->m, r->w->stream[e], host, r->z, &err), &err);
    if (fine && r->w->work && look(host) != value_of(r->want_y))
        run_fail(r, WRONG, "the host read something else");
    fan_array_drop(host);
    return fine;
}

/* ---- steps, and what they touch ---- */

static int steps_of(const run *r, int actor)
{
    const config *c = r->c;
    if (actor < c->K)
        return c->let_go == LET_GO_LATER ? 3 : 2;
    switch (actor) {
    case ACTOR_C:
    case ACTOR_E: return 1;
    case ACTOR_X: return c->kin == KIN_ALIAS || c->kin == KIN_IMPORT_READ;
    case ACTOR_N: return c->snapshot >= 0;
    default: return 0;
    }
}

uint32_t run_enabled(const run *r)
{
    const config *c = r->c;
    uint32_t mask = 0;
    for (int i = 0; i < c->K; i++) {
        if (r->done[i] < steps_of(r, i))
            mask |= UINT32_C(1) << i;
    }
    bool all = r->added == c->K;
    if (r->driver & DRIVER_COUNT) {
        all = true;
        for (int i = 0; i < c->K; i++)
            all = all && r->done[i] > 0;
    }
    if (!r->done[ACTOR_C] && all)
        mask |= UINT32_C(1) << ACTOR_C;
    if (!r->done[ACTOR_X] && steps_of(r, ACTOR_X) && r->done[0] > 0)
        mask |= UINT32_C(1) << ACTOR_X;
    if (!r->done[ACTOR_N] && steps_of(r, ACTOR_N))
        mask |= UINT32_C(1) << ACTOR_N;
    if (!r->done[ACTOR_E] && r->done[ACTOR_C])
        mask |= UINT32_C(1) << ACTOR_E;
    if (!mask && !r->done[ACTOR_H])
        mask = UINT32_C(1) << ACTOR_H;
    return mask;
}

enum {
    THE_SLOT = 64,
    GRADIENT = 128
};

static void touch(fan_explore *x, int object, bool write)
{
    if (x && object >= 0)
        (void)fan_explore_access(x, (uint64_t)object, write);
}

/* The streams that may have used a gradient: what a release of it reads. */
static void touch_users(const run *r, int p, fan_explore *x)
{
    const config *c = r->c;
    touch(x, p, false);
    touch(x, r->accum, false);
    touch(x, c->c, false);
    touch(x, config_taker(c), false);
    touch(x, c->snapshot, false);
}

/* The end of the pass. */
static void touch_end(const config *c, fan_explore *x)
{
    touch(x, config_caller(c), true);
    touch(x, config_taker(c), true);
    if (!c->sum_to_caller)
        return;
    /* the sum goes back here, or a gradient that was handed through */
    for (int i = 0; i < c->D * c->S; i++)
        touch(x, i, false);
    for (int i = 0; i < c->K; i++)
        touch(x, GRADIENT + i, true);
}

/* An add, the take, a snapshot: what is about the slot. */
static void touch_slot(const run *r, int actor, fan_explore *x)
{
    const config *c = r->c;
    bool is_special = c->donate || c->mode != MODE_PLAIN;
    bool in_place = is_special || actor == ACTOR_N || c->K == 1;
    bool folds = actor >= c->K || (c->budget != BUDGET_ALL && r->arrived);
    touch(x, THE_SLOT, true);
    if (actor < c->K) {
        touch(x, GRADIENT + actor, true);
        touch(x, c->p[actor], true);
        /* a copy on p, or on what is or becomes A; the original goes, perhaps for good */
        if (c->mode == MODE_COPY) {
            touch(x, c->q[actor], true);
            touch(x, c->c, true);
            touch(x, r->accum, true);
            touch(x, c->x, false);
        }
    }
    if (folds) {
        touch(x, r->accum, true);
        touch(x, c->x, in_place);
        for (int i = 0; i < c->K; i++) {
            if (r->arrived >> i & 1) {
                touch(x, GRADIENT + i, true);
                touch(x, c->p[i], in_place);
            }
        }
    }
    if (actor == ACTOR_N)
        touch(x, c->snapshot, true);
    if (actor == ACTOR_C) {
        touch(x, config_taker(c), true);
        touch(x, c->out, true);
        touch(x, c->snapshot, false);
    }
}

/* What a step touches, or may: streams, the slot, the holds of each gradient. A release reads the
 * streams that used the memory; memory that is written in place has an event recorded on each of
 * them. A, once there is one, is where the sums are taken. */
static void footprint(const run *r, int actor, fan_explore *x)
{
    const config *c = r->c;
    bool import = c->kin == KIN_IMPORT || c->kin == KIN_IMPORT_READ;
    int step = r->done[actor]; /* about to be taken */
    if (actor < c->K && step == 0) {
        touch(x, c->p[actor], true);
        if (import && actor == 0)
            touch(x, c->x, true);
        touch(x, GRADIENT + actor, true);
    } else if (actor < c->K && step == 2) { /* lets go: a release, if it is the last hold */
        touch(x, GRADIENT + actor, true);
        touch_users(r, c->p[actor], x);
        if (actor == 0)
            touch(x, c->x, false);
    } else if (actor == ACTOR_X) {
        touch(x, c->x, true);
        touch(x, GRADIENT, true);
        touch_users(r, c->p[0], x);
    } else if (actor == ACTOR_E) {
        touch_end(c, x);
    } else {
        touch_slot(r, actor, x);
    }
}

void run_step(run *r, int actor, fan_explore *x)
{
    if (actor != ACTOR_H) /* nothing is left to choose */
        footprint(r, actor, x);
    int step = r->done[actor]++;
    if (actor < r->c->K && step == 0) {
        (void)run_produce(r, actor);
    } else if (actor < r->c->K && step == 1) {
        (void)run_add(r, actor);
        if (!r->added++) {
            int C = r->c->undeclared ? r->c->q[actor] : r->c->c;
            /* S8-S11; q is p where p is on d */
            r->accum = C / r->c->S == r->c->d ? C : r->c->q[actor];
        }
        r->arrived |= UINT32_C(1) << actor;
    } else if (actor < r->c->K) {
        (void)run_let_go(r, actor);
    } else if (actor == ACTOR_C) {
        (void)run_consume(r, true);
    } else if (actor == ACTOR_E) {
        (void)run_end_of_pass(r);
    } else if (actor == ACTOR_H) {
        (void)run_read_back(r);
    } else if (actor == ACTOR_X) {
        (void)run_kin(r);
    } else {
        (void)run_snapshot(r);
    }
    if (r->verdict == FINE && fan_sim_races(r->w->m))
        run_fail(r, RACED, "a release races");
    look_for_elisions(r);
}
