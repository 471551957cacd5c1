#define _POSIX_C_SOURCE 200809L
#include "device/sim.h"

#include "base/rng.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "device/machine.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#define MEMORY ((size_t)1 << 30)
#define LAUNCH_US 3.0
#define GBYTES_PER_S 1000.0
#define KERNEL_US 1.0 /* at least */

/* Footprints: a kind, and a number within it. */
enum {
    OF_STREAM = 1,
    OF_EVENT,
    OF_BLOCK,
    OF_MUTEX,
    OF_PROGRESS,
    OF_FAULTS,
    OF_QUEUED,
    OF_CAPTURES,
    OF_MEMORY,
    OF_CALLS,
    OF_THREAD,
    OF_ACTORS,
    OF_BUDGET,
    OF_COUNTERS,
    OF_HOST,
    OF_KNOWN
};
_Static_assert(FAN_FAULT_NO_TURNS + OF_KNOWN == FAN_FAULT_NO_FOOTPRINT_KNOWN, "base/fault.h has them in this order");
#define NAME(kind, number) ((uint64_t)(kind) << 56 | ((number) & ((UINT64_C(1) << 56) - 1)))
#define OF_ANOTHER (UINT64_C(1) << 63) /* of another machine than the thread's: all others are one */

/* Numbers of mutexes that spawned threads make: (machine, thread, his how manieth), above those that are counted. */
#define MADE_HERE (UINT64_C(1) << 62)
#define OF_ITS_MAKER ((UINT64_C(1) << 46) - 1)

/* The machine whose spawned thread this is. */
static _Thread_local struct {
    fan_sim *m;
    int actor;
    bool fresh; /* he has just begun a call: its first yield is this one */
    bool vain;  /* his last call was told "not yet" */
    fan_thread_hooks hooks;
} here;

static atomic_uint_fast64_t machines;
static _Thread_local int in_kernel; /* a kernel is one step: nobody else gets the turn inside */

static void lock(fan_sim *m) { (void)pthread_mutex_lock(&m->lock); }

static void unlock(fan_sim *m) { (void)pthread_mutex_unlock(&m->lock); }

static int actor_of(const fan_sim *m) { return here.m == m ? here.actor : -1; }

/* maker: who makes something on m: a thread of another machine has a number of its own, too. */
static size_t maker(void) { return here.m ? (size_t)(1 + here.actor) : 0; }

static size_t host_of(const fan_sim *m) { return (size_t)(1 + actor_of(m)); }

static uint32_t lane_of(const fan_sim *m) { return m->host_lane[host_of(m)]; }

/* touch: told to the search that the calling thread's machine follows, whosever the thing is. */
static void touch(const fan_sim *m, uint64_t name, fan_touch how)
{
    const fan_sim *mine = here.m;
    if (FAN_FAULT_IS(FAN_FAULT_NO_TURNS + (fan_fault_id)(name >> 56 & 0x7f)))
        return;
    if (mine && mine->has_chooser && mine->chooser.touched)
        mine->chooser.touched(mine->chooser.ctx, mine == m ? name : name | OF_ANOTHER, how);
}

/* new_name: for something made now: by whom, and his how manieth. So it has the same name in every order of the others.
 */
static uint64_t new_name(fan_sim *m, int kind)
{
    size_t by = maker();
    return NAME(kind, (uint64_t)by << 40 | ++m->made[by]);
}

static double later(double a, double b) { return a > b ? a : b; }

static void site_of(const fan_sim *m, char *buf, size_t size)
{
    buf[0] = '\0';
    if (m->hooks.site)
        m->hooks.site(m->hooks.ctx, buf, size);
}

#define SITE 96

/* ---- calls ---- */

static fan_status gave_up(fan_sim *m, fan_error *err)
{
    switch (fan_host_sched_given_up(m->turns)) {
    case FAN_ABANDONED:
        return fan_fail(err, FAN_ERR_STATE, "abandoned: the machine ends this run");
    case FAN_DEADLOCKED:
        return fan_fail(err, FAN_ERR_DEADLOCK, "the machine gave up: its host threads are in a deadlock");
    case FAN_GOING:
        break;
    }
    return FAN_OK;
}

/* enter: every call of the table begins here, locked: has the machine given up, is this the call that is to fail? */
static fan_status enter(fan_sim *m, const char *call, fan_error *err)
{
    FAN_TRY(gave_up(m, err));
    m->calls++;
    touch(m, NAME(OF_CALLS, 0), FAN_TOUCH_COUNTS);
    touch(m, NAME(OF_CAPTURES, 0),
          m->recordings ? FAN_TOUCH_WRITES : FAN_TOUCH_READS); /* a call may join a capture, or break it */
    if (m->planned) /* who comes after the one that failed depends on it, too */
        touch(m, NAME(OF_FAULTS, 0), true);
    if (m->fail_at < 0)
        return FAN_OK;
    if (m->fail_at-- > 0)
        return FAN_OK;
    return fan_fail_code(err, m->fail_with, m->fail_with == FAN_ERR_DEVICE ? 999 : 2,
                         "%s of the simulated device failed, as it was told to", call);
}

static fan_status raise(fan_sim *m, const fan_race *race, fan_error *err)
{
    char text[FAN_ERROR_TEXT];
    fan_sim_race_text(m, race, text, sizeof text);
    return fan_fail(err, FAN_ERR_RACE, "%s", text);
}

/* raise_pending: a race that a release found, by the first call that can say so. */
static fan_status raise_pending(fan_sim *m, fan_error *err)
{
    if (!m->has_pending)
        return FAN_OK;
    m->has_pending = false;
    return raise(m, &m->pending, err);
}

static void keep_race(fan_sim *m, const fan_race *race)
{
    m->races++;
    if (!m->has_first) {
        m->first = *race;
        m->has_first = true;
    }
}

/* ---- queues ---- */

static fan_sim_queue *queue_of(const fan_stream *s) { return s->impl; }

static fan_status new_lane(fan_sim *m, int device, uint64_t handle, uint32_t *out, fan_error *err)
{
    FAN_TRY(fan_race_check_lane(m->order, out, err));
    fan_race_check_name(m->order, *out, FAN_SIM_WHO(device, handle));
    return FAN_OK;
}

static fan_status new_host(fan_sim *m, size_t host, uint64_t actor, fan_error *err)
{
    if (m->has_lane[host])
        return FAN_OK;
    FAN_TRY(new_lane(m, -1, actor, &m->host_lane[host], err));
    if (fan_race_check_host(m->order, m->host_lane[host]) != FAN_OK)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread"); /* the lane stays unused */
    m->has_lane[host] = true;
    return FAN_OK;
}

/* queue_new: seen: what is known to whoever makes it; NULL: nothing. */
static fan_status queue_new(fan_sim *m, int device, uint64_t handle, bool blocking, const fan_clock *seen,
                            fan_sim_queue **out, fan_error *err)
{
    fan_sim_queue *q = fan_calloc(sizeof *q);
    if (!q || fan_grow((void **)&m->queues, &m->queues_cap, m->nqueues + 1, sizeof *m->queues)) {
        fan_free(q);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
    fan_status status = FAN_OK;
    if (seen && fan_race_check_reuse(m->order, seen, &q->lane))
        fan_race_check_name(m->order, q->lane, FAN_SIM_WHO(device, handle));
    else
        status = new_lane(m, device, handle, &q->lane, err);
    if (status != FAN_OK) {
        fan_free(q);
        return status;
    }
    q->refs = 1;
    q->device = device;
    q->handle = handle;
    q->name = new_name(m, OF_STREAM);
    q->legacy = handle == 1;
    q->blocking = blocking || q->legacy;
    q->tail = &q->head;
    q->at = m->nqueues;
    m->queues[m->nqueues++] = q;
    *out = q;
    return FAN_OK;
}

static void queue_drop(fan_sim_queue *q)
{
    if (q)
        q->refs--; /* sweep takes it */
}

/* sweep: frees queues that nobody knows and that have nothing left to do. */
static void sweep(fan_sim *m)
{
    size_t kept = 0;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *q = m->queues[i];
        if (q->refs == 0 && !q->head) {
            fan_race_check_leave(m->order, q->lane);
            fan_free(q);
            continue;
        }
        q->at = kept;
        m->queues[kept++] = q;
    }
    m->nqueues = kept;
}

static void append(fan_sim *m, fan_sim_queue *q, fan_sim_op *op)
{
    q->queued++;
    if (!op)
        return;
    op->next = NULL;
    op->number = m->number++;
    *q->tail = op;
    q->tail = &op->next;
}

/* pop: takes the head off; the caller frees it. */
static fan_sim_op *pop(fan_sim_queue *q)
{
    fan_sim_op *op = q->head;
    q->head = op->next;
    if (!q->head)
        q->tail = &q->head;
    q->done++;
    return op;
}

/* hold_back: what is queued on q from now on runs after `point`. The clocks are the caller's business. */
static fan_status hold_back(fan_sim *m, fan_sim_queue *q, fan_sim_point point, fan_error *err)
{
    if (point.queue == q || point.queue->done >= point.upto)
        return FAN_OK;
    fan_sim_op *op = NULL;
    if (m->config.run_work) {
        op = fan_calloc(sizeof *op);
        if (!op)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        op->wait = point;
        point.queue->refs++;
    }
    append(m, q, op);
    return FAN_OK;
}

/* ---- captures ---- */

static _Thread_local fan_capture_mode own_mode;

int fan_sim_capture_mode(int mode)
{
    int old = (int)own_mode;
    own_mode = (fan_capture_mode)mode;
    return old;
}

static void recording_drop(fan_sim_recording *r)
{
    if (!r || --r->refs)
        return;
    fan_capture_fini(&r->capture);
    fan_free(r);
}

/* illegal: a code of a capture's as a failure that names the stream; -1 is want of memory. */
static fan_status illegal(const fan_sim_queue *q, int code, const char *what, fan_error *err)
{
    if (code == 0)
        return FAN_OK;
    if (code < 0)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a capture");
    return fan_fail_code(err, FAN_ERR_CAPTURE, code, "%s on stream %llu of sim:%d: %s (CUDA's code %d)", what,
                         (unsigned long long)q->handle, q->device, fan_capture_words(code), code);
}

/* legacy_is_free: nothing that the legacy stream of q's device would have to wait for is captured. */
static fan_status legacy_is_free(fan_sim *m, const fan_sim_queue *q, fan_error *err)
{
    fan_status status = FAN_OK;
    if (!q->legacy || !m->recordings)
        return FAN_OK;
    for (size_t i = 0; i < m->nqueues; i++) {
        const fan_sim_queue *other = m->queues[i];
        if (other->recording && other->device == q->device && other->blocking)
            status = illegal(q, fan_capture_break(&other->recording->capture, FAN_CAPTURE_IMPLICIT), "work", err);
    }
    return status;
}

/* not_captured: the host asks q for something that a captured stream has not. */
static fan_status not_captured(const fan_sim_queue *q, const char *what, fan_error *err)
{
    return q->recording ? illegal(q, fan_capture_break(&q->recording->capture, FAN_CAPTURE_UNSUPPORTED), what, err)
                        : FAN_OK;
}

/* has_time: the same of an event. */
static fan_status has_time(const fan_sim_event *ev, const fan_event *e, const char *what, fan_error *err)
{
    if (!ev->recording)
        return FAN_OK;
    int code = ev->recording->capture.ended ? FAN_CAPTURE_EVENT
                                            : fan_capture_break(&ev->recording->capture, FAN_CAPTURE_EVENT);
    return fan_fail_code(err, FAN_ERR_CAPTURE, code, "%s of an event of sim:%d: %s (CUDA's code %d)", what,
                         e->device->index, fan_capture_words(code), code);
}

static fan_sim_command *command_new(size_t bytes)
{
    fan_sim_command *c = fan_alloc(bytes);
    if (c)
        memset(c, 0, sizeof *c);
    return c;
}

static void command_put(fan_sim_graph *g, fan_sim_command *c)
{
    *g->tail = c;
    g->tail = &c->next;
}

