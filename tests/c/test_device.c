/* What all backends share: elision, pools, current streams, use sets and leaving memory, sparse
 * sums; on the CPU, on the simulated device, and on a backend made for this test that knows the
 * truth about every order. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include "array/nditer.h"
#include "base/rng.h"
#include "base/mem.h"
#include "base/trace.h"
#include "device/batch.h"
#include "device/event.h"
#include "device/memory.h"
#include "device/sim/sim.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- a backend that knows the truth ---- */

#define STREAMS 4
#define VERSIONS 4096

typedef struct truth {
    uint64_t sees[STREAMS]; /* what comes before what is queued next, by stream */
} truth;

typedef struct true_event {
    int n;
    truth version[VERSIONS];
} true_event;

static pthread_mutex_t true_lock = PTHREAD_MUTEX_INITIALIZER;
static truth streams[STREAMS];
static bool slow;
static atomic_long live_events;

static void shake(void)
{
    static _Thread_local uint64_t state;
    if (slow && fan_rng(&state) % 4 == 0)
        sched_yield();
}

static int number_of(const fan_stream *s)
{
    return (int)s->handle;
}

static fan_status true_init(fan_event *e, fan_error *err)
{
    (void)err;
    e->impl = fan_calloc(sizeof(true_event));
    live_events++;
    return e->impl ? FAN_OK : FAN_ERR_NOMEM;
}

static void true_fini(fan_event *e)
{
    fan_free(e->impl);
    live_events--;
}

static fan_status true_record(fan_event *e, fan_stream *s, fan_error *err)
{
    true_event *t = e->impl;
    (void)err;
    shake();
    pthread_mutex_lock(&true_lock);
    streams[number_of(s)].sees[number_of(s)]++; /* work of its own, and the record behind it */
    t->version[t->n % VERSIONS] = streams[number_of(s)];
    t->n++;
    pthread_mutex_unlock(&true_lock);
    shake();
    return FAN_OK;
}

static fan_status true_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    true_event *t = e->impl;
    (void)err;
    shake();
    pthread_mutex_lock(&true_lock);
    if (t->n) {
        for (int i = 0; i < STREAMS; i++) {
            if (streams[number_of(s)].sees[i] < t->version[(t->n - 1) % VERSIONS].sees[i])
                streams[number_of(s)].sees[i] = t->version[(t->n - 1) % VERSIONS].sees[i];
        }
    }
    pthread_mutex_unlock(&true_lock);
    shake();
    return FAN_OK;
}

static fan_status true_query(fan_event *e, bool *done, fan_error *err)
{
    (void)e, (void)err;
    *done = true;
    return FAN_OK;
}

/* A device of its own: it shares its holds with nobody. */
typedef struct true_device {
    fan_device device;
    atomic_size_t holds;
} true_device;

static void true_device_fini(fan_device *d)
{
    fan_device_clear(d);
    fan_free(d);
}

static const fan_backend true_backend = {.name = "true",
                                         .has_streams = true,
                                         .event_init = true_init,
                                         .event_fini = true_fini,
                                         .record = true_record,
                                         .wait = true_wait,
                                         .query = true_query,
                                         .device_fini = true_device_fini};

static fan_device *true_device_new(int index)
{
    true_device *t = fan_alloc(sizeof *t);
    if (!t || fan_device_init(&t->device, &true_backend, NULL, index, &t->holds))
        abort();
    atomic_init(&t->holds, 1);
    return &t->device;
}

static int versions(fan_event *e)
{
    pthread_mutex_lock(&true_lock);
    int n = ((true_event *)e->impl)->n;
    pthread_mutex_unlock(&true_lock);
    return n;
}

/* holds: s comes after one of e's records from the `since`-th on. */
static bool holds(const fan_stream *s, const fan_event *e, int since)
{
    const true_event *t = e->impl;
    bool any = false;
    pthread_mutex_lock(&true_lock);
    for (int v = since > 0 ? since - 1 : 0; v < t->n && !any; v++) {
        any = true;
        for (int i = 0; i < STREAMS; i++) {
            any &= i == number_of(s) ||
                   streams[number_of(s)].sees[i] >= t->version[v % VERSIONS].sees[i];
        }
    }
    pthread_mutex_unlock(&true_lock);
    return any;
}

typedef struct shared {
    fan_stream *s[STREAMS];
    fan_event *users[3];
    pthread_mutex_t lock;
    fan_event *recent[16];
    atomic_long waits, elided, wrong, covered, covered_wrong;
} shared;

typedef struct worker {
    shared *w;
    uint64_t state;
    int rounds;
} worker;

static fan_event *held(fan_event *e)
{
    return e ? fan_event_hold(e) : NULL;
}

/* ask_covers: who waits for the one event need not wait for the other? */
static void ask_covers(shared *w, size_t at)
{
    pthread_mutex_lock(&w->lock);
    fan_event *e = held(w->recent[at]);
    fan_event *f = held(w->recent[(at + 1) % 16]);
    pthread_mutex_unlock(&w->lock);
    if (e && f && fan_event_covers(e, f)) {
        const true_event *a = e->impl;
        const true_event *b = f->impl;
        w->covered++;
        pthread_mutex_lock(&true_lock);
        for (int k = 0; k < STREAMS; k++) {
            w->covered_wrong += a->version[(a->n - 1) % VERSIONS].sees[k] <
                                b->version[(b->n - 1) % VERSIONS].sees[k];
        }
        pthread_mutex_unlock(&true_lock);
    }
    fan_event_drop(e);
    fan_event_drop(f);
}

