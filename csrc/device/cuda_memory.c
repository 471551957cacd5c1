/* Memory of the CUDA backend.
 *
 * A block comes from the device's default pool in the order of the stream that uses it first, or, where there are no
 * pools, no such stream, or a capture, from cuMemAlloc: that can be used anywhere at once. Who frees says that all
 * users have passed, so a pooled block goes back on a stream of our own, which nobody else waits for. The books (one
 * entry a block, sorted by address) say which is which, and which graphs use it. */
#include "device/cuda_part.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* at: the first block that does not lie before `address`. The part's lock is held. */
static size_t at(const fan_cuda_part *p, uint64_t address)
{
    size_t lo = 0, hi = p->nblocks;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (p->blocks[mid].address < address)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static fan_cuda_block *holding(fan_cuda_part *p, uint64_t address)
{
    size_t i = at(p, address + 1);
    return i > 0 && address - p->blocks[i - 1].address < p->blocks[i - 1].bytes ? &p->blocks[i - 1] : NULL;
}

/* reserve: room in the books for one block more, before the driver is asked. */
static fan_status reserve(fan_cuda_part *p, fan_error *err)
{
    (void)pthread_mutex_lock(&p->lock);
    int failed = fan_grow((void **)&p->blocks, &p->blocks_cap, p->nblocks + 16,
                          sizeof *p->blocks); /* several threads may have reserved */
    (void)pthread_mutex_unlock(&p->lock);
    return failed ? fan_fail(err, FAN_ERR_NOMEM, "out of memory for the books of cuda:%d", p->index) : FAN_OK;
}

static int enter_books(fan_cuda_part *p, uint64_t address, size_t bytes, bool pooled)
{
    (void)pthread_mutex_lock(&p->lock);
    int failed = fan_grow((void **)&p->blocks, &p->blocks_cap, p->nblocks + 1, sizeof *p->blocks);
    if (!failed) {
        size_t i = at(p, address);
        memmove(p->blocks + i + 1, p->blocks + i, (p->nblocks - i) * sizeof *p->blocks);
        p->blocks[i] = (fan_cuda_block){.address = address, .bytes = bytes, .pooled = pooled};
        p->nblocks++;
    }
    (void)pthread_mutex_unlock(&p->lock);
    return failed;
}

static void strike(fan_cuda_part *p, const fan_cuda_block *b)
{
    size_t i = (size_t)(b - p->blocks);
    p->nleft -= b->left;
    p->nblocks--;
    memmove(p->blocks + i, p->blocks + i + 1, (p->nblocks - i) * sizeof *p->blocks);
}

/* give: back to the driver, in the order of `on` where the pool takes it; the context is current. What fails here is
 * told by the next call that can. */
static void give(fan_cuda_part *p, const fan_cuda_block *b, fan_cu_stream on)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = b->pooled ? api->MemFreeAsync(b->address, on) : api->MemFree(b->address);
    (void)fan_cuda_relax(p, mode);
    (void)fan_cuda_check(p, code, b->pooled ? "cuMemFreeAsync" : "cuMemFree", NULL);
}

/* reap: blocks whose last hold went while a graph used them, and whose graphs have gone since. The context is current.
 */
static void reap(fan_cuda_part *p)
{
    for (;;) {
        fan_cuda_block gone = {.address = 0};
        (void)pthread_mutex_lock(&p->lock);
        for (size_t i = 0; p->nleft && i < p->nblocks && !gone.address; i++) {
            const fan_cuda_block *b = &p->blocks[i];
            if (b->left && atomic_load_explicit(b->graphs, memory_order_acquire) == 1) { /* the books' own */
                gone = *b;
                strike(p, b);
            }
        }
        (void)pthread_mutex_unlock(&p->lock);
        if (!gone.address)
            return;
        fan_free(gone.graphs);
        give(p, &gone, p->house);
    }
}

/* ask: one try. */
static fan_cu_result ask(fan_cuda_part *p, fan_cu_stream on, bool pooled, size_t bytes, uint64_t *out)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    if (pooled)
        return api->MemAllocAsync(out, bytes, on);
    int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = api->MemAlloc(out, bytes);
    (void)fan_cuda_relax(p, mode);
    return code;
}

