/* Device memory and its lifetime (memory.h): memory without references waits for its users, and is
 * then freed.
 *
 *   pending      what waits: polled at each allocation, waited for when memory is short
 *   leaving      what is freed during one call, with shared events
 *   scopes       memory that a recorder allocates
 *   new, wrap    allocation, memory of others, users and owners */
#include "device/memory.h"

#include "base/fault.h"
#include "base/mem.h"
#include "device/event.h"
#include "device/stream.h"

#include <assert.h>
#include <string.h>

#define USERS 4

typedef struct fan_memory fan_memory;

/* Device memory. streams[0] is its owner (NULL: none); the others have used it. Without references
 * it is pending: events[i] represents all that streams[i] had queued at its last use, and
 * streams[i] is dropped. A stream that is still present has no event because none could be recorded
 * yet; a later record is just as good. */
struct fan_memory {
    fan_memory *next; /* the next in the device's list of pending memory */
    /* held, but not while pending: the device's list would then hold the device */
    fan_device *device;
    void *data;
    size_t bytes;
    /* returns memory to another allocator; NULL: memory of the device itself */
    void (*release)(void *ctx);
    void *ctx;
    bool immediate; /* released by the last drop at once */
    bool lost;      /* pending, with unknown users: it stays until its device is freed */
    /* of streams, the owner's place included */
    size_t n;
    size_t cap;
    fan_stream **streams;
    fan_event **events;
    fan_stream *few_streams[USERS];
    fan_event *few_events[USERS];
};

/* memory_is_lost: whether the device no longer works: its memory causes no events. */
static bool memory_is_lost(fan_device *d)
{
    return d->backend->lost && d->backend->lost(d);
}

/* memory_record_users: records an event on every stream that used pending memory. A failed record
 * is repeated later. */
static void memory_record_users(fan_memory *m)
{
    for (size_t i = 0; i < m->n; i++) {
        fan_stream *s = m->streams[i];
        if (!s)
            continue;
        bool lost = memory_is_lost(s->device);
        m->events[i] = NULL;
        if (!lost)
            m->events[i] = fan__event_note(m->device, s);
        if (!m->events[i] && !lost)
            continue;
        m->streams[i] = NULL;
        fan_stream_drop(s);
    }
}

#define BEHIND 8

/* The streams with an event that has not passed, and the earliest such: later events of these
 * streams need no query. (Memory is examined in turns, not always oldest first.) */
typedef struct memory_behind {
    struct {
        uint64_t stream;
        uint64_t event;
    } of[BEHIND];
    size_t n;
} memory_behind;

/* memory_passed: returns whether all work that used pending memory has run. */
static bool memory_passed(fan_memory *m, memory_behind *behind)
{
    if (m->lost)
        return false;
    for (size_t i = 0; i < m->n; i++) {
        if (m->streams[i])
            return false;
        fan_event *e = m->events[i];
        size_t k = 0;
        if (!e)
            continue;
        while (k < behind->n && behind->of[k].stream != e->noted)
            k++;
        bool known = k < behind->n;
        if (known && e->id >= behind->of[k].event &&
            !atomic_load_explicit(&e->passed, memory_order_relaxed))
            return false;
        if (!fan__event_passed(e)) {
            if (k < BEHIND) {
                behind->n += !known;
                behind->of[k].stream = e->noted;
                behind->of[k].event = e->id;
            }
            return false;
        }
        fan__event_note_end(m->device, e);
        m->events[i] = NULL;
    }
    return true;
}

static void memory_free(fan_memory *m)
{
    fan_device *d = m->device;
    if (m->release) {
        m->release(m->ctx);
    } else {
        fan__device_trace(FAN_TRACE_FREE, d, NULL, NULL, 0, m->bytes);
        d->backend->free(d, m->data, m->bytes);
    }
    if (m->streams != m->few_streams)
        fan_free(m->streams);
    fan_free(m);
}

/* pending_take: takes all pending memory off the device. */
static fan_memory *pending_take(fan_device *d)
{
    fan__device_lock(d);
    fan_memory *list = d->pending_free;
    d->pending_free = NULL;
    d->pending_free_end = &d->pending_free;
    fan__device_unlock(d);
    return list;
}