static fan_status capture_record(fan_sim_event *ev, fan_sim_queue *q, fan_error *err)
{
    fan_sim_recording *r = q->recording;
    fan_sim_command *c = command_new(sizeof *c);
    if (!c)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a capture");
    int code = fan_capture_record(&r->capture, q->member, &ev->place);
    if (code) {
        fan_free(c);
        return illegal(q, code, "record", err);
    }
    recording_drop(ev->recording);
    ev->recording = r;
    r->refs++;
    ev->number = r->graph->events++;
    c->kind = FAN_COMMAND_RECORD;
    c->member = q->member;
    c->event = ev->number;
    command_put(r->graph, c);
    return FAN_OK;
}

/* pull_in: q waits for an event of a capture that it is not in. */
static fan_status pull_in(fan_sim_queue *q, const fan_sim_event *ev, fan_error *err)
{
    fan_sim_recording *r = ev->recording;
    fan_sim_graph *g = r->graph;
    if (q->legacy)
        return illegal(q, fan_capture_break(&r->capture, FAN_CAPTURE_IMPLICIT), "wait", err);
    if (fan_grow((void **)&g->device, &g->device_cap, (size_t)g->members + 1, sizeof *g->device))
        return illegal(q, -1, "wait", err);
    FAN_TRY(illegal(q, fan_capture_pull(&r->capture, &ev->place, &q->member), "wait", err));
    g->device[g->members++] = q->device;
    q->recording = r;
    r->refs++;
    q->refs++; /* until the capture ends */
    return FAN_OK;
}

/* capture_wait: where q or the event is captured; *done false: neither is. */
static fan_status capture_wait(fan_sim_queue *q, const fan_sim_event *ev, bool *done, fan_error *err)
{
    fan_sim_recording *mine = q->recording, *theirs = ev->recording;
    *done = mine || theirs;
    if (!*done)
        return FAN_OK;
    if (!theirs) /* a wait for nothing is none */
        return ev->point.queue ? illegal(q, fan_capture_break(&mine->capture, FAN_CAPTURE_ISOLATION), "wait", err)
                               : FAN_OK;
    if (theirs->capture.ended) {
        if (mine)
            fan_capture_break(&mine->capture, FAN_CAPTURE_EVENT);
        return illegal(q, FAN_CAPTURE_EVENT, "wait", err);
    }
    if (mine && mine != theirs) {
        fan_capture_break(&mine->capture, FAN_CAPTURE_MERGE);
        return illegal(q, fan_capture_break(&theirs->capture, FAN_CAPTURE_MERGE), "wait", err);
    }
    fan_sim_command *c = command_new(sizeof *c);
    if (!c)
        return illegal(q, -1, "wait", err);
    fan_status status =
        mine ? illegal(q, fan_capture_wait(&mine->capture, q->member, &ev->place), "wait", err) : pull_in(q, ev, err);
    if (status != FAN_OK) {
        fan_free(c);
        return status;
    }
    c->kind = FAN_COMMAND_WAIT;
    c->member = q->member;
    c->event = ev->number;
    command_put(theirs->graph, c);
    return FAN_OK;
}

/* legacy: A7: before anything on the legacy default stream, all that its device's blocking streams had queued; before
 * anything on a blocking stream, all that the legacy stream had. FAN_ERR_NOMEM leaves waits behind that order more than
 * was asked, which nobody can tell. */
static fan_status legacy(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    FAN_TRY(legacy_is_free(m, q, err));
    if (!q->blocking)
        return FAN_OK;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *other = m->queues[i];
        if (other == q || other->device != q->device || !(q->legacy ? other->blocking : other->legacy))
            continue;
        touch(m, other->name, false);
        FAN_TRY(hold_back(m, q, (fan_sim_point){other, other->queued}, err));
        /* What the host knows is of no account: nothing may be queued by him (a sync). */
        if (fan_race_check_sync(m->order, q->lane, fan_race_check_clock(m->order, other->lane)) != FAN_OK)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        q->end_us = later(q->end_us, other->end_us);
    }
    return FAN_OK;
}

/* ---- running ---- */

/* settle: takes off the waits that have come true; each may let others come true. */
static void settle(fan_sim *m)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 0; i < m->nqueues; i++) {
            fan_sim_queue *q = m->queues[i];
            while (q->head && q->head->wait.queue && q->head->wait.queue->done >= q->head->wait.upto) {
                fan_sim_op *op = pop(q);
                queue_drop(op->wait.queue);
                fan_free(op);
                moved = true;
            }
        }
    }
}

/* before: whether queue a goes first by a named schedule. */
static bool before(const fan_sim *m, const fan_sim_queue *a, const fan_sim_queue *b)
{
    switch (m->config.schedule) {
    case FAN_SIM_LIFO:
        return a->head->number > b->head->number;
    case FAN_SIM_ROUND_ROBIN: /* the first behind the one that ran last */
        return (a->at > m->last) != (b->at > m->last) ? a->at > m->last : a->at < b->at;
    case FAN_SIM_STARVE:
        if ((a->handle == m->config.starve) != (b->handle == m->config.starve))
            return b->handle == m->config.starve;
        break;
    case FAN_SIM_FIFO:
    case FAN_SIM_SEEDED:
        break;
    }
    return a->head->number < b->head->number;
}

/* pick: the queue whose head runs next; NULL where none may run. */
static fan_sim_queue *pick(fan_sim *m)
{
    fan_sim_queue *best = NULL;
    uint64_t n = 0;
    settle(m);
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *q = m->queues[i];
        if (!q->head || q->head->wait.queue || q->running)
            continue;
        n++;
        if (m->config.schedule == FAN_SIM_SEEDED ? fan_rng(&m->random) % n == 0 : !best || before(m, q, best))
            best = q;
    }
    return best;
}

/* run_one: runs the head of q; the lock is let go meanwhile. */
static fan_status run_one(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sim_op *op = q->head;
    q->running = true;
    q->refs++;
    m->last = q->at;
    m->executor = fan_thread_id();
    m->depth++;
    size_t begin = op->njobs > 1 ? fan_rng(&m->random) % op->njobs : 0;
    unlock(m);

    in_kernel++;
    for (size_t i = 0; i < op->njobs; i++) /* a kernel runs on its device alone, and its parts in any order */
        fan_job_run(&op->jobs[(begin + i) % op->njobs], false);
    if (op->fn)
        status = op->fn(op->ctx, err);
    if (op->fini)
        op->fini(op->ctx);
    in_kernel--;

    lock(m);
    if (--m->depth == 0)
        m->executor = 0;
    fan_free(pop(q));
    q->running = false;
    q->refs--;
    (void)pthread_cond_broadcast(&m->ran);
    return status;
}

/* stand_by: another thread runs work: waits until it is through with one piece. */
static void stand_by(fan_sim *m)
{
    void *let_go = NULL;
    uint64_t other = m->executor;
    if (m->hooks.before_block) {
        unlock(m);
        let_go = m->hooks.before_block(m->hooks.ctx);
        lock(m);
    }
    if (m->executor == other)
        (void)pthread_cond_wait(&m->ran, &m->lock);
    if (m->hooks.after_block) {
        unlock(m);
        m->hooks.after_block(m->hooks.ctx, let_go);
        lock(m);
    }
}

static bool idle(const fan_sim *m)
{
    for (size_t i = 0; i < m->nqueues; i++)
        if (m->queues[i]->done < m->queues[i]->queued)
            return false;
    return true;
}

static fan_status stuck(fan_sim *m, fan_error *err)
{
    char text[FAN_ERROR_TEXT] = "";
    for (size_t i = 0; i < m->nqueues; i++) {
        const fan_sim_queue *q = m->queues[i];
        if (q->head && q->running)
            fan_append(text, sizeof text, "; stream %llu of sim:%d runs the kernel that asks",
                       (unsigned long long)q->handle, q->device);
        else if (q->head && q->head->wait.queue)
            fan_append(text, sizeof text, "; stream %llu of sim:%d waits for stream %llu of sim:%d",
                       (unsigned long long)q->handle, q->device, (unsigned long long)q->head->wait.queue->handle,
                       q->head->wait.queue->device);
    }
    return fan_fail(err, FAN_ERR_DEADLOCK, "nothing that is queued can run%s", text);
}

/* run_until: runs work, in any order that is allowed, until point has passed; queue NULL: until all is idle. Stops at
 * the first kernel that fails. */
static fan_status run_until(fan_sim *m, fan_sim_point point, fan_error *err)
{
    fan_status status = FAN_OK;
    if (!m->config.run_work) {
        for (size_t i = 0; i < m->nqueues; i++)
            m->queues[i]->done = m->queues[i]->queued;
        return FAN_OK;
    }
    if (point.queue)
        point.queue->refs++;
    while (status == FAN_OK) {
        settle(m);
        if (point.queue ? point.queue->done >= point.upto : idle(m))
            break;
        if (m->executor && m->executor != fan_thread_id()) {
            stand_by(m);
            continue;
        }
        fan_sim_queue *q = pick(m);
        status = q ? run_one(m, q, err) : stuck(m, err);
    }
    queue_drop(point.queue);
    sweep(m);
    return status;
}

/* learn: the calling thread comes after all that `what` says. Memory that somebody lets go of asks for it
 * (sim_dropped). */
static fan_status learn(fan_sim *m, const fan_clock *what, fan_error *err)
{
    touch(m, NAME(OF_KNOWN, host_of(m)), true);
    return fan_race_check_sync(m->order, lane_of(m), what) == FAN_OK
               ? FAN_OK
               : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
}

/* finish: runs work until all that q has queued by now has run, and lets the calling thread know what q knew. */
static fan_status finish(fan_sim *m, fan_sim_queue *q, fan_error *err)
{
    fan_clock then;
    fan_clock_init(&then);
    double us = q->end_us;
    fan_status status = fan_clock_copy(&then, fan_race_check_clock(m->order, q->lane))
                            ? fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait")
                            : FAN_OK;
    if (status == FAN_OK)
        status = run_until(m, (fan_sim_point){q, q->queued}, err);
    if (status == FAN_OK)
        status = learn(m, &then, err);
    fan_clock_fini(&then);
    if (status == FAN_OK)
        m->host_us[host_of(m)] = later(m->host_us[host_of(m)], us);
    return status;
}

/* ---- accesses ---- */

/* What an operation touches, one after the other; false behind the last. */
typedef bool visit(const void *what, size_t i, const fan_array **a, bool *write);

static bool job_visit(const void *what, size_t i, const fan_array **a, bool *write)
{
    const fan_job *job = what;
    size_t reads = job->kind == FAN_JOB_UPLOAD ? 0 : job->n; /* the host's memory is no business of the checker */
    *write = false;
    if (i < reads) {
        *a = job->in[i].array;
        return true;
    }
    i -= reads;
    if (job->figures) {
        const fan_stats_out *g = job->figures;
        size_t more = g->before ? 2 : 1;
        *write = i == more - 1;
        *a = *write ? g->words : g->before;
        if (i < more)
            return true;
        i -= more;
    }
    *write = false;
    if (job->kind == FAN_JOB_SCATTER && i < 4) {
        const fan_array *parts[] = {job->sparse->indices, job->sparse->values, job->sparse->pointers, job->out};
        *a = parts[i];
        return true;
    }
    *write = true;
    *a = job->out;
    return i == (job->kind == FAN_JOB_SCATTER ? 4u : 0u);
}

static bool kernel_visit(const void *what, size_t i, const fan_array **a, bool *write)
{
    const fan_sim_kernel *k = what;
    *write = i >= k->nreads;
    if (i >= k->nreads + k->nwrites)
        return false;
    *a = *write ? k->writes[i - k->nreads] : k->reads[i];
    return true;
}

static bool read_visit(const void *what, size_t i, const fan_array **a, bool *write)
{
    *a = what;
    *write = false;
    return i == 0;
}

static fan_sim_device_part *part_at(fan_sim *m, uintptr_t address)
{
    for (int i = 0; i < m->config.devices; i++)
        if (address - m->parts[i].arena.base < m->parts[i].arena.bytes)
            return &m->parts[i];
    return NULL;
}

static fan_block *block_at(fan_sim *m, const void *address)
{
    fan_sim_device_part *p = part_at(m, (uintptr_t)address);
    return p ? fan_arena_find(&p->arena, (uintptr_t)address) : NULL;
}

static void touch_all(fan_sim *m, visit *next, const void *what)
{
    const fan_array *a = NULL;
    bool write;
    if (!here.m || !here.m->has_chooser)
        return;
    for (size_t i = 0; next(what, i, &a, &write); i++) {
        const fan_block *b = a && a->size ? block_at(m, a->data) : NULL;
        if (b)
            touch(m, b->name, write);
    }
}