static void *work(void *arg)
{
    worker *me = arg;
    shared *w = me->w;
    for (int i = 0; i < me->rounds; i++) {
        fan_stream *s = w->s[fan_rng(&me->state) % STREAMS];
        size_t at = fan_rng(&me->state) % 16;
        fan_event *e = NULL;
        fan_event *old = NULL;
        switch (fan_rng(&me->state) % 8) {
        case 0:
        case 1:
            CHECK_OK(fan_event_record(s, &e, NULL));
            pthread_mutex_lock(&w->lock);
            old = w->recent[at];
            w->recent[at] = e;
            pthread_mutex_unlock(&w->lock);
            fan_event_drop(old);
            break;
        case 2:
            if (versions(w->users[at % 3]) < VERSIONS - 16)
                CHECK_OK(fan_event_rerecord(w->users[at % 3], s, NULL));
            break;
        case 3: ask_covers(w, at); break;
        default: {
            bool elided;
            if (fan_rng(&me->state) % 4 == 0) {
                e = fan_event_hold(w->users[at % 3]);
            } else {
                pthread_mutex_lock(&w->lock);
                e = held(w->recent[at]);
                pthread_mutex_unlock(&w->lock);
            }
            if (!e)
                break;
            int since = versions(e);
            CHECK_OK(fan_stream_wait(s, e, &elided, NULL));
            w->waits++;
            if (elided) {
                w->elided++;
                w->wrong += !holds(s, e, since);
            }
            fan_event_drop(e);
        }
        }
    }
    return NULL;
}

/* Threads record and wait on the same streams; what is left out must be true, whoever was
 * between. */