/* memory_poll: frees pending memory whose users have passed. Checks the oldest first, until `most`
 * were found that have not passed. The caller holds the device. */
static void memory_poll(fan_device *d, size_t most)
{
    fan_memory *list = pending_take(d);
    fan_memory *stay = NULL;
    fan_memory **end = &stay;
    memory_behind behind = {.n = 0};
    while (list && most > 0) {
        fan_memory *m = list;
        list = m->next;
        m->next = NULL;
        memory_record_users(m);
        if (memory_passed(m, &behind)) {
            memory_free(m);
        } else {
            *end = m;
            end = &m->next;
            most--;
        }
    }
    /* The new list: first the unchecked ones, then the checked ones, then those that became pending
     * in the meantime. */
    fan_memory **last = &list;
    while (*last)
        last = &(*last)->next;
    *last = stay;
    if (stay)
        last = end;
    if (!list)
        return;
    fan__device_lock(d);
    *last = d->pending_free;
    if (!d->pending_free)
        d->pending_free_end = last;
    d->pending_free = list;
    fan__device_unlock(d);
}

#define GLANCE 16

void fan_device_poll(fan_device *d)
{
    memory_poll(d, SIZE_MAX);
}

static void memory_defer(fan_memory *m)
{
    fan_device *d = m->device;
    m->next = NULL;
    fan__device_lock(d);
    *d->pending_free_end = m;
    d->pending_free_end = &m->next;
    fan__device_unlock(d);
}

void fan_device_flush(fan_device *d)
{
    fan_memory *list = pending_take(d);
    while (list) {
        fan_memory *m = list;
        list = m->next;
        for (size_t i = 0; i < m->n; i++) {
            fan_event *e = m->events[i];
            fan_stream *s = m->streams[i];
            if (e) {
                (void)e->device->backend->event_sync(e, NULL);
                fan__event_note_end(m->device, e);
            } else if (s) {
                (void)s->device->backend->sync(s, NULL);
                fan_stream_drop(s);
            }
        }
        memory_free(m);
    }
}

void fan_device_orphan(fan_device *d)
{
    fan_memory *list = pending_take(d);
    while (list) {
        fan_memory *m = list;
        list = m->next;
        memory_record_users(m);
        for (size_t i = 0; i < m->n; i++) {
            m->lost |= m->streams[i] != NULL;
            fan_stream_drop(m->streams[i]);
            m->streams[i] = NULL;
        }
        memory_defer(m);
    }
}

void fan_device_clear(fan_device *d)
{
    fan_device_flush(d);
    fan__events_fini(d);
    fan_device_fini(d);
}

/* memory_is_captured: returns whether one of the streams is in a capture: then the memory causes no
 * query and no wait (K2). */
static bool memory_is_captured(fan_stream *const *streams, size_t n)
{
    uint64_t id = 0;
    for (size_t i = 0; i < n && !id; i++) {
        if (streams[i] && fan_stream_capture(streams[i], &id, NULL) != FAN_OK)
            id = 0;
    }
    return id != 0;
}

/* Memory freed during the current call of this thread. Its device references are kept until it is
 * processed. */
static _Thread_local struct memory_leaving {
    size_t depth;
    bool polled;
    fan_memory *first;
    fan_memory **end;
} memory_leaving;

/* A user of freed memory, and the event that all its memory shares. */
typedef struct memory_note {
    fan_device *owner; /* held */
    fan_stream *stream;
    fan_event *event; /* NULL: none yet */
    bool captured;
    bool tried;
} memory_note;

#define NOTES 16

typedef struct memory_notes {
    memory_note all[NOTES];
    size_t n;
} memory_notes;