/* Who keeps the memory that an operation touches until it is through: nobody, the graph that it belongs to, the host
 * that waits for it. */
typedef enum keeper { KEPT_BY_NOBODY, KEPT_BY_GRAPH, KEPT_BY_HOST } keeper;

/* judge: holds an operation on `lane` against all before it. FAN_ERR_RACE with *race; FAN_ERR_NOMEM leaves the history
 * as it was. */
static fan_status judge(fan_sim *m, uint32_t lane, const char *name, const char *site, keeper kept, visit *next,
                        const void *what, fan_race *race, fan_error *err)
{
    const fan_array *a = NULL;
    bool write;
    uint64_t op;
    fan_status worst = FAN_OK;
    if (!m->checking)
        return FAN_OK;
    for (size_t i = 0; next(what, i, &a, &write); i++)
        if (a)
            fan_race_check_plan(m->order, a);
    FAN_TRY(fan_race_check_begin(m->order, lane, lane_of(m), name, site, &op, err));
    if (kept != KEPT_BY_NOBODY)
        fan_race_check_over(m->order, op, kept == KEPT_BY_HOST);
    for (size_t i = 0; next(what, i, &a, &write); i++) {
        fan_status status = a ? fan_race_check_access(m->order, op, a, write, worst == FAN_OK ? race : NULL) : FAN_OK;
        if (status == FAN_ERR_NOMEM)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
        if (status != FAN_OK)
            worst = status;
    }
    if (worst == FAN_ERR_RACE)
        keep_race(m, race);
    return worst;
}

/* ---- copies of jobs ---- */

/* A job that waits has its arrays' geometry, and what it uploads, behind it in one block. First `to` is NULL and the
 * room is counted. */
typedef struct packer {
    char *to;
    size_t used;
} packer;

static void *pack(packer *p, size_t bytes)
{
    size_t at = p->used;
    p->used += (bytes + 15) & ~(size_t)15;
    return p->to ? p->to + at : NULL;
}

static fan_array *pack_array(packer *p, const fan_array *a, bool bytes)
{
    if (!a)
        return NULL;
    fan_array *copy = pack(p, sizeof *copy);
    int64_t *dims = pack(p, 2 * (size_t)a->ndim * sizeof *dims);
    char *data = bytes ? pack(p, (size_t)a->size * fan_dtype_size(a->dtype)) : a->data;
    if (!copy)
        return NULL;
    *copy = (fan_array){.data = data,
                        .dtype = a->dtype,
                        .ndim = a->ndim,
                        .size = a->size,
                        .shape = dims,
                        .strides = dims + a->ndim,
                        .writable = true};
    for (int i = 0; i < a->ndim; i++) {
        copy->shape[i] = a->shape[i];
        copy->strides[i] = a->strides[i];
    }
    if (bytes) {
        fan_dense_strides(a->ndim, a->shape, fan_dtype_size(a->dtype), NULL, copy->strides);
        fan_array_copy(copy, a);
    }
    return copy;
}

static fan_stats_out *pack_figures(packer *p, const fan_stats_out *figures, size_t n)
{
    fan_stats_out *copy = pack(p, sizeof *copy);
    int64_t *keys = pack(p, n * sizeof *keys);
    const fan_array *words = pack_array(p, figures->words, false), *before = pack_array(p, figures->before, false);
    if (copy) {
        *copy = (fan_stats_out){.words = words, .before = before, .keys = keys};
        memcpy(keys, figures->keys, n * sizeof *keys);
    }
    return copy;
}

/* pack_job: what *copy (NULL: it is not there yet) is a copy of. */
static void pack_job(packer *p, fan_job *copy, const fan_job *job)
{
    fan_operand *in = pack(p, job->n * sizeof *in);
    fan_scale *scale = job->scale ? pack(p, sizeof *scale) : NULL;
    fan_sparse *sparse = job->sparse ? pack(p, sizeof *sparse) : NULL;
    const fan_stats_out *figures = job->figures ? pack_figures(p, job->figures, job->n) : NULL;
    if (copy)
        *copy = (fan_job){.kind = job->kind,
                          .in = in,
                          .n = job->n,
                          .scale = scale,
                          .figures = figures,
                          .skip = job->skip,
                          .sparse = sparse};
    fan_array *out = pack_array(p, job->out, false);
    if (copy)
        copy->out = out;
    for (size_t i = 0; i < job->n; i++) {
        fan_array *a = pack_array(p, job->in[i].array, job->kind == FAN_JOB_UPLOAD);
        if (in)
            in[i] = (fan_operand){.array = a, .acc = job->in[i].acc};
    }
    if (scale)
        *scale = *job->scale;
    if (job->sparse) {
        fan_array *indices = pack_array(p, job->sparse->indices, false);
        fan_array *pointers = pack_array(p, job->sparse->pointers, false);
        fan_array *values = pack_array(p, job->sparse->values, false);
        if (sparse) {
            memset(sparse, 0, sizeof *sparse);
            sparse->format = job->sparse->format;
            sparse->ndim = job->sparse->ndim;
            memcpy(sparse->shape, job->sparse->shape, sizeof sparse->shape);
            sparse->indices = indices;
            sparse->pointers = pointers;
            sparse->values = values;
            sparse->coalesced = job->sparse->coalesced;
        }
    }
}

static fan_job *pack_jobs(packer *p, const fan_job *jobs, size_t n)
{
    fan_job *copies = pack(p, n * sizeof *copies);
    for (size_t i = 0; i < n; i++)
        pack_job(p, copies ? &copies[i] : NULL, &jobs[i]);
    return copies;
}

/* op_new: an op with copies of n jobs behind it; n == 0: room for a kernel alone. */
static fan_sim_op *op_new(const fan_job *jobs, size_t n)
{
    packer p = {NULL, 0};
    pack(&p, sizeof(fan_sim_op));
    (void)pack_jobs(&p, jobs, n);
    fan_sim_op *op = fan_alloc(p.used);
    if (!op)
        return NULL;
    p = (packer){(char *)op, 0};
    memset(pack(&p, sizeof *op), 0, sizeof *op);
    op->jobs = pack_jobs(&p, jobs, n);
    op->njobs = n;
    return op;
}

/* ---- queueing work ---- */

typedef struct work {
    const char *name;
    visit *next;
    const void *what;
    double us; /* how long it takes */
    keeper kept;
    fan_sim_op *op;    /* taken over on FAN_OK and FAN_ERR_RACE; NULL without bytes to move */
    double start, end; /* filled in */
} work;

/* enqueue: judges work and puts it into q's queue. On FAN_ERR_RACE it is queued, and *err says which race; otherwise a
 * failure changes nothing. */
static fan_status enqueue(fan_sim *m, fan_sim_queue *q, work *w, const char *site, fan_error *err)
{
    fan_race race;
    double *host = &m->host_us[host_of(m)];
    FAN_TRY(legacy(m, q, err));
    fan_status status = judge(m, q->lane, w->name, site, w->kept, w->next, w->what, &race, err);
    if (status != FAN_OK && status != FAN_ERR_RACE)
        return status;
    touch(m, q->name, true);
    touch(m, NAME(OF_QUEUED, 0), FAN_TOUCH_COUNTS);
    touch_all(m, w->next, w->what);
    append(m, q, w->op);
    *host += m->config.launch_us;
    w->start = later(q->end_us, *host);
    w->end = q->end_us = w->start + w->us;
    m->device_us = later(m->device_us, w->end);
    return status == FAN_ERR_RACE ? raise(m, &race, err) : FAN_OK;
}

static double kernel_us(const fan_sim *m, uint64_t bytes)
{
    return later(KERNEL_US, (double)bytes / (m->config.gbytes_per_s * 1e3));
}

/* ---- captured work ---- */

/* keep_blocks: the graph uses the memory of these accesses. Memory that is short is short before anything is kept. */
static int keep_blocks(fan_sim *m, fan_sim_graph *g, visit *next, const void *what)
{
    const fan_array *a = NULL;
    bool write;
    size_t most = 0;
    for (size_t i = 0; next(what, i, &a, &write); i++)
        most++;
    if (fan_grow((void **)&g->blocks, &g->blocks_cap, g->nblocks + most, sizeof *g->blocks))
        return -1;
    for (size_t i = 0; !m->config.bare && next(what, i, &a, &write); i++) {
        fan_block *b = a && a->size ? block_at(m, a->data) : NULL;
        bool known = false;
        for (size_t k = 0; b && k < g->nblocks; k++)
            known |= g->blocks[k] == b->lo;
        if (b && !known) {
            b->graphs++;
            g->blocks[g->nblocks++] = b->lo;
        }
    }
    return 0;
}

static fan_status capture_work(fan_sim *m, fan_sim_queue *q, fan_sim_command *c, const work *w, const char *site,
                               fan_error *err)
{
    fan_sim_recording *r = q->recording;
    if (!c)
        return illegal(q, -1, w->name, err);
    int code = keep_blocks(m, r->graph, w->next, w->what);
    if (code == 0)
        code = fan_capture_work(&r->capture, q->member);
    if (code) {
        fan_free(c);
        return illegal(q, code, w->name, err);
    }
    c->kind = FAN_COMMAND_WORK;
    c->member = q->member;
    c->us = w->us;
    snprintf(c->name, sizeof c->name, "%s", w->name);
    snprintf(c->site, sizeof c->site, "%s", site);
    command_put(r->graph, c);
    return FAN_OK;
}

static fan_status capture_job(fan_sim *m, fan_sim_queue *q, const fan_job *job, const work *w, const char *site,
                              fan_error *err)
{
    packer p = {NULL, 0};
    if (job->kind == FAN_JOB_UPLOAD || job->figures)
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, FAN_CAPTURE_UNSUPPORTED,
            "%s on stream %llu of sim:%d needs the host, which a graph cannot wait for: do it before the capture",
            w->name, (unsigned long long)q->handle, q->device);
    pack(&p, sizeof(fan_sim_command));
    (void)pack_jobs(&p, job, 1);
    fan_sim_command *c = command_new(p.used);
    if (c) {
        p = (packer){(char *)c, 0};
        pack(&p, sizeof *c);
        c->jobs = pack_jobs(&p, job, 1);
        c->njobs = 1;
    }
    return capture_work(m, q, c, w, site, err);
}

static fan_array **pack_arrays(packer *p, fan_array *const *arrays, size_t n)
{
    fan_array **copy = pack(p, n * sizeof(fan_array *));
    for (size_t i = 0; i < n; i++) {
        fan_array *a = pack_array(p, arrays[i], false);
        if (copy)
            copy[i] = a;
    }
    return copy;
}

/* capture_kernel: n > 0: what it does is these jobs. */
static fan_status capture_kernel(fan_sim *m, fan_sim_queue *q, const fan_sim_kernel *k, const fan_job *jobs, size_t n,
                                 const work *w, const char *site, fan_error *err)
{
    packer p = {NULL, 0};
    pack(&p, sizeof(fan_sim_command));
    (void)pack_arrays(&p, k->reads, k->nreads);
    (void)pack_arrays(&p, k->writes, k->nwrites);
    (void)pack_jobs(&p, jobs, n);
    fan_sim_command *c = command_new(p.used);
    if (c) {
        p = (packer){(char *)c, 0};
        pack(&p, sizeof *c);
        c->kernel = *k;
        c->kernel.reads = pack_arrays(&p, k->reads, k->nreads);
        c->kernel.writes = pack_arrays(&p, k->writes, k->nwrites);
        c->jobs = pack_jobs(&p, jobs, n);
        c->njobs = n;
    }
    return capture_work(m, q, c, w, site, err);
}

/* ---- the table ---- */

static fan_sim *machine_of(const fan_device *d) { return d->self; }