static void a_wait_is_left_out_only_where_its_order_holds(void)
{
    int64_t live = fan_mem_get().live;
    fan_device *d = true_device_new(0);
    shared w;
    memset(&w, 0, sizeof w);
    memset(streams, 0, sizeof streams);
    slow = true;
    pthread_mutex_init(&w.lock, NULL);
    for (uint64_t i = 0; i < STREAMS; i++)
        w.s[i] = fan_stream_new(d, i, NULL);
    for (int i = 0; i < 3; i++)
        CHECK_OK(fan_event_new(d, &w.users[i], NULL));
    pthread_t threads[4];
    worker workers[4];
    for (int i = 0; i < 4; i++) {
        workers[i] = (worker){&w, (uint64_t)i + 1, 15000};
        pthread_create(&threads[i], NULL, work, &workers[i]);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    printf(
        "4 threads: %ld waits, %ld left out, %ld of them wrongly; %ld pairs covered, %ld wrongly\n",
        w.waits, w.elided, w.wrong, w.covered, w.covered_wrong);
    CHECK_INT(w.wrong, 0);
    CHECK_INT(w.covered_wrong, 0);
    CHECK(w.elided > 1000 && w.waits - w.elided > 1000 && w.covered > 50);
    CHECK_INT(d->elided, w.elided);
    for (int i = 0; i < 16; i++)
        fan_event_drop(w.recent[i]);
    for (int i = 0; i < 3; i++)
        fan_event_drop(w.users[i]);
    for (int i = 0; i < STREAMS; i++)
        fan_stream_drop(w.s[i]);
    fan_device_drop(d);
    CHECK_INT(live_events, 0);
    CHECK_INT(fan_mem_get().live, live);
    slow = false;
}

static fan_event *recorded(fan_stream *s)
{
    fan_event *e = NULL;
    CHECK_OK(fan_event_record(s, &e, NULL));
    return e;
}

/* check_wait: s waits for e, or the wait is left out. */
static void check_wait(fan_stream *s, fan_event *e, bool left_out)
{
    bool elided;
    CHECK_OK(fan_stream_wait(s, e, &elided, NULL));
    CHECK_INT(elided, left_out);
}

static void devices_that_share_nothing_keep_each_other(void)
{
    fan_device *d = true_device_new(0);
    fan_device *e = true_device_new(1);
    fan_stream *s = fan_stream_new(d, 0, NULL);
    fan_stream *t = fan_stream_new(e, 1, NULL);
    fan_event *a, *b;
    fan_error err = {0};
    CHECK(d->id != e->id);
    a = recorded(s);
    b = recorded(t);
    CHECK(!fan_event_covers(a, b));
    CHECK_INT(fan_event_rerecord(a, t, &err), FAN_ERR_VALUE);
    CHECK_STR(err.text, "an event of true:0 cannot be recorded on a stream of true:1");
    CHECK_OK(fan_stream_wait(t, a, NULL, NULL));
    fan_sim *m = NULL;
    fan_sim_config c = {.devices = 1, .memory = 4096};
    CHECK_OK(fan_sim_new(&c, NULL, &m, NULL));
    fan_stream *x = NULL;
    CHECK_OK(fan_sim_stream(m, 0, false, &x, NULL));
    CHECK_INT(fan_stream_wait(x, a, NULL, &err), FAN_ERR_TYPE);
    CHECK_STR(err.text, "a stream of sim:0 cannot wait for an event of true:0");
    fan_stream_drop(x);
    fan_sim_drop(m);
    fan_stream_drop(s);
    fan_device_drop(d); /* the event holds it */
    fan_event_drop(a);
    fan_event_drop(b);
    fan_stream_drop(t);
    fan_device_drop(e);
    CHECK_INT(live_events, 0);
}

static void one_thread_leaves_out_all_that_it_can(void)
{
    fan_device *d = true_device_new(0);
    fan_stream *a = fan_stream_new(d, 2, NULL);
    fan_stream *b = fan_stream_new(d, 3, NULL);
    fan_stream *c = fan_stream_new(d, 0, NULL);
    fan_stream *legacy = fan_stream_new(d, FAN_LEGACY, NULL);
    fan_event *e, *f, *g, *never;
    e = recorded(a);
    f = recorded(a);
    CHECK(fan_event_covers(f, e));
    CHECK(!fan_event_covers(e, f));
    check_wait(b, e, false);
    check_wait(b, e, true);  /* waiting twice changes nothing */
    check_wait(b, f, false); /* recorded later: only an event orders */
    check_wait(b, e, true);
    g = recorded(b);
    check_wait(c, g, false);
    check_wait(c, f, true); /* through b */
    check_wait(a, f, true); /* a stream never waits for itself */
    CHECK_OK(fan_event_new(d, &never, NULL));
    check_wait(c, never, false);
    CHECK_INT(d->events, 3);
    CHECK_INT(d->waits, 3);
    CHECK_INT(d->elided, 4);
    for (int i = 0; i < 2; i++) { /* a barrier each time */
        check_wait(legacy, f, false);
    }
    fan_stream_drop(legacy);
    uint64_t id = e->id;
    fan_event_drop(e);
    e = recorded(a); /* the same event from the pool, and yet another one */
    CHECK(e->id != id);
    CHECK_INT(live_events, 4);
    check_wait(b, e, false);
    CHECK_OK(fan_event_rerecord(never, c, NULL));
    check_wait(a, never, false);
    CHECK_OK(fan_event_rerecord(never, a, NULL)); /* bound to what it is now */
    check_wait(c, never, false);
    fan_event_drop(e);
    fan_event_drop(f);
    fan_event_drop(g);
    fan_event_drop(never);
    fan_stream_drop(a);
    fan_stream_drop(b);
    fan_stream_drop(c);
    fan_device_drop(d);
    CHECK_INT(live_events, 0);
}

/* Streams come and go; a lane that a new stream inherits must not make old knowledge speak of
 * it. */
static void lanes_are_inherited_safely(void)
{
    fan_device *d = true_device_new(0);
    fan_stream *stays = fan_stream_new(d, 0, NULL);
    uint32_t most = 0;
    for (int i = 0; i < 3000; i++) {
        fan_stream *s = fan_stream_new(d, 1, NULL);
        fan_event *e;
        if (s->lane > most)
            most = s->lane;
        e = recorded(s);
        check_wait(stays, e, false);
        fan_event_drop(e);
        fan_stream_drop(s);
    }
    CHECK(most < 8);
    /* More streams than lanes: those without one leave nothing out. */
    enum {
        MANY = 1100
    };
    static fan_stream *many[MANY];
    for (int i = 0; i < MANY; i++)
        many[i] = fan_stream_new(d, 2, NULL);
    CHECK_INT(many[MANY - 1]->lane, FAN_NO_LANE);
    fan_event *e;
    e = recorded(many[MANY - 1]);
    for (int i = 0; i < 2; i++) {
        check_wait(stays, e, false);
    }
    fan_event_drop(e);
    e = recorded(many[0]);
    for (int i = 0; i < 2; i++) {
        check_wait(many[MANY - 1], e, i == 1);
    }
    fan_event_drop(e);
    for (int i = 0; i < MANY; i++)
        fan_stream_drop(many[i]);
    fan_stream_drop(stays);
    fan_device_drop(d);
}

/* ---- the CPU ---- */

/* run_on_cpu: a job of n operands, at once. */
static void run_on_cpu(fan_job_kind kind, const fan_array *out, const fan_operand *in, size_t n,
                       const char *label)
{
    fan_job job = {.kind = kind, .out = out, .in = in, .n = n, .label = label};
    CHECK_OK(fan_device_run(fan_cpu(), NULL, &job, NULL));
}

static fan_array *on_cpu(fan_dtype dtype, int64_t n)
{
    fan_array *a = NULL;
    CHECK_OK(fan_device_array(fan_cpu(), NULL, dtype, 1, &n, NULL, &a, NULL));
    return a;
}

static void the_cpu_has_no_streams(void)
{
    fan_device *cpu = fan_cpu();
    char text[16];
    CHECK(fan_device_hold(cpu) == cpu);
    fan_device_drop(cpu);
    fan_device_drop(cpu);
    fan_device_drop(NULL);
    fan_stream_drop(NULL);
    fan_event_drop(NULL);
    CHECK_INT(cpu->id, 0);
    CHECK(!cpu->backend->has_streams);
    CHECK_STR(fan_device_text(cpu, text, sizeof text), "cpu");
    CHECK(fan_stream_current(cpu) == NULL);
    fan_array *a = on_cpu(FAN_DT_FLOAT64, 3);
    fan_array *b = on_cpu(FAN_DT_FLOAT64, 3);
    fan_array *c = on_cpu(FAN_DT_FLOAT32, 3);
    CHECK(fan_memory_device(a->storage) == NULL);
    CHECK_OK(fan_memory_record_stream(a->storage, NULL, NULL));
    CHECK_INT(fan_memory_users(a->storage, NULL, 0), 0);
    for (int i = 0; i < 3; i++)
        ((double *)(void *)a->data)[i] = i + 1;
    fan_operand in[2] = {{.array = a, .acc = FAN_DT_FLOAT64}, {.array = b, .acc = FAN_DT_FLOAT64}};
    fan_trace *t = fan_trace_new(16);
    fan_trace_begin(t);
    run_on_cpu(FAN_JOB_COPY, b, in, 1, NULL);
    run_on_cpu(FAN_JOB_SUM, b, in, 2, "two");
    fan_operand one = {.array = b, .acc = FAN_DT_FLOAT64};
    run_on_cpu(FAN_JOB_UPLOAD, c, &one, 1, NULL);
    fan_trace_end(t);
    CHECK(((float *)(void *)c->data)[2] == 6.0f);
    CHECK_INT(fan_trace_count(t), 3);
    CHECK_INT(fan_trace_at(t, 0)->kind, FAN_TRACE_COPY);
    CHECK_INT(fan_trace_at(t, 1)->kind, FAN_TRACE_KERNEL);
    CHECK_STR(fan_trace_at(t, 1)->label, "two");
    CHECK_INT(fan_trace_at(t, 1)->bytes, 72);
    CHECK_INT(fan_trace_at(t, 1)->in_place, 1);
    CHECK_INT(fan_trace_at(t, 1)->device, -1);
    CHECK_STR(fan_trace_at(t, 2)->label, "upload");
    fan_trace_free(t);
    run_on_cpu(FAN_JOB_ZERO, c, NULL, 0, NULL);
    CHECK(((float *)(void *)c->data)[2] == 0);
    fan_array *r = on_cpu(FAN_DT_FLOAT64, 1);
    fan_operand reduced = {.array = a, .acc = FAN_DT_FLOAT64};
    run_on_cpu(FAN_JOB_REDUCE, r, &reduced, 1, NULL);
    CHECK(((double *)(void *)r->data)[0] == 6);
    fan_array_drop(a);
    fan_array_drop(b);
    fan_array_drop(c);
    fan_array_drop(r);
}

/* ---- on the simulated device ---- */

static fan_sim *machine(int devices)
{
    fan_sim *m = NULL;
    fan_sim_config config = {.devices = devices, .seed = 1, .memory = 1 << 20, .run_work = true};
    CHECK_OK(fan_sim_new(&config, NULL, &m, NULL));
    return m;
}

static fan_stream *stream(fan_sim *m, int device)
{
    fan_stream *s = NULL;
    CHECK_OK(fan_sim_stream(m, device, false, &s, NULL));
    return s;
}

static void *another_thread(void *arg)
{
    fan_device *d = arg;
    fan_stream *s = fan_stream_current(d);
    uint64_t id = s->id;
    fan_stream_drop(s);
    return (void *)(uintptr_t)id;
}

static void the_current_stream_is_the_innermost_pushed_on_this_thread(void)
{
    fan_sim *m = machine(2);
    fan_device *d = fan_sim_device(m, 0);
    fan_device *other = fan_sim_device(m, 1);
    fan_stream *a = stream(m, 0);
    fan_stream *b = stream(m, 0);
    fan_stream *c = stream(m, 1);
    fan_stream *s = fan_stream_current(d);
    CHECK_INT(s->handle, 1);
    uint64_t legacy = s->id;
    fan_stream_drop(s);
    CHECK_OK(fan_stream_push(a, NULL));
    CHECK_OK(fan_stream_push(b, NULL));
    CHECK_OK(fan_stream_push(c, NULL));
    s = fan_stream_current(d);
    CHECK(s == b);
    fan_stream_drop(s);
    s = fan_stream_current(other);
    CHECK(s == c);
    fan_stream_drop(s);
    pthread_t t;
    void *id;
    pthread_create(&t, NULL, another_thread, d);
    pthread_join(t, &id);
    CHECK_INT((uintptr_t)id, legacy);
    fan_stream_pop(a); /* not the innermost */
    s = fan_stream_current(d);
    CHECK(s == b);
    fan_stream_drop(s);
    fan_stream_pop(b);
    fan_stream_pop(b); /* nothing left of it */
    fan_stream_pop(c);
    s = fan_stream_current(d);
    CHECK_INT(s->id, legacy);
    fan_stream_drop(s);
    fan_stream_drop(a);
    fan_stream_drop(b);
    fan_stream_drop(c);
    fan_sim_drop(m);
}

static fan_array *array(fan_device *d, fan_stream *owner, int64_t n)
{
    fan_array *a = NULL;
    CHECK_OK(fan_device_array(d, owner, FAN_DT_FLOAT64, 1, &n, NULL, &a, NULL));
    return a;
}

static fan_status zero(fan_stream *s, const fan_array *a)
{
    return fan_device_run(s->device, s, &(fan_job){.kind = FAN_JOB_ZERO, .out = a, .label = "zero"},
                          NULL);
}

static void memory_leaves_when_all_that_used_it_has_passed(void)
{
    int64_t live = fan_mem_get().live;
    fan_sim *m = machine(2);
    fan_device *d = fan_sim_device(m, 0);
    fan_stream *s[9], *users[16];
    for (int i = 0; i < 9; i++)
        s[i] = stream(m, i == 8);
    fan_array *a = array(d, s[0], 100);
    CHECK(fan_memory_device(a->storage) == d);
    CHECK_INT(fan_memory_users(a->storage, users, 16), 1);
    CHECK(users[0] == s[0]);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 9; i++)
            CHECK_OK(fan_memory_record_stream(a->storage, s[i], NULL));
    }
    CHECK_INT(fan_memory_users(a->storage, users, 16), 9);
    CHECK(users[0] == s[0]);
    CHECK_INT(fan_memory_users(a->storage, users, 2), 9);
    CHECK_OK(zero(s[3], a));
    char *data = a->data;
    fan_event *e;
    e = recorded(s[3]);
    fan_array_drop(a);
    fan_array *b = array(d, s[0], 100); /* not yet */
    CHECK(b->data != data);
    fan_array_drop(b);
    b = array(d, s[0], 100); /* b had no work on it: used again at once */
    CHECK(b->data != data);
    CHECK_OK(fan_event_sync(e, NULL));
    fan_array *c = array(d, s[0], 100); /* A8 */
    CHECK(c->data == data);
    fan_event_drop(e);
    fan_array_drop(b);
    fan_array_drop(c);
    for (int i = 0; i < 9; i++)
        fan_stream_drop(s[i]);
    CHECK_INT(fan_sim_races(m), 0);
    fan_sim_drop(m);
    CHECK_INT(fan_mem_get().live, live);
}