/* memory_note_of: returns the stream's note; NULL: too many streams. */
static memory_note *memory_note_of(memory_notes *notes, fan_device *owner, fan_stream *s)
{
    for (size_t i = 0; i < notes->n; i++) {
        memory_note *note = &notes->all[i];
        bool same = note->stream == s || FAN_FAULT(SHARE_ANY_EVENT);
        if (same && note->owner == owner)
            return note;
    }
    if (notes->n == NOTES)
        return NULL;
    memory_note *note = &notes->all[notes->n++];
    uint64_t id = 0;
    *note = (memory_note){
        .owner = fan_device_hold(owner),
        .stream = fan_stream_hold(s),
    };
    note->captured = fan_stream_capture(s, &id, NULL) == FAN_OK && id;
    return note;
}

/* memory_share_notes: gives freed memory the events of its users. False: one of them is captured
 * (K2). */
static bool memory_share_notes(fan_memory *m, memory_notes *notes)
{
    for (size_t i = 0; i < m->n; i++) {
        fan_stream *s = m->streams[i];
        if (!s)
            continue;
        const memory_note *note = memory_note_of(notes, m->device, s);
        bool captured = note && note->captured;
        if (!note)
            captured = memory_is_captured(&s, 1);
        if (captured)
            return false;
    }
    /* memory_record_users does those without a note, and those of lost devices */
    for (size_t i = 0; i < m->n; i++) {
        fan_stream *s = m->streams[i];
        if (!s)
            continue;
        memory_note *note = memory_note_of(notes, m->device, s);
        if (!note || memory_is_lost(s->device))
            continue;
        if (!note->tried)
            note->event = fan__event_note(m->device, s);
        note->tried = true;
        if (!note->event)
            continue;
        m->events[i] = fan_event_hold(note->event);
        m->streams[i] = NULL;
        fan_stream_drop(s);
    }
    memory_record_users(m);
    return true;
}

/* memory_leave_all: frees the collected memory, or makes it pending, without allocating. */
static void memory_leave_all(void)
{
    memory_notes notes = {.n = 0};
    memory_behind behind = {.n = 0};
    fan_memory *list = memory_leaving.first;
    memory_leaving.first = NULL;
    memory_leaving.end = &memory_leaving.first;
    while (list) {
        fan_memory *m = list;
        fan_device *d = m->device;
        list = m->next;
        if (memory_share_notes(m, &notes) && memory_passed(m, &behind))
            memory_free(m);
        else
            memory_defer(m);
        fan_device_drop(d);
    }
    for (size_t i = 0; i < notes.n; i++) {
        const memory_note *note = &notes.all[i];
        if (note->event)
            fan__event_note_end(note->owner, note->event);
        fan_stream_drop(note->stream);
        memory_poll(note->owner, GLANCE);
        fan_device_drop(note->owner);
    }
}

void fan_memory_leave_begin(void)
{
    if (memory_leaving.depth++ == 0) {
        memory_leaving.end = &memory_leaving.first;
        memory_leaving.polled = false;
    }
}

void fan_memory_leave_end(void)
{
    if (--memory_leaving.depth == 0 && memory_leaving.first)
        memory_leave_all();
}

/* memory_release: called by the last drop: frees the memory, or makes it pending. It does not
 * allocate, so nothing is lost if memory is short. */
static void memory_release(fan_storage *st)
{
    fan_memory *m = st->ctx;
    fan_device *d = m->device;
    size_t skip = m->streams[0] ? 0 : 1; /* no owner */
    if (m->immediate) {
        for (size_t i = 0; i < m->n; i++)
            fan_stream_drop(m->streams[i]);
        memory_free(m);
        fan_device_drop(d);
        return;
    }
    if (d->backend->dropped && !m->release)
        d->backend->dropped(d, m->data, m->bytes, m->streams + skip, m->n - skip);
    if (memory_leaving.depth) {
        m->next = NULL;
        *memory_leaving.end = m;
        memory_leaving.end = &m->next;
        return;
    }
    if (memory_is_captured(m->streams, m->n)) {
        memory_defer(m);
        fan_device_drop(d);
        return;
    }
    memory_behind behind = {.n = 0};
    memory_record_users(m);
    if (memory_passed(m, &behind))
        memory_free(m);
    else
        memory_defer(m);
    memory_poll(d, GLANCE);
    fan_device_drop(d);
}