static fan_status sim_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err)
{
    fan_sim *m = machine_of(d);
    fan_arena *a = &m->parts[d->index].arena;
    bool host = false;
    (void)stream;
    lock(m);
    fan_status status = enter(m, "alloc", err);
    m->parts[d->index].given += bytes + 128;
    touch(m, NAME(OF_MEMORY, (uint64_t)d->index),
          m->parts[d->index].given > a->bytes ? FAN_TOUCH_WEIGHS : FAN_TOUCH_COUNTS);
    fan_block *b = status == FAN_OK ? fan_arena_alloc(a, bytes, &host) : NULL;
    if (b) {
        b->name = new_name(m, OF_BLOCK);
        b->left = false;
        b->graphs = 0;
        fan_race_check_forget(m->order, b->lo, b->hi);
        *out = (void *)b->lo;
    } else if (status == FAN_OK) {
        status = host ? fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s of sim:%d", bytes, FAN_PLURAL(bytes),
                                 d->index)
                      : fan_fail_code(err, FAN_ERR_DEVICE_NOMEM, 2,
                                      "sim:%d is out of memory: %zu byte%s asked for, %zu of %zu in use", d->index,
                                      bytes, FAN_PLURAL(bytes), a->in_use, a->bytes);
    }
    unlock(m);
    return status;
}

static void sim_free(fan_device *d, void *data, size_t bytes)
{
    fan_sim *m = machine_of(d);
    (void)bytes;
    lock(m);
    touch(m, NAME(OF_MEMORY, (uint64_t)d->index), FAN_TOUCH_COUNTS);
    fan_block *b = fan_arena_find(&m->parts[d->index].arena, (uintptr_t)data);
    if (b && b->graphs)
        b->left = true; /* K3 */
    else
        fan_arena_free(&m->parts[d->index].arena, (uintptr_t)data);
    unlock(m);
}

/* Lanes that something must come after. */
typedef struct lanes {
    uint32_t *list;
    size_t n, cap;
    bool short_of_memory;
} lanes;

static void lanes_add(lanes *l, uint32_t lane)
{
    if (fan_grow((void **)&l->list, &l->cap, l->n + 1, sizeof *l->list))
        l->short_of_memory = true;
    else
        l->list[l->n++] = lane;
}

/* keepers: the queues of the graphs that keep a block: it stays until what is on them has run. */
static void keepers(const fan_sim *m, const fan_block *b, lanes *l)
{
    for (const fan_sim_graph *g = m->graphs; g && b->graphs; g = g->next) {
        bool uses = false;
        for (size_t i = 0; i < g->nblocks && !uses; i++)
            uses = g->blocks[i] == b->lo;
        for (uint32_t i = 0; uses && g->queues && i < g->members; i++)
            if (g->queues[i])
                lanes_add(l, g->queues[i]->lane);
    }
}

static void sim_dropped(fan_device *d, void *data, size_t bytes, fan_stream *const *streams, size_t n)
{
    fan_sim *m = machine_of(d);
    lanes after = {0};
    fan_race race;
    char site[SITE];
    site_of(m, site, sizeof site);
    lock(m);
    if (!m->checking || m->dying || fan_host_sched_given_up(m->turns) != FAN_GOING)
        goto done;
    for (size_t i = 0; i < n; i++) {
        lanes_add(&after, queue_of(streams[i])->lane);
        touch(m, queue_of(streams[i])->name, false);
    }
    /* Whoever held the memory let go of it before now: what he had waited for is over. */
    for (size_t i = 0; i < 1 + FAN_ACTORS; i++)
        if (m->has_lane[i]) {
            lanes_add(&after, m->host_lane[i]);
            touch(m, NAME(OF_KNOWN, i), false);
        }
    const fan_block *b = block_at(m, data);
    if (b) {
        touch(m, b->name, true);
        keepers(m, b, &after);
    }
    if (after.short_of_memory)
        goto done;
    fan_status (*release)(fan_race_check *, uint32_t, const uint32_t *, size_t, uintptr_t, uintptr_t, const char *,
                          fan_race *) =
        b && b->graphs ? fan_race_check_let_go : fan_race_check_release; /* a graph's work may be to come */
    if (release(m->order, lane_of(m), after.list, after.n, (uintptr_t)data, (uintptr_t)data + bytes, site, &race) ==
        FAN_ERR_RACE) {
        keep_race(m, &race);
        if (!m->has_pending) {
            m->pending = race;
            m->has_pending = true;
        }
    }
done:
    unlock(m);
    fan_free(after.list);
}

static fan_status sim_read(fan_stream *s, const fan_array *dst, const fan_array *src, fan_error *err)
{
    fan_sim *m = machine_of(s->device);
    fan_sim_queue *q = queue_of(s);
    fan_race race;
    char site[SITE];
    fan_status status, found;
    site_of(m, site, sizeof site);
    lock(m);
    FAN_GO(enter(m, "read", err));
    FAN_GO(raise_pending(m, err));
    FAN_GO(not_captured(q, "read", err));
    FAN_GO(legacy(m, q, err));
    touch(m, q->name, true);
    touch(m, NAME(OF_PROGRESS, 0), false);
    touch_all(m, read_visit, src);
    found = judge(m, q->lane, "read", site, KEPT_BY_HOST, read_visit, src, &race,
                  err); /* a copy on q, for which the host waits */
    if (found != FAN_OK && found != FAN_ERR_RACE) {
        status = found;
        goto done;
    }
    FAN_GO(finish(m, q, err));
    m->host_us[host_of(m)] += (double)fan_dtype_size(src->dtype) * (double)src->size / (m->config.gbytes_per_s * 1e3);
    if (found == FAN_ERR_RACE)
        status = raise(m, &race, err);
done:
    unlock(m);
    if (status == FAN_OK) {
        if (m->config.run_work)
            fan_array_copy(dst, src);
        else
            fan_fill_zero(dst);
        fan_sync_trace(s->device, s, NULL);
    }
    return status;
}

static fan_stream *sim_current(fan_device *d)
{
    fan_sim *m = machine_of(d);
    fan_sim_device_part *p = &m->parts[d->index];
    lock(m);
    fan_stream *s = p->current ? fan_stream_hold(p->current) : fan_stream_new(d, 1, p->legacy);
    if (s && !p->current) {
        p->legacy->refs++;
        if (p->current_id)
            s->id = p->current_id; /* another object, the same stream */
        else
            p->current_id = s->id;
        if (m->users)
            p->current = fan_stream_hold(s);
    }
    unlock(m);
    return s;
}

static fan_status sim_sync(fan_stream *s, fan_error *err)
{
    fan_sim *m = machine_of(s->device);
    fan_sim_queue *q = queue_of(s);
    fan_status status;
    if (m->dying)
        return FAN_OK;
    lock(m);
    FAN_GO(enter(m, "sync", err));
    FAN_GO(raise_pending(m, err));
    FAN_GO(not_captured(q, "synchronize", err));
    FAN_GO(legacy(m, q, err));
    touch(m, q->name, q->blocking);
    touch(m, NAME(OF_PROGRESS, 0), false);
    FAN_GO(finish(m, q, err));
done:
    unlock(m);
    if (status == FAN_OK)
        fan_sync_trace(s->device, s, NULL);
    return status;
}

static void sim_stream_fini(fan_stream *s)
{
    fan_sim *m = machine_of(s->device);
    lock(m);
    if (queue_of(s)->stream == s)
        queue_of(s)->stream = NULL;
    queue_drop(queue_of(s));
    sweep(m);
    unlock(m);
}

static fan_status sim_event_init(fan_event *e, fan_error *err)
{
    fan_sim *m = machine_of(e->device);
    fan_sim_event *ev = fan_calloc(sizeof *ev);
    if (!ev)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
    fan_clock_init(&ev->clock);
    fan_clock_init(&ev->place);
    lock(m);
    fan_status status =
        fan_host_sched_given_up(m->turns) == FAN_GOING ? enter(m, "event_init", err) : FAN_OK; /* as for record */
    if (status == FAN_OK)
        ev->name = new_name(m, OF_EVENT);
    unlock(m);
    if (status == FAN_OK)
        e->impl = ev;
    else
        fan_free(ev);
    return status;
}

static void sim_event_fini(fan_event *e)
{
    fan_sim *m = machine_of(e->device);
    fan_sim_event *ev = e->impl;
    lock(m);
    queue_drop(ev->point.queue);
    recording_drop(ev->recording);
    sweep(m);
    unlock(m);
    fan_clock_fini(&ev->place);
    fan_clock_fini(&ev->clock);
    fan_free(ev);
}

/* name_event: a pooled event that is used again is another one. Its first call is its maker's record. */
static void name_event(fan_sim *m, const fan_event *e)
{
    fan_sim_event *ev = e->impl;
    if (ev->id == e->id)
        return;
    if (ev->id)
        ev->name = new_name(m, OF_EVENT);
    ev->id = e->id;
}

static fan_status sim_record(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_sim *m = machine_of(s->device);
    fan_sim_event *ev = e->impl;
    fan_sim_queue *q = queue_of(s);
    fan_status status;
    lock(m);
    if (fan_host_sched_given_up(m->turns) !=
        FAN_GOING) { /* nothing runs any more, and memory that leaves must get away */
        status = FAN_OK;
        goto done;
    }
    FAN_GO(enter(m, "record", err));
    name_event(m, e);
    if (q->recording) {
        status = capture_record(ev, q, err);
        goto done;
    }
    FAN_GO(legacy(m, q, err));
    recording_drop(ev->recording);
    ev->recording = NULL;
    if (fan_race_check_record(m->order, q->lane, lane_of(m), &ev->clock) != FAN_OK) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for an event");
        goto done;
    }
    touch(m, q->name, true);
    touch(m, ev->name, true);
    queue_drop(ev->point.queue);
    q->refs++;
    ev->point = (fan_sim_point){q, q->queued};
    ev->denied = 0;
    ev->us = later(q->end_us, m->host_us[host_of(m)]);
done:
    unlock(m);
    return status;
}

/* sim_note: where s is now, for memory that leaves: no barrier of the legacy stream's, and nobody's order. */
static fan_status sim_note(fan_event *e, fan_stream *s, fan_error *err)
{
    fan_sim *m = machine_of(s->device);
    fan_sim_event *ev = e->impl;
    fan_sim_queue *q = queue_of(s);
    fan_status status = FAN_OK;
    lock(m);
    if (fan_host_sched_given_up(m->turns) != FAN_GOING)
        goto done;
    FAN_GO(enter(m, "record", err));
    FAN_GO(not_captured(q, "record", err));
    name_event(m, e);
    recording_drop(ev->recording);
    ev->recording = NULL;
    ev->clock.n = 0;
    queue_drop(ev->point.queue);
    q->refs++;
    ev->point = (fan_sim_point){q, q->queued};
    ev->us = later(q->end_us, m->host_us[host_of(m)]);
done:
    unlock(m);
    return status;
}

static fan_status sim_wait(fan_stream *s, fan_event *e, fan_error *err)
{
    fan_sim *m = machine_of(s->device);
    const fan_sim_event *ev = e->impl;
    fan_sim_queue *q = queue_of(s);
    fan_status status;
    bool never = false, captured;
    lock(m);
    FAN_GO(enter(m, "wait", err));
    if (machine_of(e->device) != m) {
        status = fan_fail(err, FAN_ERR_VALUE, "a stream cannot wait for an event of another machine");
        goto done;
    }
    name_event(m, e);
    touch(m, ev->name, false);
    FAN_GO(capture_wait(q, ev, &captured, err));
    if (captured)
        goto done;
    never = !ev->point.queue;
    if (never)
        goto done;
    FAN_GO(legacy(m, q, err));
    FAN_GO(hold_back(m, q, ev->point, err));
    /* What the host knows is not queued with a wait: one that is left out would not queue it. */
    if (fan_race_check_sync(m->order, q->lane, &ev->clock) != FAN_OK) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        goto done;
    }
    touch(m, q->name, true);
    q->end_us = later(q->end_us, ev->us);
done:
    unlock(m);
    if (never && m->hooks.warn) {
        char text[128];
        snprintf(text, sizeof text, "stream %llu of sim:%d waits for an event that was never recorded: that is no wait",
                 (unsigned long long)s->handle, s->device->index);
        m->hooks.warn(m->hooks.ctx, text);
    }
    return status;
}

static void sim_elided(fan_stream *s, fan_event *e)
{
    fan_sim *m = machine_of(s->device);
    const fan_sim_event *ev = e->impl;
    lock(m);
    touch(m, queue_of(s)->name, false);
    touch(m, ev->name, false);
    if (m->checking && !fan_clock_leq(&ev->clock, fan_race_check_clock(m->order, queue_of(s)->lane)))
        m->unsound++;
    unlock(m);
}

static bool has_passed(const fan_sim_event *ev) { return !ev->point.queue || ev->point.queue->done >= ev->point.upto; }