static void memory_knows_its_owner_and_its_users(void)
{
    int64_t live = fan_mem_get().live;
    fan_sim *m = machine(1);
    fan_device *d = fan_sim_device(m, 0);
    fan_stream *s[5], *users[16];
    for (int i = 0; i < 5; i++)
        s[i] = stream(m, false);
    /* No owner: the first that is given stays. */
    fan_array *a = array(d, NULL, 3);
    CHECK_INT(fan_memory_users(a->storage, users, 16), 0);
    CHECK_OK(fan_memory_record_stream(a->storage, s[1], NULL));
    CHECK_OK(fan_memory_record_stream(a->storage, s[2], NULL));
    CHECK_INT(fan_memory_users(a->storage, users, 16), 2);
    fan_memory_set_stream(a->storage, s[1]);
    fan_memory_set_stream(a->storage, s[2]);
    CHECK_INT(fan_memory_users(a->storage, users, 16), 2);
    CHECK(users[0] == s[1] && users[1] == s[2]);
    fan_array_drop(a);
    /* A stream that its user let go of lives as long as memory that it used, and not longer. */
    a = array(d, s[0], 3);
    CHECK_OK(fan_memory_record_stream(a->storage, s[4], NULL));
    CHECK_OK(zero(s[4], a));
    fan_stream_drop(s[4]);
    fan_array_drop(a);
    s[4] = stream(m, 0);
    /* An empty array has an address. */
    a = array(d, s[0], 0);
    CHECK_INT(a->storage->bytes, 0);
    CHECK(a->storage->data != NULL);
    fan_array_drop(a);
    for (int i = 0; i < 5; i++)
        fan_stream_drop(s[i]);
    CHECK_INT(fan_sim_races(m), 0);
    fan_sim_drop(m); /* with memory that still leaves */
    CHECK_INT(fan_mem_get().live, live);
}