/* memory_reclaim: waits for the oldest pending memory that can be waited for, and frees it. False:
 * none. */
static bool memory_reclaim(fan_device *d)
{
    size_t n = 0;
    fan__device_lock(d);
    for (const fan_memory *m = d->pending_free; m; m = m->next)
        n++;
    fan__device_unlock(d);
    for (; n > 0; n--) {
        fan__device_lock(d);
        fan_memory *m = d->pending_free;
        if (m) {
            d->pending_free = m->next;
            if (!d->pending_free)
                d->pending_free_end = &d->pending_free;
        }
        fan__device_unlock(d);
        if (!m)
            return false;
        memory_record_users(m);
        bool can = true; /* false: a stream cannot be waited for, because it is captured or freed */
        for (size_t i = 0; i < m->n && can; i++) {
            fan_event *e = m->events[i];
            fan_stream *s = m->streams[i];
            if (e)
                can = e->device->backend->event_sync(e, NULL) == FAN_OK;
            if (!s || !can)
                continue;
            /* the whole stream: no event can be recorded on it */
            can = s->device->backend->sync(s, NULL) == FAN_OK;
            if (can) {
                m->streams[i] = NULL;
                fan_stream_drop(s);
            }
        }
        memory_behind behind = {.n = 0};
        if (can && memory_passed(m, &behind)) {
            memory_free(m);
            return true;
        }
        memory_defer(m);
    }
    return false;
}

static _Thread_local fan_memory_scope *memory_scope;

/* scope_make: allocates host memory in a scope of the CPU; memory_new reports its failure. */
static fan_storage *scope_make(size_t n)
{
    fan_storage *made = NULL;
    fan_memory_scope *in = memory_scope;
    while (in->device->backend->has_streams)
        in = in->outer;
    if (in->alloc(in, NULL, n, &made, NULL) != FAN_OK)
        return NULL;
    if (!made) { /* allocate as outside the scope */
        fan_storage_make here = fan_storage_redirect(NULL);
        made = fan_storage_new(n);
        (void)fan_storage_redirect(here);
        if (made && in->outside && in->outside(in, made, NULL) != FAN_OK) {
            fan_storage_drop(made);
            made = NULL;
        }
    }
    return made;
}

void fan_memory_scope_begin(fan_memory_scope *s)
{
    s->outer = memory_scope;
    memory_scope = s;
    if (!s->device->backend->has_streams)
        s->was = fan_storage_redirect(scope_make);
}

void fan_memory_scope_end(fan_memory_scope *s)
{
    assert(memory_scope == s);
    memory_scope = s->outer;
    if (!s->device->backend->has_streams)
        (void)fan_storage_redirect(s->was);
}

/* memory_scope_of: returns this thread's innermost scope of d; NULL: none. */
static fan_memory_scope *memory_scope_of(const fan_device *d)
{
    fan_memory_scope *in = memory_scope;
    while (in && in->device != d)
        in = in->outer;
    return in;
}

fan_status fan_memory_scope_check(const fan_stream *s, fan_error *err)
{
    char text[32];
    const fan_memory_scope *in = memory_scope_of(s->device);
    if (!in || !in->recording)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_CAPTURE,
                    "%s: work on stream %llu of %s is not part of the recording: let the stream "
                    "wait for fanin.current_stream(\"%s\") first, and that one for it at the end",
                    in->who, (unsigned long long)s->handle,
                    fan_device_text(s->device, text, sizeof text), text);
}

fan_status fan_memory_scope_upload(const fan_device *d, fan_error *err)
{
    char text[32];
    const fan_memory_scope *in = memory_scope_of(d);
    if (!in)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_CAPTURE,
                    "%s: a copy from the host to %s would run once, and not at each replay: make "
                    "the array before, and pass it as an operand",
                    in->who, fan_device_text(d, text, sizeof text));
}

/* memory_make: makes the record of `bytes` of device memory and its storage, without a hold on d.
 * NULL: out of memory. */