/* run_for: runs what `point` needs, and nothing else; *can false: it can never pass. */
static fan_status run_for(fan_sim *m, fan_sim_point point, size_t depth, bool *can, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sim_queue *q = point.queue;
    q->refs++;
    for (settle(m); status == FAN_OK && *can && q->done < point.upto; settle(m)) {
        if (m->executor && m->executor != fan_thread_id())
            stand_by(m);
        else if (!q->head || q->running || depth > m->nqueues) /* deeper than there are queues: a circle */
            *can = false;
        else if (q->head->wait.queue)
            status = run_for(m, q->head->wait, depth + 1, can, err);
        else
            status = run_one(m, q, err);
    }
    queue_drop(q);
    return status;
}

/* answer: a query of an event that has a record (Queries). */
static fan_status answer(fan_sim *m, fan_sim_event *ev, bool *done, fan_error *err)
{
    bool chosen = m->has_chooser && m->chooser.pick && !in_kernel && m->config.run_work;
    *done = has_passed(ev);
    if (!chosen || fan_clock_leq(&ev->clock, fan_race_check_clock(m->order, lane_of(m))))
        return FAN_OK;
    int said = ev->denied < FAN_ASKS ? fan_host_sched_pick(m->turns, 2) : 1;
    if (said < 0)
        return FAN_OK;
    *done = said == 1;
    if (!*done)
        ev->denied++;
    else
        FAN_TRY(run_for(m, ev->point, 0, done, err));
    if (said == 1 && !*done)
        fan_call_idle(); /* it never will, as things stand */
    return FAN_OK;
}

static fan_status sim_query(fan_event *e, bool *done, fan_error *err)
{
    fan_sim *m = machine_of(e->device);
    fan_sim_event *ev = e->impl;
    fan_status status;
    lock(m);
    FAN_GO(enter(m, "query", err));
    FAN_GO(has_time(ev, e, "query", err));
    touch(m, ev->name, false);
    touch(m, NAME(OF_PROGRESS, 0), true);
    touch(m, NAME(OF_QUEUED, 0), false);
    settle(m);
    *done = true;
    if (ev->point.queue)
        FAN_GO(answer(m, ev, done, err));
    if (*done && ev->point.queue)
        status = learn(m, &ev->clock, err);
done:
    unlock(m);
    return status;
}

static bool sim_peek(fan_event *e)
{
    fan_sim *m = machine_of(e->device);
    lock(m);
    settle(m);
    const fan_sim_event *ev = e->impl;
    bool done = (has_passed(ev) && !ev->recording) || fan_host_sched_given_up(m->turns) != FAN_GOING;
    unlock(m);
    return done;
}

static fan_status sim_event_sync(fan_event *e, fan_error *err)
{
    fan_sim *m = machine_of(e->device);
    const fan_sim_event *ev = e->impl;
    fan_clock then;
    fan_status status;
    if (m->dying)
        return FAN_OK;
    fan_clock_init(&then);
    lock(m);
    FAN_GO(enter(m, "event_sync", err));
    FAN_GO(raise_pending(m, err));
    FAN_GO(has_time(ev, e, "synchronize", err));
    touch(m, ev->name, false);
    touch(m, NAME(OF_PROGRESS, 0), false);
    double us = ev->us;
    if (!ev->point.queue)
        goto done;
    if (fan_clock_copy(&then, &ev->clock)) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a wait");
        goto done;
    }
    FAN_GO(run_until(m, ev->point, err));
    status = learn(m, &then, err);
    m->host_us[host_of(m)] = later(m->host_us[host_of(m)], us);
done:
    unlock(m);
    fan_clock_fini(&then);
    if (status == FAN_OK)
        fan_sync_trace(e->device, NULL, e);
    return status;
}

static fan_status sim_run(fan_device *d, fan_stream *s, const fan_job *job, fan_error *err)
{
    fan_sim *m = machine_of(d);
    char site[SITE];
    fan_status status;
    work w = {.name = job->label ? job->label : fan_job_word(job->kind), .next = job_visit, .what = job};
    site_of(m, site, sizeof site);
    if (m->config.run_work && !(w.op = op_new(job, 1)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    lock(m);
    FAN_GO(enter(m, "run", err));
    FAN_GO(raise_pending(m, err));
    w.us = kernel_us(m, fan_job_bytes(job));
    if (queue_of(s)->recording) {
        status = capture_job(m, queue_of(s), job, &w, site, err);
        goto done;
    }
    status = enqueue(m, queue_of(s), &w, site, err);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        w.op = NULL;
done:
    unlock(m);
    fan_free(w.op);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_job_trace(d, s, job, w.start, w.end);
    return status;
}

/* as_kernel: what several sums touch, as one kernel; a->reads is the room for it all. FAN_ERR_NOMEM. */
static fan_status as_kernel(const fan_job *jobs, size_t n, fan_sim_kernel *k, uint64_t *bytes, fan_error *err)
{
    size_t reads = 0, at = 0;
    *bytes = 0;
    for (size_t i = 0; i < n; i++) {
        reads += jobs[i].n;
        *bytes += fan_job_bytes(&jobs[i]);
    }
    fan_array **all = fan_alloc((reads + n) * sizeof *all);
    if (!all)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < jobs[i].n; j++)
            all[at++] = (fan_array *)(uintptr_t)jobs[i].in[j].array;
        all[reads + i] = (fan_array *)(uintptr_t)jobs[i].out;
    }
    *k = (fan_sim_kernel){.reads = all, .nreads = reads, .writes = all + reads, .nwrites = n, .us = -1};
    return FAN_OK;
}

static fan_status sim_run_many(fan_device *d, fan_stream *s, const fan_job *jobs, size_t n, fan_job_state *fates,
                               fan_error *err)
{
    fan_sim *m = machine_of(d);
    char site[SITE], label[FAN_TRACE_LABEL];
    fan_status status;
    fan_sim_kernel k;
    uint64_t bytes;
    for (size_t i = 0; i < n; i++)
        if (jobs[i].kind != FAN_JOB_SUM || jobs[i].stats)
            return FAN_OK;
    FAN_TRY(as_kernel(jobs, n, &k, &bytes, err));
    work w = {.name = fan_jobs_label(jobs, n, label, sizeof label), .next = kernel_visit, .what = &k};
    site_of(m, site, sizeof site);
    lock(m);
    if (m->config.run_work && !(w.op = op_new(jobs, n)))
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work"));
    FAN_GO(enter(m, "run", err));
    FAN_GO(raise_pending(m, err));
    w.us = kernel_us(m, bytes);
    if (queue_of(s)->recording) {
        status = capture_kernel(m, queue_of(s), &k, jobs, n, &w, site, err);
        goto done;
    }
    status = enqueue(m, queue_of(s), &w, site, err);
    if (status == FAN_OK || status == FAN_ERR_RACE)
        w.op = NULL;
done:
    unlock(m);
    fan_free(w.op);
    fan_free((void *)(uintptr_t)k.reads);
    for (size_t i = 0; i < n; i++)
        fates[i] = status == FAN_OK ? FAN_JOB_QUEUED : FAN_JOB_FAILED;
    if (status == FAN_OK || status == FAN_ERR_RACE)
        fan_jobs_trace(d, s, jobs, n, label, w.start, w.end);
    return status;
}

static fan_status sim_capture(fan_stream *s, uint64_t *id, fan_error *err)
{
    (void)err;
    *id = 0;
    touch(machine_of(s->device), NAME(OF_CAPTURES, 0), FAN_TOUCH_READS);
    if (atomic_load_explicit(&machine_of(s->device)->captures, memory_order_relaxed))
        (void)fan_sim_capture_state(machine_of(s->device), s, id, NULL);
    return FAN_OK;
}

static fan_status sim_spare(fan_device *d, uint64_t id, fan_stream **out, fan_error *err)
{
    (void)id; /* a new one each time: they cost nothing here */
    return fan_sim_stream(machine_of(d), d->index, false, out, err);
}

static uint64_t sim_left_out(fan_device *d) { return machine_of(d)->left_out; }

static void machine_free(fan_sim *m);

static void sim_device_fini(fan_device *d) { machine_free(machine_of(d)); }

static const fan_backend backend = {
    .name = "sim",
    .has_streams = true,
    .alloc = sim_alloc,
    .free = sim_free,
    .read = sim_read,
    .dropped = sim_dropped,
    .current = sim_current,
    .sync = sim_sync,
    .stream_fini = sim_stream_fini,
    .event_init = sim_event_init,
    .event_fini = sim_event_fini,
    .record = sim_record,
    .note = sim_note,
    .wait = sim_wait,
    .query = sim_query,
    .peek = sim_peek,
    .elided = sim_elided,
    .event_sync = sim_event_sync,
    .run = sim_run,
    .run_many = sim_run_many,
    .capture = sim_capture,
    .spare = sim_spare,
    .left_out = sim_left_out,
    .device_fini = sim_device_fini,
};

/* ---- the machine ---- */

static void graph_free(fan_sim_graph *g)
{
    for (fan_sim_command *c = g->head, *next; c; c = next) {
        next = c->next;
        if (c->kind == FAN_COMMAND_WORK && c->kernel.fini)
            c->kernel.fini(c->kernel.ctx);
        fan_free(c);
    }
    fan_free(g->device);
    fan_free(g->queues);
    fan_free(g->blocks);
    fan_free(g);
}

/* drop_captures: those that nobody ended. */
static void drop_captures(fan_sim *m)
{
    while (m->recordings) {
        fan_sim_recording *r = m->recordings;
        m->recordings = r->next;
        for (size_t i = 0; i < m->nqueues; i++)
            if (m->queues[i]->recording == r) {
                m->queues[i]->recording = NULL;
                r->refs--;
            }
        r->capture.ended = true;
        graph_free(r->graph);
        recording_drop(r);
    }
}

/* drop_work: takes every op off unrun. */
static void drop_work(fan_sim *m)
{
    fan_sim_op *gone = NULL;
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *q = m->queues[i];
        while (q->head) {
            fan_sim_op *op = pop(q);
            queue_drop(op->wait.queue);
            op->next = gone;
            gone = op;
        }
        q->done = q->queued;
    }
    for (fan_sim_op *op = gone; op; op = gone) { /* who goes with it may sweep the queues */
        gone = op->next;
        if (op->fini)
            op->fini(op->ctx);
        fan_free(op);
    }
}

static void machine_free(fan_sim *m)
{
    m->dying = true;
    if (m->parts) {
        drop_captures(m);
        drop_work(m);
        for (int i = 0; i < m->config.devices; i++)
            if (m->parts[i].device.backend)
                fan_device_flush(&m->parts[i].device);
        for (int i = 0; i < m->config.devices; i++)
            if (m->parts[i].device.backend)
                fan_device_clear(&m->parts[i].device);
        for (int i = 0; i < m->config.devices; i++)
            fan_arena_fini(&m->parts[i].arena);
    }
    for (size_t i = 0; i < m->nqueues; i++)
        fan_free(m->queues[i]);
    fan_free(m->parts);
    fan_free(m->queues);
    fan_race_check_free(m->order);
    fan_host_sched_free(m->turns);
    (void)pthread_cond_destroy(&m->ran);
    (void)pthread_mutex_destroy(&m->lock);
    fan_free(m);
}

static void *before_block(void *ctx)
{
    fan_sim *m = ctx;
    return m->hooks.before_block ? m->hooks.before_block(m->hooks.ctx) : NULL;
}

static void after_block(void *ctx, void *before_)
{
    fan_sim *m = ctx;
    if (m->hooks.after_block)
        m->hooks.after_block(m->hooks.ctx, before_);
}

static void set_turns(fan_sim *m)
{
    fan_host_sched_hooks h = {.before_block = before_block, .after_block = after_block, .block_ctx = m};
    if (m->has_chooser) {
        h.choose = m->chooser.choose;
        h.pick = m->chooser.pick;
        h.ctx = m->chooser.ctx;
    }
    fan_host_sched_set_hooks(m->turns, &h);
}