static void much_memory_may_leave_at_once(void)
{
    fan_sim *m = machine(1);
    fan_device *d = fan_sim_device(m, 0);
    fan_stream *s = stream(m, 0);
    fan_event *half = NULL;
    char *first = NULL;
    for (int i = 0; i < 60; i++) { /* each call looks at a few of them only */
        fan_array *a = array(d, s, 8);
        if (i == 0)
            first = a->data;
        CHECK(i == 0 || a->data > first);
        CHECK_OK(zero(s, a));
        fan_array_drop(a);
        if (i == 29)
            half = recorded(s);
    }
    CHECK_OK(fan_event_sync(half, NULL));
    fan_event_drop(half);
    fan_device_poll(d);
    fan_array *a = array(d, s, 8 * 30); /* what the first thirty left is one block again */
    CHECK(a->data == first);
    CHECK_OK(fan_stream_sync(s, NULL));
    fan_array_drop(a);
    fan_device_poll(d);
    a = array(d, s, 8 * 60);
    CHECK(a->data == first);
    fan_array_drop(a);
    fan_stream_drop(s);
    fan_sim_drop(m);
}

static void full_memory_is_reclaimed_or_refused(void)
{
    fan_sim *m = machine(1);
    fan_device *d = fan_sim_device(m, 0);
    fan_stream *s = stream(m, 0);
    fan_error err = {0};
    fan_array *b = NULL;
    int64_t most = (1 << 20) / 8;
    int64_t half = most / 2;
    for (int i = 0; i < 10; i++) { /* each is waited for when the next needs its place */
        fan_array *a = array(d, s, half + 1);
        CHECK_OK(zero(s, a));
        fan_array_drop(a);
    }
    fan_array *a = array(d, s, half);
    CHECK_INT(fan_device_array(d, s, FAN_DT_FLOAT64, 1, (int64_t[]){half + 8}, NULL, &b, &err),
              FAN_ERR_DEVICE_NOMEM);
    CHECK_HAS(err.text, "sim:0 is out of memory");
    CHECK(b == NULL);
    CHECK_OK(fan_device_array(d, s, FAN_DT_FLOAT64, 1, &half, NULL, &b, &err));
    fan_array_drop(a);
    fan_array_drop(b);
    fan_stream_drop(s);
    fan_sim_drop(m);
}