/* take: the context is current. Where memory is short the pool gives back what it keeps, and it is tried once more. */
static fan_status take(fan_cuda_part *p, fan_stream *stream, size_t bytes, fan_cuda_block *b, fan_error *err)
{
    char call[64];
    uint64_t capture = 0;
    fan_cu_stream on = NULL;
    if (stream) {
        FAN_TRY(fan_cuda_queue_of(stream, &on, err));
        FAN_TRY(fan_cuda_capture_of(stream, &capture, NULL, err));
    }
    *b = (fan_cuda_block){.bytes = bytes, .pooled = p->pools && stream && !capture};
    fan_cu_result code = ask(p, on, b->pooled, bytes, &b->address);
    if (code == FAN_CU_OUT_OF_MEMORY) {
        reap(p);
        if (p->pools) {
            int mode = fan_cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
            (void)fan_cuda_api_of(p)->MemPoolTrimTo(p->pool, 0);
            (void)fan_cuda_relax(p, mode);
        }
        code = ask(p, on, b->pooled, bytes, &b->address);
    }
    snprintf(call, sizeof call, "%s(%zu bytes)", b->pooled ? "cuMemAllocAsync" : "cuMemAlloc", bytes);
    return fan_cuda_check(p, code, call, err);
}

fan_status fan_cuda_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(d);
    fan_cuda_scope scope;
    fan_cuda_block b;
    FAN_TRY(reserve(p, err));
    FAN_TRY(fan_cuda_enter(p, &scope, err));
    reap(p);
    fan_status status = take(p, stream, bytes, &b, err);
    if (status == FAN_OK && enter_books(p, b.address, bytes, b.pooled)) {
        give(p, &b, p->house);
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for the books of cuda:%d", p->index);
    }
    fan_cuda_leave(&scope);
    if (status == FAN_OK)
        *out = (void *)(uintptr_t)b.address;
    return status;
}

void fan_cuda_free(fan_device *d, void *data, size_t bytes)
{
    fan_cuda_part *p = fan_cuda_part_of(d);
    fan_cuda_scope scope;
    fan_cuda_block gone = {.address = 0};
    (void)bytes;
    bool usable = fan_cuda_usable(p);
    (void)pthread_mutex_lock(&p->lock);
    fan_cuda_block *b = holding(p, (uint64_t)(uintptr_t)data);
    if (b && b->graphs && usable && atomic_load_explicit(b->graphs, memory_order_acquire) > 1 &&
        !FAN_FAULT(CUDA_CAPTURED_FREE)) {
        b->left = true;
        p->nleft++;
    } else if (b) {
        gone = *b;
        strike(p, b);
    }
    (void)pthread_mutex_unlock(&p->lock);
    if (!gone.address)
        return;
    if (gone.graphs && atomic_fetch_sub_explicit(gone.graphs, 1, memory_order_acq_rel) == 1)
        fan_free(gone.graphs); /* else the last graph frees it */
    if (!usable || fan_cuda_enter(p, &scope, NULL) != FAN_OK)
        return;
    give(p, &gone, p->house);
    reap(p);
    fan_cuda_leave(&scope);
}

fan_status fan_cuda_scratch(fan_stream *s, size_t bytes, uint64_t *out, fan_error *err)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    uint64_t capture;
    fan_cu_graph graph = NULL;
    void *data;
    FAN_TRY(fan_cuda_alloc(s->device, s, bytes, &data, err));
    *out = (uint64_t)(uintptr_t)data;
    fan_status status = fan_cuda_capture_of(s, &capture, &graph, err);
    if (status == FAN_OK && capture)
        status = fan_cuda_retain(p, *out, capture, graph, err);
    if (status != FAN_OK)
        fan_cuda_free(s->device, data, bytes);
    return status;
}