static fan_memory *memory_make(fan_device *d, void *data, size_t bytes, fan_storage **out)
{
    fan_memory *m = fan_calloc(sizeof *m);
    *out = NULL;
    if (m)
        *out = fan_storage_wrap(data, bytes, memory_release, m);
    if (!*out) {
        fan_free(m);
        return NULL;
    }
    m->device = d;
    m->data = data;
    m->bytes = bytes;
    m->streams = m->few_streams;
    m->events = m->few_events;
    m->cap = USERS;
    m->n = 1; /* the owner's place */
    return m;
}

/* memory_new: allocates `bytes` of device memory owned by stream `owner` (may be NULL), as a
 * storage whose release follows Lifetime. On the CPU: fan_storage_new. */
static fan_status memory_new(fan_device *d, fan_stream *owner, size_t bytes, fan_storage **out,
                             fan_error *err)
{
    *out = NULL;
    fan_memory_scope *in = memory_scope_of(d);
    if (in)
        FAN_TRY(in->alloc(in, owner, bytes, out, err));
    if (*out)
        return FAN_OK;
    if (!d->backend->has_streams) {
        *out = fan_storage_new(bytes);
        if (!*out) {
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s", bytes,
                            FAN_PLURAL(bytes));
        }
        return FAN_OK;
    }
    fan_storage *st;
    fan_memory *m = memory_make(d, NULL, bytes, &st);
    if (!m) {
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for %zu byte%s on a device", bytes,
                        FAN_PLURAL(bytes));
    }
    if (bytes == 0)
        m->bytes = 1;                             /* empty memory needs an address of its own */
    bool capture = memory_is_captured(&owner, 1); /* K2: no query and no wait then */
    if (!capture && !(memory_leaving.depth && memory_leaving.polled))
        memory_poll(d, GLANCE);
    memory_leaving.polled = memory_leaving.depth > 0;
    fan_yield();
    fan_status status = d->backend->alloc(d, owner, m->bytes, &m->data, err);
    if (status == FAN_ERR_DEVICE_NOMEM && memory_leaving.first)
        memory_leave_all();
    for (bool wait = false; status == FAN_ERR_DEVICE_NOMEM && !capture; wait = true) {
        fan__device_lock(d);
        bool some = d->pending_free != NULL;
        fan__device_unlock(d);
        /* first poll without waiting; then wait for the oldest, the next, .. */
        if (!some || (wait && !memory_reclaim(d)))
            break;
        memory_poll(d, SIZE_MAX);
        status = d->backend->alloc(d, owner, m->bytes, &m->data, err);
    }
    if (status != FAN_OK) {
        st->release = NULL;
        fan_storage_drop(st);
        fan_free(m);
        return status;
    }
    fan_device_hold(d);
    m->streams[0] = fan_stream_hold(owner);
    st->data = m->data;
    if (in && in->outside)
        status = in->outside(in, st, err);
    if (status != FAN_OK) {
        fan_storage_drop(st);
        return status;
    }
    *out = st;
    return FAN_OK;
}

static fan_memory *memory_of(const fan_storage *st)
{
    if (!st || st->release != memory_release)
        return NULL;
    return st->ctx;
}

fan_status fan_memory_wrap(fan_device *d, void *data, void (*release)(void *ctx), void *ctx,
                           fan_storage **out, fan_error *err)
{
    fan_memory *m = memory_make(d, data, 0, out);
    if (!m) {
        return fan_fail(err, FAN_ERR_NOMEM,
                        "out of memory for the block table of an array's memory");
    }
    fan_device_hold(d);
    m->release = release;
    m->ctx = ctx;
    return FAN_OK;
}

fan_status fan_memory_lend(fan_device *d, fan_stream *owner, void *data, size_t bytes,
                           void (*release)(void *ctx), void *ctx, fan_storage **out, fan_error *err)
{
    FAN_TRY(fan_memory_wrap(d, data, release, ctx, out, err));
    fan_memory *m = (*out)->ctx;
    (*out)->bytes = bytes;
    m->bytes = bytes;
    m->immediate = true;
    m->streams[0] = fan_stream_hold(owner);
    return FAN_OK;
}