static void the_trace_tells_records_waits_marks_and_frees(void)
{
    fan_sim *m = machine(2);
    fan_device *d = fan_sim_device(m, 0);
    fan_stream *a = stream(m, 0);
    fan_stream *b = stream(m, 1);
    fan_trace *t = fan_trace_new(64);
    fan_event *e;
    fan_array *x = array(d, a, 1000);
    fan_trace_begin(t);
    CHECK_OK(zero(a, x));
    e = recorded(a);
    CHECK_OK(fan_stream_wait(b, e, NULL, NULL));
    CHECK_OK(fan_stream_wait(b, e, NULL, NULL)); /* left out, and told so */
    CHECK_OK(fan_memory_record_stream(x->storage, b, NULL));
    CHECK_OK(fan_memory_record_stream(x->storage, b, NULL));
    CHECK_OK(zero(b, x));
    fan_array_drop(x);
    CHECK_OK(fan_stream_sync(b, NULL));
    fan_device_poll(d);
    fan_trace_end(t);
    static const fan_trace_kind expect[] = {FAN_TRACE_KERNEL, FAN_TRACE_RECORD, FAN_TRACE_WAIT,
                                            FAN_TRACE_ELIDED, FAN_TRACE_MARK,   FAN_TRACE_KERNEL,
                                            FAN_TRACE_SYNC,   FAN_TRACE_FREE};
    CHECK_INT(fan_trace_count(t), 8);
    for (size_t i = 0; i < 8; i++)
        CHECK_INT(fan_trace_at(t, i)->kind, expect[i]);
    const fan_trace_line *first = fan_trace_at(t, 0);
    const fan_trace_line *second = fan_trace_at(t, 5);
    const fan_trace_line *left = fan_trace_at(t, 3);
    const fan_trace_line *wait = fan_trace_at(t, 2);
    CHECK(first->start_us >= 0 && first->end_us > first->start_us &&
          second->start_us >= first->end_us);
    CHECK_INT(first->stream, a->handle);
    CHECK_INT(wait->stream, b->handle);
    CHECK_INT(wait->other, a->handle);
    CHECK_INT(wait->device, 1);
    CHECK_INT(wait->event, fan_trace_at(t, 1)->event);
    CHECK_STR(wait->label, "stream 2 of sim:0");
    CHECK_INT(left->stream, b->handle);
    CHECK_INT(left->event, wait->event);
    CHECK_INT(fan_trace_at(t, 7)->bytes, 8000);
    fan_trace_free(t);
    fan_event_drop(e);
    fan_stream_drop(a);
    fan_stream_drop(b);
    fan_sim_drop(m);
}

/* ---- sparse sums ---- */

static fan_array *filled(fan_dtype dtype, int ndim, const int64_t *shape, uint64_t *state,
                         int64_t most)
{
    fan_array *a = NULL;
    CHECK_OK(fan_array_new(dtype, ndim, shape, NULL, &a, NULL));
    for (int64_t i = 0; i < a->size; i++) {
        int64_t v = (int64_t)(fan_rng(state) % (uint64_t)most);
        if (dtype == FAN_DT_INT64) {
            memcpy(a->data + 8 * i, &v, 8);
        } else if (dtype == FAN_DT_INT32) {
            memcpy(a->data + 4 * i, &(int32_t){(int32_t)v}, 4);
        } else if (dtype == FAN_DT_FLOAT32) {
            memcpy(a->data + 4 * i, &(float){(float)v}, 4);
        } else {
            memcpy(a->data + 8 * i, &(double){(double)v}, 8);
        }
    }
    return a;
}

static fan_sparse *random_sparse(fan_format f, fan_dtype dtype, uint64_t *state)
{
    int64_t shape[2] = {6, 5};
    int64_t nnz = (int64_t)(fan_rng(state) % 7);
    fan_sparse *s = NULL;
    fan_array *indices;
    fan_array *pointers = NULL;
    fan_array *values = filled(dtype, 1, &nnz, state, 100);
    if (f == FAN_FORMAT_COO) {
        int64_t grid[2] = {2, nnz};
        indices = filled(fan_rng(state) % 2 ? FAN_DT_INT64 : FAN_DT_INT32, 2, grid, state, 5);
    } else {
        int64_t rows = f == FAN_FORMAT_CSR ? 7 : 6;
        indices = filled(FAN_DT_INT64, 1, &nnz, state, 5);
        pointers = filled(FAN_DT_INT64, 1, &rows, state, 1);
        int64_t *p = (int64_t *)(void *)pointers->data;
        for (int i = 1; i < rows - 1; i++) {
            uint64_t left = (uint64_t)(nnz - p[i - 1]);
            p[i] = p[i - 1] + (int64_t)(fan_rng(state) % (left + 1));
        }
        p[rows - 1] = nnz;
    }
    CHECK_OK(fan_sparse_new(f, 2, shape, indices, pointers, values, false, &s, NULL));
    fan_array_drop(indices);
    fan_array_drop(pointers);
    fan_array_drop(values);
    return s;
}

static fan_array *moved(fan_stream *s, const fan_array *host)
{
    fan_array *on = NULL;
    if (!host)
        return NULL;
    fan_operand in = {.array = host, .acc = host->dtype};
    CHECK_OK(fan_device_array(s->device, s, host->dtype, host->ndim, host->shape, host, &on, NULL));
    CHECK_OK(fan_device_run(
        s->device, s, &(fan_job){.kind = FAN_JOB_UPLOAD, .out = on, .in = &in, .n = 1}, NULL));
    return on;
}