/* begin_anew: the counters of a new machine. */
static void begin_anew(fan_sim *m)
{
    fan_mutex now;
    m->random = m->config.seed;
    m->number = m->calls = m->races = m->unsound = 0;
    m->has_first = m->has_pending = false;
    m->last = 0;
    m->device_us = 0;
    m->fail_at = -1;
    m->planned = false;
    memset(m->host_us, 0, sizeof m->host_us);
    memset(m->made, 0, sizeof m->made);
    for (int i = 0; m->parts && i < m->config.devices; i++)
        m->parts[i].given = 0;
    m->mutex_base = 0;
    if (fan_mutex_init(&now) == 0) {
        m->mutex_base = now.id;
        fan_mutex_fini(&now);
    }
}

fan_status fan_sim_new(const fan_sim_config *config, const fan_sim_hooks *hooks, fan_sim **out, fan_error *err)
{
    *out = NULL;
    if (config->devices < 1 || config->devices > FAN_SIM_DEVICES)
        return fan_fail(err, FAN_ERR_VALUE, "a machine has 1 to %d devices, not %d", FAN_SIM_DEVICES, config->devices);
    fan_sim *m = fan_calloc(sizeof *m);
    if (!m)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
    fan_mutexes_told_apart();
    (void)pthread_mutex_init(&m->lock, NULL);
    (void)pthread_cond_init(&m->ran, NULL);
    atomic_init(&m->holds, 1);
    atomic_init(&m->captures, 0);
    m->users = 1;
    m->config = *config;
    if (m->config.memory == 0)
        m->config.memory = MEMORY;
    if (!(m->config.launch_us > 0))
        m->config.launch_us = LAUNCH_US;
    if (!(m->config.gbytes_per_s > 0))
        m->config.gbytes_per_s = GBYTES_PER_S;
    if (hooks)
        m->hooks = *hooks;
    m->checking = true;
    m->handle = 1;
    m->serial = atomic_fetch_add(&machines, 1);
    fan_status status = FAN_ERR_NOMEM;
    m->order = fan_race_check_new();
    m->turns = fan_host_sched_new(config->seed);
    m->parts = fan_calloc((size_t)config->devices * sizeof *m->parts);
    if (!m->order || !m->turns || !m->parts) {
        fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
        goto done;
    }
    set_turns(m);
    FAN_GO(new_host(m, 0, FAN_MAIN, err));
    for (int i = 0; i < config->devices; i++) {
        fan_sim_device_part *p = &m->parts[i];
        if (fan_arena_init(&p->arena, m->config.memory, config->run_work)) {
            status =
                fan_fail(err, FAN_ERR_NOMEM, "cannot reserve %zu bytes of addresses for sim:%d; ask for less memory",
                         m->config.memory, i);
            goto done;
        }
        if (fan_device_init(&p->device, &backend, m, i, &m->holds)) {
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a machine");
            goto done;
        }
        FAN_GO(queue_new(m, i, FAN_LEGACY, true, NULL, &p->legacy, err));
    }
    begin_anew(m);
    *out = m;
done:
    if (status != FAN_OK)
        machine_free(m);
    return status;
}

fan_sim *fan_sim_hold(fan_sim *m)
{
    lock(m);
    m->users++;
    atomic_fetch_add_explicit(&m->holds, 1, memory_order_relaxed);
    unlock(m);
    return m;
}

void fan_sim_drop(fan_sim *m)
{
    if (!m)
        return;
    fan_stream *gone[FAN_SIM_DEVICES];
    int n = 0;
    lock(m);
    bool last = --m->users == 0;
    if (last)
        for (int i = 0; i < m->config.devices; i++)
            if (m->parts[i].current) {
                gone[n++] = m->parts[i].current;
                m->parts[i].current = NULL;
            }
    unlock(m);
    while (n > 0)
        fan_stream_drop(gone[--n]);
    if (last)
        for (int i = 0; i < m->config.devices; i++)
            fan_device_orphan(&m->parts[i].device);
    if (atomic_fetch_sub_explicit(&m->holds, 1, memory_order_acq_rel) == 1)
        machine_free(m);
}

fan_device *fan_sim_device(fan_sim *m, int index)
{
    return index >= 0 && index < m->config.devices ? &m->parts[index].device : NULL;
}

fan_sim *fan_sim_of(const fan_device *d) { return d->backend == &backend ? machine_of(d) : NULL; }

fan_status fan_sim_stream(fan_sim *m, int device, bool blocking, fan_stream **out, fan_error *err)
{
    fan_sim_queue *q = NULL;
    *out = NULL;
    if (device < 0 || device >= m->config.devices)
        return fan_fail(err, FAN_ERR_VALUE, "this machine has no device %d: it has %d", device, m->config.devices);
    fan_yield();
    lock(m);
    fan_status status = gave_up(m, err);
    if (status == FAN_OK)
        status = queue_new(m, device, m->handle + 1, blocking, fan_race_check_clock(m->order, lane_of(m)), &q, err);
    if (status == FAN_OK) {
        m->handle++;
        *out = fan_stream_new(&m->parts[device].device, q->handle, q);
        if (!*out) {
            queue_drop(q);
            sweep(m);
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
        }
    }
    unlock(m);
    return status;
}

void fan_sim_list(fan_sim *m, fan_stream *s)
{
    lock(m);
    queue_of(s)->stream = s;
    unlock(m);
}

fan_status fan_sim_listed(fan_sim *m, fan_stream ***out, size_t *n, fan_error *err)
{
    lock(m);
    fan_stream **all = fan_alloc((m->nqueues + 1) * sizeof(fan_stream *));
    *n = 0;
    *out = all;
    for (size_t i = 0; all && i < m->nqueues; i++)
        if (m->queues[i]->stream && fan_stream_try_hold(m->queues[i]->stream))
            all[(*n)++] = m->queues[i]->stream;
    unlock(m);
    return all ? FAN_OK : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a list of streams");
}

fan_stream *fan_sim_find(fan_sim *m, int device, uint64_t handle)
{
    fan_stream *found = NULL;
    lock(m);
    for (size_t i = 0; i < m->nqueues && !found; i++) {
        const fan_sim_queue *q = m->queues[i];
        if (q->stream && q->device == device && q->handle == handle)
            found = fan_stream_try_hold(q->stream);
    }
    unlock(m);
    return found;
}

uint64_t fan_sim_seed(const fan_sim *m) { return m->config.seed; }

fan_status fan_sim_reset(fan_sim *m, fan_error *err)
{
    if (fan_host_sched_count(m->turns) != 0 && fan_host_sched_given_up(m->turns) == FAN_GOING)
        return fan_fail(err, FAN_ERR_STATE, "a machine with host threads cannot be reset: join them first");
    drop_work(m);
    for (int i = 0; i < m->config.devices; i++)
        fan_device_poll(&m->parts[i].device);
    lock(m);
    size_t live = 0;
    for (int i = 0; i < m->config.devices; i++)
        live += m->parts[i].arena.live;
    if (live) {
        unlock(m);
        return fan_fail(err, FAN_ERR_STATE, "a machine cannot be reset while %zu blocks of its memory are held", live);
    }
    for (int i = 0; i < m->config.devices; i++)
        fan_arena_reset(&m->parts[i].arena);
    fan_race_check_reset(m->order);
    fan_host_sched_reset(m->turns, m->config.seed);
    for (size_t i = 0; i < m->nqueues; i++) {
        m->queues[i]->queued = m->queues[i]->done = 0;
        m->queues[i]->end_us = 0;
    }
    begin_anew(m);
    sweep(m);
    unlock(m);
    return FAN_OK;
}