fan_status fan_memory_wait_users(fan_storage *st, fan_stream *s, const fan_stream *done,
                                 fan_error *err)
{
    fan_memory *m = memory_of(st);
    while (m) {
        fan__device_lock(m->device);
        fan_stream *user = NULL;
        if (m->n > 1)
            user = m->streams[--m->n]; /* the last one after the owner */
        fan__device_unlock(m->device);
        if (!user)
            break;
        fan_event *e = NULL;
        fan_status status = FAN_OK;
        if (user != s && user != done) {
            status = fan_event_record(user, &e, err);
            if (status == FAN_OK)
                status = fan_stream_wait(s, e, NULL, err);
            fan_event_drop(e);
        }
        if (status != FAN_OK) {
            fan__device_lock(m->device);
            m->streams[m->n++] = user;
            fan__device_unlock(m->device);
            return status;
        }
        fan_stream_drop(user);
    }
    return FAN_OK;
}

bool fan_memory_lent(const fan_storage *st)
{
    const fan_memory *m = memory_of(st);
    return m && m->immediate;
}

bool fan_memory_used_by(fan_storage *st, const fan_stream *s)
{
    const fan_memory *m = memory_of(st);
    bool others = false;
    if (!m)
        return false;
    fan__device_lock(m->device);
    for (size_t i = 0; i < m->n; i++)
        others |= m->streams[i] && m->streams[i] != s;
    fan__device_unlock(m->device);
    return !others;
}

void *fan_memory_wrapped(const fan_storage *st, void (*release)(void *ctx))
{
    const fan_memory *m = memory_of(st);
    if (!m || m->release != release)
        return NULL;
    return m->ctx;
}

/* memory_has_user: returns whether s uses the memory. The device's lock is held. */
static bool memory_has_user(const fan_memory *m, const fan_stream *s)
{
    for (size_t i = 0; i < m->n; i++) {
        if (m->streams[i] == s)
            return true;
    }
    return false;
}

/* memory_add_user: returns 1: s was added, 0: it was a user; -1: out of memory, nothing changed.
 * The device's lock is held. */
static int memory_add_user(fan_memory *m, fan_stream *s)
{
    if (memory_has_user(m, s))
        return 0;
    if (m->n == m->cap) {
        size_t cap = 2 * m->cap;
        fan_stream **streams = fan_calloc(cap * (sizeof *streams + sizeof(fan_event *)));
        if (!streams)
            return -1;
        memcpy(streams, m->streams, m->n * sizeof *streams);
        if (m->streams != m->few_streams)
            fan_free(m->streams);
        m->streams = streams;
        m->events = (fan_event **)(void *)(streams + cap);
        m->cap = cap;
    }
    m->streams[m->n++] = fan_stream_hold(s);
    return 1;
}

fan_status fan_memory_record_stream(fan_storage *st, fan_stream *s, fan_error *err)
{
    fan_memory *m = memory_of(st);
    if (!m || !s)
        return FAN_OK;
    if (m->device->holds != s->device->holds && !FAN_FAULT(USER_OF_ANOTHER_MACHINE)) {
        char text[32];
        return fan_fail(
            err, FAN_ERR_VALUE,
            "record_stream: stream %llu of %s belongs to another machine than the memory",
            (unsigned long long)s->handle, fan_device_text(s->device, text, sizeof text));
    }
    fan__device_lock(m->device);
    int added = memory_add_user(m, s);
    fan__device_unlock(m->device);
    if (added < 0) {
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream that uses %zu byte%s",
                        m->bytes, FAN_PLURAL(m->bytes));
    }
    if (added)
        fan__device_trace(FAN_TRACE_MARK, m->device, s, NULL, 0, m->bytes);
    return FAN_OK;
}

/* memory_lacks: whether s is not a user of the memory (NULL: it needs none). The lock of s's device
 * is held; memory of another device counts as lacking it. */
static bool memory_lacks(const fan_memory *m, const fan_stream *s)
{
    if (!m)
        return false;
    return m->device != s->device || !memory_has_user(m, s);
}