static bool same_part(fan_stream *s, const fan_array *on, const fan_array *host)
{
    if (!on || !host)
        return on == host;
    fan_array *back = NULL;
    CHECK_OK(fan_array_new(on->dtype, on->ndim, on->shape, NULL, &back, NULL));
    CHECK_OK(s->device->backend->read(s, back, on, NULL));
    bool same = back->dtype == host->dtype && fan_array_same_shape(back, host) &&
                fan_array_hash(back) == fan_array_hash(host);
    fan_array_drop(back);
    return same;
}

static void a_sparse_sum_on_a_device_is_that_on_the_host(void)
{
    uint64_t state = 5;
    long queued = 0;
    long through_host = 0;
    for (int round = 0; round < 400; round++) {
        fan_sim *m = machine(1);
        fan_stream *s = stream(m, 0);
        size_t n = 1 + fan_rng(&state) % 3;
        bool coalesce = fan_rng(&state) % 2;
        bool plain = !coalesce;
        bool widens = fan_rng(&state) % 4 == 0;
        fan_sparse *host[3], *on[3], *want, *got;
        fan_sparse_operand from[3], to[3];
        fan_scale scale = {.on = fan_rng(&state) % 4 == 0, .re = 2, .i = 2};
        fan_format f = (fan_format)(fan_rng(&state) % 3);
        for (size_t i = 0; i < n; i++) {
            fan_dtype dtype = widens && i == 0 ? FAN_DT_FLOAT32 : FAN_DT_FLOAT64;
            host[i] = random_sparse(fan_rng(&state) % 8 ? f : FAN_FORMAT_COO, dtype, &state);
            plain &= host[i]->format == FAN_FORMAT_COO;
            plain &= !widens || n == 1;
            fan_array *indices = moved(s, host[i]->indices);
            fan_array *pointers = moved(s, host[i]->pointers);
            fan_array *values = moved(s, host[i]->values);
            CHECK_OK(fan_sparse_new(host[i]->format, 2, host[i]->shape, indices, pointers, values,
                                    false, &on[i], NULL));
            fan_array_drop(indices);
            fan_array_drop(pointers);
            fan_array_drop(values);
            from[i] = (fan_sparse_operand){host[i], dtype};
            to[i] = (fan_sparse_operand){on[i], dtype};
        }
        fan_dtype result = fan_rng(&state) % 3 ? FAN_DT_NONE : FAN_DT_FLOAT32;
        plain &= !scale.on;
        plain &= result == FAN_DT_NONE || result == from[n - 1].acc;
        CHECK_OK(fan_sparse_merge(from, n, coalesce, result, &scale, &want, NULL));
        CHECK_OK(
            fan_device_sparse_merge(s->device, s, to, n, coalesce, result, &scale, &got, NULL));
        queued += plain;
        through_host += !plain;
        CHECK_INT(got->format, want->format);
        CHECK_INT(got->coalesced, want->coalesced);
        CHECK_INT(got->nnz_coalesced, want->nnz_coalesced);
        CHECK(fan_memory_device(got->values->storage) == s->device);
        CHECK(same_part(s, got->indices, want->indices));
        CHECK(same_part(s, got->pointers, want->pointers));
        CHECK(same_part(s, got->values, want->values));
        CHECK_INT(fan_sim_races(m), 0);
        fan_sparse_drop(want);
        fan_sparse_drop(got);
        for (size_t i = 0; i < n; i++) {
            fan_sparse_drop(host[i]);
            fan_sparse_drop(on[i]);
        }
        fan_stream_drop(s);
        fan_sim_drop(m);
    }
    printf("sparse sums: %ld queued, %ld through the host\n", queued, through_host);
    CHECK(queued > 20 && through_host > 20);
}

/* ---- memory that fails ---- */

/* scenario: some of everything; passes up the first failure. Whatever happens, all is given
 * back. */
static fan_status scenario(fan_error *err)
{
    fan_sim *m = NULL;
    fan_sim_config config = {.devices = 2, .seed = 3, .memory = 1 << 16, .run_work = true};
    fan_stream *a = NULL;
    fan_stream *b = NULL;
    fan_stream *c = NULL;
    fan_array *x = NULL;
    fan_array *y = NULL;
    fan_array *host = NULL;
    fan_event *e = NULL;
    fan_event *f = NULL;
    fan_status status;
    int64_t shape[6] = {2, 1, 2, 1, 2, 1};
    FAN_GO(fan_sim_new(&config, NULL, &m, err));
    FAN_GO(fan_sim_stream(m, 0, true, &a, err));
    FAN_GO(fan_sim_stream(m, 0, false, &b, err));
    FAN_GO(fan_sim_stream(m, 1, false, &c, err));
    FAN_GO(fan_stream_push(a, err));
    FAN_GO(fan_array_new(FAN_DT_FLOAT64, 6, shape, NULL, &host, err));
    fan_fill_zero(host);
    FAN_GO(fan_device_array(a->device, a, FAN_DT_FLOAT64, 6, shape, NULL, &x, err));
    FAN_GO(fan_sim_array(m, 1, FAN_DT_FLOAT64, 6, shape, host, &y, err));
    fan_operand up = {.array = host, .acc = FAN_DT_FLOAT64};
    fan_operand over = {.array = x, .acc = FAN_DT_FLOAT64};
    FAN_GO(fan_device_run(a->device, a,
                          &(fan_job){.kind = FAN_JOB_UPLOAD, .out = x, .in = &up, .n = 1}, err));
    FAN_GO(fan_event_record(a, &e, err));
    FAN_GO(fan_event_new(c->device, &f, err));
    FAN_GO(fan_stream_wait(c, e, NULL, err));
    for (int i = 0; i < 6; i++)
        FAN_GO(fan_memory_record_stream(x->storage, i % 2 ? b : c, err));
    FAN_GO(fan_memory_record_stream(y->storage, c, err));
    FAN_GO(fan_device_run(c->device, c,
                          &(fan_job){.kind = FAN_JOB_COPY, .out = y, .in = &over, .n = 1}, err));
    FAN_GO(fan_event_rerecord(f, c, err));
    FAN_GO(fan_stream_wait(b, f, NULL, err));
    FAN_GO(fan_memory_record_stream(y->storage, b, err));
    fan_array_drop(x);
    x = NULL;
    FAN_GO(fan_device_run(b->device, b, &(fan_job){.kind = FAN_JOB_ZERO, .out = y}, err));
    FAN_GO(fan_sim_host_read(m, b, host, y, err));
    FAN_GO(fan_sim_synchronize(m, err));
done:
    if (a)
        fan_stream_pop(a);
    fan_array_drop(x);
    fan_array_drop(y);
    fan_array_drop(host);
    fan_event_drop(e);
    fan_event_drop(f);
    fan_stream_drop(a);
    fan_stream_drop(b);
    fan_stream_drop(c);
    if (m)
        CHECK_INT(fan_sim_races(m), 0);
    fan_sim_drop(m);
    return status;
}