fan_status fan_sim_launch(fan_sim *m, fan_stream *s, const fan_sim_kernel *k, fan_error *err)
{
    char site[SITE];
    const fan_array *a = NULL;
    bool write, captured = false;
    uint64_t bytes = 0;
    if (fan_sim_of(s->device) != m)
        return fan_fail(err, FAN_ERR_VALUE, "the stream belongs to another machine");
    fan_yield();
    site_of(m, site, sizeof site);
    /* D31: what the user made is marked here. */
    for (size_t i = 0; kernel_visit(k, i, &a, &write); i++) {
        lock(m);
        const fan_block *b = a->storage ? block_at(m, a->storage->data) : NULL;
        bool automatic = b && b->automatic;
        unlock(m);
        if (automatic) {
            if (write)
                fan_memory_set_stream(a->storage, s);
            FAN_TRY(fan_memory_record_stream(a->storage, s, err));
        }
        bytes += (uint64_t)a->size * fan_dtype_size(a->dtype);
    }
    work w = {.name = k->name ? k->name : "kernel", .next = kernel_visit, .what = k};
    fan_status status;
    if (m->config.run_work && !(w.op = op_new(NULL, 0)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for queued work");
    fan_sim_op *op = w.op;
    lock(m);
    FAN_GO(enter(m, "launch", err));
    FAN_GO(raise_pending(m, err));
    w.us = k->us >= 0 ? k->us : kernel_us(m, bytes);
    if (queue_of(s)->recording) {
        status = capture_kernel(m, queue_of(s), k, NULL, 0, &w, site, err);
        captured = status == FAN_OK;
        goto done;
    }
    status = enqueue(m, queue_of(s), &w, site, err);
    if (status == FAN_OK && op) {
        op->fn = k->fn;
        op->fini = k->fini;
        op->ctx = k->ctx;
    }
    if (status == FAN_OK || status == FAN_ERR_RACE)
        w.op = NULL;
done:
    unlock(m);
    fan_free(w.op);
    if (status == FAN_OK && !op && k->fini && !captured)
        k->fini(k->ctx); /* no bytes to move: it will never run */
    if ((status == FAN_OK || status == FAN_ERR_RACE) && fan_trace_on()) {
        fan_trace_line line = {.kind = FAN_TRACE_KERNEL,
                               .device = (int16_t)s->device->index,
                               .slot = -1,
                               .key = -1,
                               .stream = s->handle,
                               .bytes = bytes,
                               .start_us = w.start,
                               .end_us = w.end};
        snprintf(line.label, sizeof line.label, "%s", w.name);
        fan_trace_put(&line);
    }
    return status;
}

fan_status fan_sim_array(fan_sim *m, int device, fan_dtype dtype, int ndim, const int64_t *shape, const fan_array *init,
                         fan_array **out, fan_error *err)
{
    *out = NULL;
    if (device < 0 || device >= m->config.devices)
        return fan_fail(err, FAN_ERR_VALUE, "this machine has no device %d: it has %d", device, m->config.devices);
    fan_array *a;
    FAN_TRY(fan_device_array(&m->parts[device].device, NULL, dtype, ndim, shape, init, &a, err));
    lock(m);
    fan_block *b = block_at(m, a->storage->data);
    if (b)
        b->automatic = true;
    if (init)
        m->host_us[host_of(m)] += (double)a->size * (double)fan_dtype_size(dtype) / (m->config.gbytes_per_s * 1e3);
    unlock(m);
    if (init && m->config.run_work)
        fan_array_copy(a, init); /* at once: nobody else knows the memory, and what was there before has passed */
    *out = a;
    return FAN_OK;
}

fan_status fan_sim_host_read(fan_sim *m, fan_stream *s, const fan_array *dst, const fan_array *a, fan_error *err)
{
    fan_stream *on = NULL;
    if (s) {
        on = fan_stream_hold(s);
    } else {
        fan_sim_device_part *p = a->storage ? part_at(m, (uintptr_t)a->storage->data) : NULL;
        if (!p)
            return fan_fail(err, FAN_ERR_VALUE, "the array is in no memory of this machine");
        on = fan_stream_current(&p->device);
        if (!on)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    }
    fan_yield();
    fan_status status = sim_read(on, dst, a, err);
    fan_stream_drop(on);
    return status;
}

fan_status fan_sim_synchronize(fan_sim *m, fan_error *err)
{
    fan_status status;
    if (actor_of(m) < 0 && fan_host_sched_count(m->turns) != 0)
        FAN_TRY(fan_sim_join(m, err));
    fan_yield();
    lock(m);
    FAN_GO(enter(m, "synchronize", err));
    for (fan_sim_recording *r = m->recordings; r; r = r->next) {
        int code = fan_capture_break(&r->capture, FAN_CAPTURE_UNSUPPORTED);
        status = fan_fail_code(err, FAN_ERR_CAPTURE, code, "synchronize: %s (CUDA's code %d)", fan_capture_words(code),
                               code);
    }
    if (status != FAN_OK)
        goto done;
    touch(m, NAME(OF_PROGRESS, 0), false);
    touch(m, NAME(OF_QUEUED, 0), false);
    for (size_t i = 0; i < m->nqueues; i++)
        touch(m, m->queues[i]->name, false);
    FAN_GO(run_until(m, (fan_sim_point){NULL, 0}, err));
    for (size_t i = 0; i < m->nqueues; i++) {
        FAN_GO(learn(m, fan_race_check_clock(m->order, m->queues[i]->lane), err));
        m->host_us[host_of(m)] = later(m->host_us[host_of(m)], m->queues[i]->end_us);
    }
    FAN_GO(raise_pending(m, err));
done:
    unlock(m);
    if (status == FAN_OK)
        for (int i = 0; i < m->config.devices; i++)
            fan_device_poll(&m->parts[i].device);
    return status;
}

fan_status fan_sim_step(fan_sim *m, bool *ran, fan_error *err)
{
    fan_status status;
    *ran = false;
    fan_yield();
    lock(m);
    FAN_GO(enter(m, "step", err));
    FAN_GO(raise_pending(m, err));
    touch(m, NAME(OF_PROGRESS, 0), true);
    touch(m, NAME(OF_QUEUED, 0), false);
    while (m->executor && m->executor != fan_thread_id())
        stand_by(m);
    fan_sim_queue *q = pick(m);
    if (q) {
        *ran = true;
        FAN_GO(run_one(m, q, err));
        settle(m);
    }
done:
    sweep(m);
    unlock(m);
    return status;
}

fan_status fan_sim_nudge(fan_sim *m, fan_error *err)
{
    fan_status status = FAN_OK;
    lock(m);
    bool chosen = m->has_chooser && m->chooser.pick;
    fan_sim_queue *q = chosen || in_kernel || !m->config.run_work || m->executor ? NULL : pick(m);
    if (q) {
        status = run_one(m, q, err);
        settle(m);
        sweep(m);
    } else if (!chosen) {
        fan_call_idle();
    }
    unlock(m);
    return status;
}

/* ---- captures and graphs ---- */

fan_status fan_sim_capture_begin(fan_sim *m, fan_stream *s, int mode, fan_error *err)
{
    fan_sim_queue *q = queue_of(s);
    fan_sim_graph *g = fan_calloc(sizeof *g);
    fan_sim_recording *r = fan_calloc(sizeof *r);
    fan_status status;
    fan_yield();
    lock(m);
    touch(m, NAME(OF_CAPTURES, 0), FAN_TOUCH_WRITES);
    if (q->legacy || q->recording) {
        bool broken = q->recording && q->recording->capture.broken;
        status = illegal(q,
                         q->legacy ? FAN_CAPTURE_UNSUPPORTED
                         : broken  ? FAN_CAPTURE_INVALIDATED
                                   : FAN_CAPTURE_VALUE,
                         "begin a capture", err);
        goto done;
    }
    status = illegal(q, !g || !r || fan_grow((void **)&g->device, &g->device_cap, 1, sizeof *g->device) ? -1 : 0,
                     "begin a capture", err);
    if (status != FAN_OK)
        goto done;
    FAN_GO(fan_capture_begin(&r->capture, (fan_capture_mode)mode, fan_thread_id(), err));
    g->refs = 1;
    g->m = m;
    g->tail = &g->head;
    g->device[g->members++] = q->device;
    r->graph = g;
    r->refs = 2; /* the machine's and the stream's */
    r->next = m->recordings;
    m->recordings = r;
    atomic_fetch_add_explicit(&m->captures, 1, memory_order_relaxed);
    q->recording = r;
    q->member = 0;
    q->refs++;
done:
    unlock(m);
    if (status != FAN_OK) {
        if (g)
            fan_free(g->device);
        fan_free(g);
        if (r)
            fan_capture_fini(&r->capture);
        fan_free(r);
    }
    return status;
}

/* leave_capture: its streams are as they were; its events go on knowing it. */
static void leave_capture(fan_sim *m, fan_sim_recording *r)
{
    for (fan_sim_recording **at = &m->recordings; *at; at = &(*at)->next)
        if (*at == r) {
            *at = r->next;
            break;
        }
    for (size_t i = 0; i < m->nqueues; i++) {
        fan_sim_queue *q = m->queues[i];
        if (q->recording == r) {
            q->recording = NULL;
            queue_drop(q);
            r->refs--; /* not the last: the machine's is left */
        }
    }
    atomic_fetch_sub_explicit(&m->captures, 1, memory_order_relaxed);
    r->graph = NULL;
    recording_drop(r);
    sweep(m);
}

fan_status fan_sim_capture_end(fan_sim *m, fan_stream *s, fan_sim_graph **out, fan_error *err)
{
    fan_sim_queue *q = queue_of(s);
    fan_sim_graph *g = NULL;
    *out = NULL;
    fan_yield();
    lock(m);
    touch(m, NAME(OF_CAPTURES, 0), FAN_TOUCH_WRITES);
    fan_sim_recording *r = q->recording;
    int code = r ? fan_capture_end(&r->capture, q->member, fan_thread_id()) : FAN_CAPTURE_VALUE;
    if (r && r->capture.ended) {
        g = r->graph;
        g->next = m->graphs;
        m->graphs = g;
        leave_capture(m, r);
    }
    fan_status status = illegal(q, code, "end a capture", err);
    unlock(m);
    if (g)
        (void)fan_sim_hold(m); /* the graph's */
    if (status == FAN_OK)
        *out = g;
    else
        fan_sim_graph_drop(g);
    return status;
}

int fan_sim_capture_state(fan_sim *m, fan_stream *s, uint64_t *id, fan_sim_graph **graph)
{
    lock(m);
    touch(m, NAME(OF_CAPTURES, 0), FAN_TOUCH_READS);
    const fan_sim_recording *r = queue_of(s)->recording;
    int state = r ? r->capture.broken ? 2 : 1 : 0;
    if (id)
        *id = r ? r->capture.id : 0;
    if (graph)
        *graph = r ? r->graph : NULL;
    unlock(m);
    return state;
}

fan_status fan_sim_unsafe(fan_sim *m, const char *call, fan_error *err)
{
    fan_status status = FAN_OK;
    uint64_t thread = fan_thread_id();
    lock(m);
    touch(m, NAME(OF_CAPTURES, 0), m->recordings ? FAN_TOUCH_WRITES : FAN_TOUCH_READS);
    for (fan_sim_recording *r = m->recordings; r; r = r->next)
        if (fan_capture_forbids(&r->capture, thread, own_mode)) {
            int code = fan_capture_break(&r->capture, FAN_CAPTURE_UNSUPPORTED);
            status = fan_fail_code(err, FAN_ERR_CAPTURE, code, "%s: %s (CUDA's code %d)", call, fan_capture_words(code),
                                   code);
        }
    unlock(m);
    return status;
}

fan_sim_graph *fan_sim_graph_hold(fan_sim_graph *g)
{
    lock(g->m);
    g->refs++;
    unlock(g->m);
    return g;
}

/* graph_drop: takes 1 off a count of g's; it goes with the last of both. */
static void graph_drop(fan_sim_graph *g, size_t *count)
{
    fan_sim *m = g->m;
    lock(m);
    --*count;
    bool last = !g->refs && !g->queued;
    for (uint32_t i = 0; last && g->queues && i < g->members; i++)
        queue_drop(g->queues[i]);
    for (fan_sim_graph **at = &m->graphs; last && *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    for (size_t i = 0; last && i < g->nblocks; i++) {
        fan_block *b = block_at(m, (void *)g->blocks[i]);
        if (b && --b->graphs == 0 && b->left)
            fan_arena_free(&part_at(m, b->lo)->arena, b->lo);
    }
    if (last)
        sweep(m);
    unlock(m);
    if (last)
        graph_free(g);
}

void fan_sim_graph_drop(fan_sim_graph *g)
{
    if (!g)
        return;
    fan_sim *m = g->m;
    lock(m);
    bool mine = g->refs == 1; /* nobody else can launch it any more, or get a hold */
    unlock(m);
    graph_drop(g, &g->refs);
    if (mine)
        fan_sim_drop(m);
}

/* Work of a graph on its way. */
typedef struct replayed {
    fan_sim_graph *graph; /* held: it keeps the memory until the work has run */
    const fan_sim_kernel *kernel;
} replayed;

static fan_status replay_run(void *ctx, fan_error *err)
{
    const replayed *r = ctx;
    return r->kernel->fn ? r->kernel->fn(r->kernel->ctx, err) : FAN_OK;
}

static void replay_fini(void *ctx)
{
    replayed *r = ctx;
    graph_drop(r->graph, &r->graph->queued);
    fan_free(r);
}

/* follow: what is queued on q from now on comes after all that is queued on `other`. */
static fan_status follow(fan_sim *m, fan_sim_queue *q, fan_sim_queue *other, fan_error *err)
{
    FAN_TRY(hold_back(m, q, (fan_sim_point){other, other->queued}, err));
    q->end_us = later(q->end_us, other->end_us);
    return fan_race_check_wait(m->order, q->lane, lane_of(m), fan_race_check_clock(m->order, other->lane)) == FAN_OK
               ? FAN_OK
               : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
}

static fan_status replay_work(fan_sim *m, fan_sim_graph *g, const fan_sim_command *c, fan_error *err)
{
    bool one = c->njobs == 1;
    work w = {.name = c->name,
              .next = one ? job_visit : kernel_visit,
              .what = one ? (const void *)c->jobs : (const void *)&c->kernel,
              .us = c->us,
              .kept = m->config.bare ? KEPT_BY_NOBODY : KEPT_BY_GRAPH};
    replayed *r = NULL;
    if (m->config.run_work) {
        w.op = op_new(c->jobs, c->njobs);
        r = fan_alloc(sizeof *r);
        if (!w.op || !r) {
            fan_free(w.op);
            fan_free(r);
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
        }
        *r = (replayed){g, &c->kernel};
        g->queued++;
        w.op->fn = replay_run;
        w.op->fini = replay_fini;
        w.op->ctx = r;
    }
    fan_status status = enqueue(m, g->queues[c->member], &w, c->site, err);
    if (status != FAN_OK && status != FAN_ERR_RACE) {
        if (r)
            g->queued--;
        fan_free(r);
        fan_free(w.op);
    }
    return status;
}

/* A record of a graph, while it is launched. */
typedef struct mark {
    fan_sim_point point;
    fan_clock clock;
} mark;

static fan_status replay(fan_sim *m, fan_sim_graph *g, const fan_sim_command *c, mark *marks, fan_error *err)
{
    fan_sim_queue *q = g->queues[c->member];
    mark *k = &marks[c->event];
    switch (c->kind) {
    case FAN_COMMAND_WORK:
        return replay_work(m, g, c, err);
    case FAN_COMMAND_RECORD:
        k->point = (fan_sim_point){q, q->queued};
        return fan_race_check_record(m->order, q->lane, lane_of(m), &k->clock) == FAN_OK
                   ? FAN_OK
                   : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
    case FAN_COMMAND_WAIT:
        FAN_TRY(hold_back(m, q, k->point, err));
        q->end_us = later(q->end_us, k->point.queue->end_us);
        return fan_race_check_wait(m->order, q->lane, lane_of(m), &k->clock) == FAN_OK
                   ? FAN_OK
                   : fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
    }
    return FAN_OK;
}

/* graph_queues: a queue for each member, the same ones each time: so two launches of one graph run one after the other.
 */
static fan_status graph_queues(fan_sim *m, fan_sim_graph *g, const fan_sim_queue *on, fan_error *err)
{
    if (!g->queues && !(g->queues = fan_calloc(g->members * sizeof *g->queues)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
    for (uint32_t i = 0; i < g->members; i++)
        if (!g->queues[i])
            FAN_TRY(queue_new(m, g->device[i], ++m->handle, false, fan_race_check_clock(m->order, on->lane),
                              &g->queues[i], err));
    return FAN_OK;
}

fan_status fan_sim_graph_launch(fan_sim_graph *g, fan_stream *s, fan_error *err)
{
    fan_sim *m = g->m;
    fan_sim_queue *q = queue_of(s);
    fan_status status, worst = FAN_OK;
    mark *marks = fan_calloc(((size_t)g->events + 1) * sizeof *marks);
    if (!marks)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph");
    for (uint32_t i = 0; i < g->events; i++)
        fan_clock_init(&marks[i].clock);
    fan_yield();
    lock(m);
    FAN_GO(enter(m, "launch", err));
    FAN_GO(raise_pending(m, err));
    FAN_GO(not_captured(q, "launch a graph", err));
    FAN_GO(legacy(m, q, err));
    if (fan_race_check_wait(m->order, q->lane, lane_of(m), fan_race_check_clock(m->order, q->lane)) !=
        FAN_OK) /* it is queued by this host */
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph"));
    FAN_GO(graph_queues(m, g, q, err));
    for (uint32_t i = 0; i < g->members; i++)
        FAN_GO(follow(m, g->queues[i], q, err));
    for (const fan_sim_command *c = g->head; c; c = c->next) {
        status = replay(m, g, c, marks, err);
        if (status == FAN_ERR_RACE)
            worst = FAN_ERR_RACE;
        else if (status != FAN_OK)
            goto done;
    }
    for (uint32_t i = 0; i < g->members; i++)
        FAN_GO(follow(m, q, g->queues[i], err));
    touch(m, q->name, true);
    status = worst;
done:
    unlock(m);
    for (uint32_t i = 0; i < g->events; i++)
        fan_clock_fini(&marks[i].clock);
    fan_free(marks);
    return status;
}

/* ---- what tests and users ask ---- */

/* read_count: what other threads may count meanwhile. */
static uint64_t read_count(const fan_sim *m, const uint64_t *count)
{
    lock((fan_sim *)(uintptr_t)m);
    uint64_t n = *count;
    unlock((fan_sim *)(uintptr_t)m);
    return n;
}

uint64_t fan_sim_races(const fan_sim *m) { return read_count(m, &m->races); }

bool fan_sim_first_race(const fan_sim *m, fan_race *out)
{
    lock((fan_sim *)(uintptr_t)m);
    bool some = m->has_first;
    if (some)
        *out = m->first;
    unlock((fan_sim *)(uintptr_t)m);
    return some;
}

fan_status fan_sim_pending(fan_sim *m, fan_error *err)
{
    lock(m);
    fan_status status = raise_pending(m, err);
    unlock(m);
    return status;
}

void fan_sim_check(fan_sim *m, bool on)
{
    lock(m);
    m->checking = on;
    unlock(m);
}

void fan_sim_leave_out(fan_sim *m, uint64_t plan_bits)
{
    lock(m);
    m->left_out = plan_bits;
    unlock(m);
}

void fan_sim_fail_at(fan_sim *m, int64_t index, fan_status status)
{
    lock(m);
    m->fail_at = index;
    m->planned = true;
    m->fail_with = status;
    unlock(m);
}

uint64_t fan_sim_calls(const fan_sim *m) { return read_count(m, &m->calls); }

uint64_t fan_sim_unsound(const fan_sim *m) { return read_count(m, &m->unsound); }

double fan_sim_host_us(const fan_sim *m)
{
    double us = 0;
    lock((fan_sim *)(uintptr_t)m);
    for (size_t i = 0; i < 1 + FAN_ACTORS; i++)
        us = later(us, m->host_us[i]);
    unlock((fan_sim *)(uintptr_t)m);
    return us;
}

double fan_sim_device_us(const fan_sim *m)
{
    lock((fan_sim *)(uintptr_t)m);
    double us = m->device_us;
    unlock((fan_sim *)(uintptr_t)m);
    return us;
}

bool fan_sim_event_captured(fan_sim *m, const fan_event *e)
{
    lock(m);
    bool captured = ((const fan_sim_event *)e->impl)->recording != NULL;
    unlock(m);
    return captured;
}

/* ---- host threads ---- */

fan_status fan_sim_spawn(fan_sim *m, int *actor, fan_error *err)
{
    int i = -1;
    bool first;
    fan_status status;
    *actor = -1;
    lock(m);
    touch(m, NAME(OF_ACTORS, 0), FAN_TOUCH_WRITES);
    FAN_GO(gave_up(m, err));
    FAN_GO(fan_host_sched_spawn(m->turns, &i, &first, err));
    FAN_GO(new_host(m, 1 + (size_t)i, (uint64_t)i, err));
    if (fan_race_check_sync(m->order, m->host_lane[1 + i], fan_race_check_clock(m->order, lane_of(m))) != FAN_OK) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a host thread");
        goto done;
    }
    m->host_us[1 + i] = m->host_us[host_of(m)];
    *actor = i;
done:
    unlock(m);
    if (status != FAN_OK && i >= 0)
        fan_host_sched_end(m->turns, i);
    return status;
}

static void hook_yield(void *ctx)
{
    fan_sim *m = ctx;
    bool again = here.fresh;
    here.fresh = false;
    if (!in_kernel && !again)
        fan_host_sched_yield(m->turns, here.actor);
}

static bool hook_begin(void *ctx)
{
    fan_sim *m = ctx;
    if (in_kernel || FAN_FAULT(NO_TURNS))
        return true;
    if (!here.vain)
        fan_host_sched_busy(m->turns, here.actor);
    here.vain = false;
    fan_host_sched_yield(m->turns, here.actor);
    here.fresh = true;
    return fan_host_sched_given_up(m->turns) == FAN_GOING;
}

static void hook_end(void *ctx)
{
    (void)ctx; /* the thread's own */
    here.fresh = false;
}

static void hook_idle(void *ctx)
{
    fan_sim *m = ctx;
    if (in_kernel)
        return;
    here.vain = true;
    fan_host_sched_idle(m->turns, here.actor);
}

static void hook_changed(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan_host_sched_changed(m->turns, here.actor, mutex);
}

/* mutex_number: in every run the same one: whoever made it, and his how manieth; or, of those that no spawned thread
 * made, how many were made before. */
static uint64_t mutex_number(const fan_sim *m, uint64_t id)
{
    return id & MADE_HERE ? (id & OF_ITS_MAKER) | (OF_ITS_MAKER + 1) : id - m->mutex_base;
}

static uint64_t hook_name(void *ctx)
{
    fan_sim *m = ctx;
    size_t by = maker();
    lock(m);
    uint64_t number = (uint64_t)by << 40 | ++m->made[by];
    unlock(m);
    return MADE_HERE | (m->serial & 0xfff) << 47 | number;
}

static void hook_touch(void *ctx, fan_thing thing, uint64_t id, fan_touch how)
{
    static const int kinds[] = {[FAN_THING_LOCKED] = OF_MUTEX,
                                [FAN_THING_BUDGET] = OF_BUDGET,
                                [FAN_THING_COUNTERS] = OF_COUNTERS,
                                [FAN_THING_HOST_MEMORY] = OF_HOST};
    fan_sim *m = ctx;
    touch(m, NAME(kinds[thing], id ? mutex_number(m, id) : 0), how);
    if (thing != FAN_THING_LOCKED)
        return;
    lock(m); /* what was found there was put there before */
    (void)fan_race_check_locked(m->order, lane_of(m), id);
    if (how == FAN_TOUCH_WRITES)
        (void)fan_race_check_unlocking(m->order, lane_of(m), id);
    unlock(m);
}

static uint64_t mutex_name(const fan_sim *m, uint64_t id) { return NAME(OF_MUTEX, mutex_number(m, id)); }

static bool hook_wait(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    char site[SITE];
    site_of(m, site, sizeof site);
    lock(m);
    touch(m, mutex_name(m, mutex), false);
    unlock(m);
    fan_host_sched_wait(m->turns, here.actor, mutex, site);
    return true;
}

static void hook_locked(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    fan_host_sched_locked(m->turns, here.actor, mutex);
    lock(m);
    touch(m, mutex_name(m, mutex), true);
    (void)fan_race_check_locked(m->order, lane_of(m), mutex);
    unlock(m);
}

static void hook_unlocking(void *ctx, uint64_t mutex)
{
    fan_sim *m = ctx;
    lock(m);
    touch(m, mutex_name(m, mutex), true);
    (void)fan_race_check_unlocking(m->order, lane_of(m), mutex);
    unlock(m);
    fan_host_sched_unlocking(m->turns, here.actor, mutex);
}

bool fan_sim_thread_begin(fan_sim *m, int actor)
{
    fan_sim_hold(m);
    if (!fan_host_sched_begin(m->turns, actor)) {
        fan_sim_drop(m);
        return false;
    }
    here.m = m;
    here.actor = actor;
    here.fresh = here.vain = false;
    here.hooks = (fan_thread_hooks){.yield = hook_yield,
                                    .wait = hook_wait,
                                    .locked = hook_locked,
                                    .unlocking = hook_unlocking,
                                    .begin = hook_begin,
                                    .end = hook_end,
                                    .idle = hook_idle,
                                    .changed = hook_changed,
                                    .touch = hook_touch,
                                    .name = hook_name,
                                    .ctx = m};
    fan_thread_set_hooks(&here.hooks);
    return true;
}

void fan_sim_thread_end(fan_sim *m, int actor)
{
    bool mine = here.m == m && here.actor == actor;
    if (mine) {
        touch(m, NAME(OF_THREAD, (uint64_t)actor), FAN_TOUCH_WRITES);
        fan_thread_set_hooks(NULL);
        here.m = NULL;
    }
    fan_host_sched_end(m->turns, actor);
    if (mine)
        fan_sim_drop(m);
}

fan_status fan_sim_join(fan_sim *m, fan_error *err)
{
    if (actor_of(m) >= 0)
        return fan_fail(err, FAN_ERR_STATE, "a host thread of the machine cannot join its threads");
    lock(m);
    fan_status status = gave_up(m, err);
    unlock(m);
    FAN_TRY(status);
    if (fan_host_sched_count(m->turns) == 0)
        return FAN_OK;
    status = fan_host_sched_join(m->turns, err);
    lock(m);
    for (size_t i = 1; i < 1 + FAN_ACTORS; i++)
        if (m->has_lane[i]) {
            (void)fan_race_check_sync(
                m->order, m->host_lane[0],
                fan_race_check_clock(m->order, m->host_lane[i])); /* lanes have room for all lanes */
            m->host_us[0] = later(m->host_us[0], m->host_us[i]);
        }
    unlock(m);
    return status;
}

void fan_sim_saw_thread(fan_sim *m, int actor) { touch(m, NAME(OF_THREAD, (uint64_t)actor), FAN_TOUCH_READS); }

fan_status fan_sim_after_thread(fan_sim *m, int actor, fan_error *err)
{
    fan_status status = FAN_OK;
    lock(m);
    if (actor >= 0 && actor < FAN_ACTORS && m->has_lane[1 + actor])
        status = learn(m, fan_race_check_clock(m->order, m->host_lane[1 + actor]), err);
    unlock(m);
    return status;
}

void fan_sim_saw_event(const fan_event *e)
{
    const fan_sim_event *ev = e->impl;
    fan_sim *m = fan_sim_of(e->device);
    if (!m || !here.m)
        return;
    lock(m);
    touch(m, ev->name, FAN_TOUCH_READS);
    unlock(m);
}

void fan_sim_saw_memory(const fan_device *d, const fan_array *a, bool write)
{
    fan_sim *m = fan_sim_of(d);
    if (!m || !here.m)
        return;
    lock(m);
    const fan_block *b = a->storage ? block_at(m, a->storage->data) : NULL;
    if (b)
        touch(m, b->name, write);
    unlock(m);
}

void fan_sim_saw_all(fan_sim *m) { touch(m, NAME(OF_CALLS, 0), FAN_TOUCH_WEIGHS); }

void fan_sim_set_chooser(fan_sim *m, const fan_sim_chooser *c)
{
    lock(m);
    m->has_chooser = c != NULL;
    if (c)
        m->chooser = *c;
    set_turns(m);
    unlock(m);
}

void fan_sim_limit(fan_sim *m, size_t steps) { fan_host_sched_limit(m->turns, steps); }

size_t fan_sim_steps(fan_sim *m) { return fan_host_sched_steps(m->turns); }

int fan_sim_break(fan_sim *m, const char *text) { return fan_host_sched_break(m->turns, text); }

bool fan_sim_abandoned(const fan_sim *m) { return fan_host_sched_given_up(m->turns) == FAN_ABANDONED; }

bool fan_sim_gave_up(const fan_sim *m) { return fan_host_sched_given_up(m->turns) != FAN_GOING; }

bool fan_sim_stuck(fan_sim *m, int actor) { return fan_host_sched_stuck(m->turns, actor); }

void fan_sim_host_schedule(const fan_sim *m, char *buf, size_t size) { fan_host_sched_schedule(m->turns, buf, size); }