void fan_cuda_scratch_free(fan_stream *s, uint64_t address)
{
    fan_cuda_part *p = fan_cuda_part_of(s->device);
    fan_cuda_scope scope;
    fan_cuda_block found = {.address = 0};
    fan_cu_stream on;
    (void)pthread_mutex_lock(&p->lock);
    fan_cuda_block *b = holding(p, address);
    if (b && !b->graphs) {
        found = *b;
        strike(p, b);
    }
    (void)pthread_mutex_unlock(&p->lock);
    if (!found.address) { /* a graph's */
        fan_cuda_free(s->device, (void *)(uintptr_t)address, 0);
        return;
    }
    if (fan_cuda_enter(p, &scope, NULL) != FAN_OK)
        return;
    if (fan_cuda_queue_of(s, &on, NULL) == FAN_OK) {
        if (!found.pooled)
            (void)fan_cuda_pass(p, on, NULL);
        give(p, &found, on);
    }
    fan_cuda_leave(&scope);
}

/* graph_gone: on a thread of the driver's, which must not be called from here. */
static void graph_gone(void *ctx)
{
    atomic_size_t *graphs = ctx;
    if (atomic_fetch_sub_explicit(graphs, 1, memory_order_acq_rel) == 1)
        fan_free(graphs);
}

/* note_capture: the graph of `capture` has its hold on the memory at `address`. */
static void note_capture(fan_cuda_part *p, uint64_t address, uint64_t capture)
{
    (void)pthread_mutex_lock(&p->lock);
    fan_cuda_block *b = holding(p, address);
    if (b)
        b->capture = capture;
    (void)pthread_mutex_unlock(&p->lock);
}

fan_status fan_cuda_retain(fan_cuda_part *p, uint64_t address, uint64_t capture, fan_cu_graph graph, fan_error *err)
{
    const fan_cuda_api *api = fan_cuda_api_of(p);
    fan_cu_object object = NULL;
    atomic_size_t *graphs = NULL;
    fan_status status = FAN_OK;
    (void)pthread_mutex_lock(&p->lock);
    fan_cuda_block *b = holding(p, address);
    bool known = !b || b->capture == capture; /* not ours, or told already */
    if (!known && !b->graphs) {
        b->graphs = fan_alloc(sizeof *b->graphs);
        if (b->graphs)
            atomic_init(b->graphs, 1);
    }
    if (!known && (graphs = b->graphs))
        atomic_fetch_add_explicit(graphs, 1, memory_order_relaxed);
    (void)pthread_mutex_unlock(&p->lock);
    if (known)
        return FAN_OK;
    if (!graphs)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph's hold on memory of cuda:%d", p->index);
    if (!api->has[FAN_CUDA_GRAPHS]) {
        note_capture(p, address, capture);
        return FAN_OK; /* it is never given back */
    }
    FAN_GO(fan_cuda_check(p,
                          api->UserObjectCreate(&object, graphs, graph_gone, 1, FAN_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
                          "cuUserObjectCreate", err));
    status = fan_cuda_check(p, api->GraphRetainUserObject(graph, object, 1, FAN_CU_GRAPH_USER_OBJECT_MOVE),
                            "cuGraphRetainUserObject", err);
    if (status != FAN_OK) {
        (void)api->UserObjectRelease(object, 1); /* which counts down */
        return status;
    }
    note_capture(p, address, capture); /* only now: what could not be told is told again by the next job */
done:
    if (status != FAN_OK)
        graph_gone(graphs);
    return status;
}

void fan_cuda_blocks_fini(fan_cuda_part *p)
{
    for (size_t i = 0; i < p->nblocks; i++) {
        fan_cuda_block *b = &p->blocks[i];
        if (b->left && atomic_load_explicit(b->graphs, memory_order_acquire) == 1 && fan_cuda_usable(p))
            give(p, b, p->house); /* else a graph may still be replayed: what it uses is left to the process's end */
        if (b->graphs && atomic_fetch_sub_explicit(b->graphs, 1, memory_order_acq_rel) == 1)
            fan_free(b->graphs);
    }
    fan_free(p->blocks);
    p->blocks = NULL;
    p->nblocks = p->blocks_cap = p->nleft = 0;
}