static void every_allocation_fails_once(void)
{
    int64_t live = fan_mem_get().live;
    long refused = 0;
    for (int count = 1; count <= 2; count++) { /* one, and from n on */
        for (int64_t n = 0;; n++) {
            fan_error err = {0};
            fan_mem_fail_at(n, count == 1 ? 1 : -1);
            fan_status status = scenario(&err);
            int64_t failed = fan_mem_get().failed;
            fan_mem_fail_at(-1, 0);
            static int64_t before;
            bool hit = failed != before;
            before = failed;
            if (status != FAN_OK) {
                CHECK_INT(status, FAN_ERR_NOMEM);
                CHECK(hit && err.text[0]);
            }
            CHECK_INT(fan_mem_get().live, live);
            refused += status == FAN_ERR_NOMEM;
            if (!hit)
                break;
        }
    }
    printf("%ld runs refused for want of memory\n", refused);
    CHECK(refused > 40);
}

static atomic_bool enough;

static void *at_the_lock(void *device)
{
    fan_device *d = device;
    while (!enough) {
        (void)pthread_mutex_lock(&d->lock);
        for (volatile int i = 0; i < 1000; i++)
            continue;
        (void)pthread_mutex_unlock(&d->lock);
    }
    return NULL;
}

/* Forked while another thread holds a device's lock, which is nobody's in the child. */
static void a_child_has_every_lock_free(void)
{
    fan_sim_config config = {.devices = 2};
    fan_sim *m;
    pthread_t t;
    CHECK_OK(fan_sim_new(&config, NULL, &m, NULL));
    fan_device *d = fan_sim_device(m, 1);
    CHECK_INT(pthread_create(&t, NULL, at_the_lock, d), 0);
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        if (child == 0) {
            bool is_free =
                pthread_mutex_trylock(&d->lock) == 0 && pthread_mutex_unlock(&d->lock) == 0;
            fan_stream *s;
            if (!is_free || fan_sim_stream(m, 0, false, &s, NULL) != FAN_OK)
                _exit(1);
            fan_stream_drop(s);
            _exit(0);
        }
        int status = -1;
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK_INT(status, 0);
    }
    enough = true;
    pthread_join(t, NULL);
    fan_sim_drop(m);
}

static void a_job_on_memory_that_was_taken_back_is_refused(void)
{
    fan_array *a[3];
    int64_t shape[] = {4};
    fan_error err;
    for (int i = 0; i < 3; i++)
        CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 1, shape, NULL, &a[i], NULL));
    fan_operand in[] = {{.array = a[1], .acc = FAN_DT_FLOAT32},
                        {.array = a[2], .acc = FAN_DT_FLOAT32}};
    const fan_job job = {.kind = FAN_JOB_SUM, .out = a[0], .in = in, .n = 2};
    CHECK_OK(fan_job_check(&job, &err));
    for (int i = 0; i < 3; i++) {
        atomic_store(&a[i]->storage->ended, "the lender has it");
        CHECK_INT(fan_job_check(&job, &err), FAN_ERR_STATE);
        CHECK_HAS(err.text, "the lender has it");
        atomic_store(&a[i]->storage->ended, NULL);
    }
    for (int i = 0; i < 3; i++)
        fan_array_drop(a[i]);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    devices_that_share_nothing_keep_each_other();
    one_thread_leaves_out_all_that_it_can();
    lanes_are_inherited_safely();
    a_wait_is_left_out_only_where_its_order_holds();
    the_cpu_has_no_streams();
    a_job_on_memory_that_was_taken_back_is_refused();
    a_child_has_every_lock_free();
    the_current_stream_is_the_innermost_pushed_on_this_thread();
    memory_leaves_when_all_that_used_it_has_passed();
    memory_knows_its_owner_and_its_users();
    much_memory_may_leave_at_once();
    full_memory_is_reclaimed_or_refused();
    the_trace_tells_records_waits_marks_and_frees();
    a_sparse_sum_on_a_device_is_that_on_the_host();
    every_allocation_fails_once();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
