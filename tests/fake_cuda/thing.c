#include "fake_cuda/thing.h"

#include "base/mem.h"

#include <string.h>

fan__thing *fan__thing_new(fan__kind k, int device)
{
    fan__thing *t = fan_calloc(sizeof *t);
    if (t) {
        t->kind = k;
        t->device = device;
    }
    return t;
}

/* thing_memory_place: of the first memory that does not lie before `address`. Locked. */
static size_t thing_memory_place(uint64_t address)
{
    size_t lo = 0;
    size_t hi = fan__fake.nmemory;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (fan__fake.memory[mid]->address < address) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

void fan__thing_add(fan__thing *t)
{
    fan__fake_lock();
    t->next = fan__fake.things[t->kind];
    fan__fake.things[t->kind] = t;
    fan__fake.live[t->kind]++;
    if (t->kind == MEMORY) {
        size_t i = thing_memory_place(t->address);
        memmove(fan__fake.memory + i + 1, fan__fake.memory + i,
                (fan__fake.nmemory++ - i) * sizeof *fan__fake.memory);
        fan__fake.memory[i] = t;
    }
    fan__fake_unlock();
}

fan__thing *fan__thing_made(fan__kind k, int device)
{
    fan__thing *t = fan__thing_new(k, device);
    if (t)
        fan__thing_add(t);
    return t;
}

fan__thing *fan__thing_find(fan__kind k, const void *handle)
{
    fan__thing *found = NULL;
    fan__fake_lock();
    for (fan__thing *t = fan__fake.things[k]; t && !found; t = t->next) {
        if (t == handle)
            found = t;
    }
    fan__fake_unlock();
    return found;
}

fan__thing *fan__thing_memory(uint64_t address, uint64_t bytes)
{
    fan__fake_lock();
    size_t i = thing_memory_place(address + 1);
    fan__thing *t = i ? fan__fake.memory[i - 1] : NULL;
    bool inside =
        t && address - t->address < t->bytes && bytes <= t->bytes - (address - t->address);
    fan__fake_unlock();
    return inside ? t : NULL;
}

void fan__thing_remove(fan__thing *gone)
{
    for (fan__thing **at = &fan__fake.things[gone->kind]; *at; at = &(*at)->next) {
        if (*at == gone) {
            *at = gone->next;
            fan__fake.live[gone->kind]--;
            break;
        }
    }
}

void fan__thing_drop(fan__thing *gone)
{
    fan__fake_lock();
    fan__thing_remove(gone);
    size_t i = gone->kind == MEMORY ? thing_memory_place(gone->address) : fan__fake.nmemory;
    if (i < fan__fake.nmemory && fan__fake.memory[i] == gone) {
        memmove(fan__fake.memory + i, fan__fake.memory + i + 1,
                (--fan__fake.nmemory - i) * sizeof *fan__fake.memory);
    }
    fan__fake_unlock();
    fan_stream_drop(gone->stream);
    fan_event_drop(gone->event);
    fan_free(gone->sent);
    fan_free(gone);
}

/* thing_own_stream: the calling thread's per-thread stream of a device, made when it is first
 * named. */
static fan_stream *thing_own_stream(int device)
{
    uint64_t id = fan_thread_id();
    fan_stream *s = NULL;
    fan__fake_lock();
    for (fan__thing *t = fan__fake.things[A_STREAM]; t && !s; t = t->next) {
        if (t->thread == id && t->device == device)
            s = t->stream;
    }
    fan__fake_unlock();
    if (s)
        return fan_stream_hold(s);
    fan__thing *t = fan__thing_new(A_STREAM, device);
    if (!t || fan_sim_stream(fan__fake.m, device, true, &t->stream, NULL) != FAN_OK) {
        fan_free(t);
        return NULL;
    }
    t->thread = id;
    s = fan_stream_hold(t->stream);
    fan__thing_add(t);
    fan__fake_lock();
    fan__fake.live[A_STREAM]--; /* the caller did not create it */
    fan__fake_unlock();
    return s;
}

fan_cu_result fan__thing_unknown(const void *handle)
{
    return fan__thing_find(DESTROYED, handle) ? CONTEXT_IS_DESTROYED : INVALID_HANDLE;
}

fan_cu_result fan__thing_stream(const struct fan_cu_context *c, fan_cu_stream handle,
                                fan_stream **out)
{
    fan_device *d = fan_sim_device(fan__fake.m, c->device);
    uintptr_t number = (uintptr_t)handle;
    if (number <= 1) {
        *out = d->backend->current(d);
    } else if (number == 2) {
        *out = thing_own_stream(c->device);
    } else {
        fan__thing *t = fan__thing_find(A_STREAM, handle);
        if (!t || t->thread)
            return fan__thing_unknown(handle);
        *out = fan_stream_hold(t->stream);
    }
    return fan__ok_or(*out, OUT_OF_MEMORY);
}