fan_status fan_memory_record_stream_all(fan_array *const *arrays, size_t n, fan_stream *s,
                                        fan_error *err)
{
    for (size_t i = 0; s && i < n; i++) {
        /* to the first array whose memory does not have s as a user */
        fan__device_lock(s->device);
        while (i < n && !(arrays[i] && memory_lacks(memory_of(arrays[i]->storage), s)))
            i++;
        fan__device_unlock(s->device);
        if (i < n)
            FAN_TRY(fan_memory_record_stream(arrays[i]->storage, s, err));
    }
    return FAN_OK;
}

#ifdef FAN_TEST
size_t fan_memory_users(fan_storage *st, fan_stream **out, size_t cap)
{
    fan_memory *m = memory_of(st);
    if (!m)
        return 0;
    fan__device_lock(m->device);
    size_t skip = m->streams[0] ? 0 : 1;
    size_t n = m->n - skip;
    for (size_t i = 0; i < n && i < cap; i++)
        out[i] = m->streams[skip + i];
    fan__device_unlock(m->device);
    return n;
}
#endif

fan_stream *fan_memory_user(fan_storage *st, size_t i)
{
    fan_memory *m = memory_of(st);
    if (!m)
        return NULL;
    fan__device_lock(m->device);
    fan_stream *s = NULL;
    if (!m->streams[0])
        i++;
    if (i < m->n)
        s = fan_stream_hold(m->streams[i]);
    fan__device_unlock(m->device);
    return s;
}

void fan_memory_set_stream(fan_storage *st, fan_stream *owner)
{
    fan_memory *m = memory_of(st);
    if (!m || !owner)
        return;
    fan__device_lock(m->device);
    if (!m->streams[0]) {
        size_t i = 1;
        while (i < m->n && m->streams[i] != owner)
            i++;
        if (i < m->n) /* s was a user already: its hold moves */
            m->streams[i] = m->streams[--m->n];
        else
            fan_stream_hold(owner);
        m->streams[0] = owner;
    }
    fan__device_unlock(m->device);
}

fan_device *fan_memory_device(const fan_storage *st)
{
    const fan_memory *m = memory_of(st);
    if (!m)
        return NULL;
    return m->device;
}

fan_status fan_device_array(fan_device *d, fan_stream *owner, fan_dtype dtype, int ndim,
                            const int64_t *shape, const fan_array *like, fan_array **out,
                            fan_error *err)
{
    *out = NULL;
    if (!d->backend->has_streams && !memory_scope_of(d))
        return fan_array_new(dtype, ndim, shape, like, out, err);
    int64_t size;
    int64_t strides[FAN_MAX_NDIM];
    size_t item = fan_dtype_size(dtype);
    FAN_TRY(fan_shape_check(ndim, shape, item, &size, err));
    fan_dense_strides(ndim, shape, item, like, strides);
    fan_storage *st;
    FAN_TRY(memory_new(d, owner, (size_t)size * item, &st, err));
    fan_status status = fan_array_view(st, st->data, dtype, ndim, shape, strides, true, out, err);
    fan_storage_drop(st);
    return status;
}

fan_status fan_stats_out_new(fan_device *d, fan_stream *owner, int64_t size, fan_array **words,
                             fan_error *err)
{
    int64_t n = FAN_STATS_WORDS + FAN_STATS_PARTIAL_WORDS * fan_stats_partials(size);
    return fan_device_array(d, owner, FAN_DT_UINT64, 1, &n, NULL, words, err);
}

fan_status fan_stats_out_read(fan_stream *s, const fan_array *words, fan_device_stats *out,
                              fan_error *err)
{
    int64_t n = FAN_STATS_WORDS;
    int64_t step = (int64_t)fan_dtype_size(FAN_DT_UINT64);
    fan_array host = {
        .data = (char *)out,
        .dtype = FAN_DT_UINT64,
        .ndim = 1,
        .size = n,
        .shape = &n,
        .strides = &step,
        .writable = true,
    };
    fan_array *head;
    FAN_TRY(fan_array_slice(words, 0, 0, n, &head, err));
    fan_yield();
    fan_status status = s->device->backend->read(s, &host, head, err);
    fan_array_drop(head);
    return status;
}
