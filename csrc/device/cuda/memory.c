/* Memory of the CUDA backend.
 *
 * A block comes from the default pool of the device, in the order of the stream that uses it first. Exception: without
 * pools, without such a stream, or under a capture it comes from cuMemAlloc, and can be used anywhere at once. A block
 * is freed only when all its users have passed, so a pooled block goes back on a stream of our own, for which nobody
 * else waits. The block table, sorted by address, has an entry for each block: where it came from, and which graphs use
 * it. */
#include "device/cuda/memory.h"

#include "base/fault.h"
#include "base/mem.h"
#include "device/cuda/context.h"
#include "device/cuda/stream.h"

#include <stdio.h>
#include <string.h>

/* block_place: the first block that does not lie before `address`. The part's lock is held. */
static size_t block_place(const fan_cuda_part *p, uint64_t address)
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

static fan__cuda_block *block_holding(fan_cuda_part *p, uint64_t address)
{
    size_t i = block_place(p, address + 1);
    return i > 0 && address - p->blocks[i - 1].address < p->blocks[i - 1].bytes ? &p->blocks[i - 1] : NULL;
}

/* block_reserve: makes room in the block table for one block more, before the driver is asked. */
static fan_status block_reserve(fan_cuda_part *p, fan_error *err)
{
    (void)pthread_mutex_lock(&p->lock);
    int failed = fan_grow((void **)&p->blocks, &p->blocks_cap, p->nblocks + 16,
                          sizeof *p->blocks); /* several threads may have reserved */
    (void)pthread_mutex_unlock(&p->lock);
    return failed ? fan_fail(err, FAN_ERR_NOMEM, "out of memory for the books of cuda:%d", p->index) : FAN_OK;
}

static int block_add(fan_cuda_part *p, uint64_t address, size_t bytes, bool pooled)
{
    (void)pthread_mutex_lock(&p->lock);
    int failed = fan_grow((void **)&p->blocks, &p->blocks_cap, p->nblocks + 1, sizeof *p->blocks);
    if (!failed) {
        size_t i = block_place(p, address);
        memmove(p->blocks + i + 1, p->blocks + i, (p->nblocks - i) * sizeof *p->blocks);
        p->blocks[i] = (fan__cuda_block){.address = address, .bytes = bytes, .pooled = pooled};
        p->nblocks++;
    }
    (void)pthread_mutex_unlock(&p->lock);
    return failed;
}

static void block_remove(fan_cuda_part *p, const fan__cuda_block *b)
{
    size_t i = (size_t)(b - p->blocks);
    p->nleft -= b->left;
    p->nblocks--;
    memmove(p->blocks + i, p->blocks + i + 1, (p->nblocks - i) * sizeof *p->blocks);
}

/* block_give: gives a block back to the driver, in the order of `on` if the pool takes it; the context is current. A
 * failure is reported by the next call that can report one. */
static void block_give(fan_cuda_part *p, const fan__cuda_block *b, fan_cu_stream on)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    int mode = fan__cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = b->pooled ? api->MemFreeAsync(b->address, on) : api->MemFree(b->address);
    (void)fan__cuda_relax(p, mode);
    (void)fan__cuda_check(p, code, b->pooled ? "cuMemFreeAsync" : "cuMemFree", NULL);
}

/* block_free_pending: frees the blocks whose last hold went while a graph used them, and whose graphs are gone by now.
 * The context is current. */
static void block_free_pending(fan_cuda_part *p)
{
    for (;;) {
        fan__cuda_block gone = {.address = 0};
        (void)pthread_mutex_lock(&p->lock);
        for (size_t i = 0; p->nleft && i < p->nblocks && !gone.address; i++) {
            const fan__cuda_block *b = &p->blocks[i];
            /* the count of the block table itself */
            if (b->left && atomic_load_explicit(b->graphs, memory_order_acquire) == 1) {
                gone = *b;
                block_remove(p, b);
            }
        }
        (void)pthread_mutex_unlock(&p->lock);
        if (!gone.address)
            return;
        fan_free(gone.graphs);
        block_give(p, &gone, p->free_stream);
    }
}

/* block_ask: one try. */
static fan_cu_result block_ask(fan_cuda_part *p, fan_cu_stream on, bool pooled, size_t bytes, uint64_t *out)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    if (pooled)
        return api->MemAllocAsync(out, bytes, on);
    int mode = fan__cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
    fan_cu_result code = api->MemAlloc(out, bytes);
    (void)fan__cuda_relax(p, mode);
    return code;
}

/* block_take: gets a block; the context is current. If memory is short, the pool gives back what it keeps, and it is
 * tried once more. */
static fan_status block_take(fan_cuda_part *p, fan_stream *stream, size_t bytes, fan__cuda_block *b, fan_error *err)
{
    char call[64];
    uint64_t capture = 0;
    fan_cu_stream on = NULL;
    if (stream) {
        FAN_TRY(fan__cuda_queue_of(stream, &on, err));
        FAN_TRY(fan__cuda_capture_of(stream, &capture, NULL, err));
    }
    *b = (fan__cuda_block){.bytes = bytes, .pooled = p->pools && stream && !capture};
    fan_cu_result code = block_ask(p, on, b->pooled, bytes, &b->address);
    if (code == FAN_CU_OUT_OF_MEMORY) {
        block_free_pending(p);
        if (p->pools) {
            int mode = fan__cuda_relax(p, FAN_CU_CAPTURE_MODE_RELAXED);
            (void)fan__cuda_api_of(p)->MemPoolTrimTo(p->pool, 0);
            (void)fan__cuda_relax(p, mode);
        }
        code = block_ask(p, on, b->pooled, bytes, &b->address);
    }
    snprintf(call, sizeof call, "%s(%zu bytes)", b->pooled ? "cuMemAllocAsync" : "cuMemAlloc", bytes);
    return fan__cuda_check(p, code, call, err);
}

fan_status fan__cuda_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    fan__cuda_scope scope;
    fan__cuda_block b;
    FAN_TRY(block_reserve(p, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    block_free_pending(p);
    fan_status status = block_take(p, stream, bytes, &b, err);
    if (status == FAN_OK && block_add(p, b.address, bytes, b.pooled)) {
        block_give(p, &b, p->free_stream);
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for the books of cuda:%d", p->index);
    }
    fan__cuda_leave(&scope);
    if (status == FAN_OK)
        *out = (void *)(uintptr_t)b.address;
    return status;
}

void fan__cuda_free(fan_device *d, void *data, size_t bytes)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    fan__cuda_scope scope;
    fan__cuda_block gone = {.address = 0};
    (void)bytes;
    bool usable = fan__cuda_usable(p);
    (void)pthread_mutex_lock(&p->lock);
    fan__cuda_block *b = block_holding(p, (uint64_t)(uintptr_t)data);
    if (b && b->graphs && usable && atomic_load_explicit(b->graphs, memory_order_acquire) > 1 &&
        !FAN_FAULT(CUDA_CAPTURED_FREE)) {
        b->left = true;
        p->nleft++;
    } else if (b) {
        gone = *b;
        block_remove(p, b);
    }
    (void)pthread_mutex_unlock(&p->lock);
    if (!gone.address)
        return;
    if (gone.graphs && atomic_fetch_sub_explicit(gone.graphs, 1, memory_order_acq_rel) == 1)
        fan_free(gone.graphs); /* else the last graph frees it */
    if (!usable || fan__cuda_enter(p, &scope, NULL) != FAN_OK)
        return;
    block_give(p, &gone, p->free_stream);
    block_free_pending(p);
    fan__cuda_leave(&scope);
}

fan_status fan__cuda_scratch(fan_stream *s, size_t bytes, uint64_t *out, fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    uint64_t capture;
    fan_cu_graph graph = NULL;
    void *data;
    FAN_TRY(fan__cuda_alloc(s->device, s, bytes, &data, err));
    *out = (uint64_t)(uintptr_t)data;
    fan_status status = fan__cuda_capture_of(s, &capture, &graph, err);
    if (status == FAN_OK && capture)
        status = fan__cuda_retain(p, *out, capture, graph, err);
    if (status != FAN_OK)
        fan__cuda_free(s->device, data, bytes);
    return status;
}

void fan__cuda_scratch_free(fan_stream *s, uint64_t address)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__cuda_scope scope;
    fan__cuda_block found = {.address = 0};
    fan_cu_stream on;
    (void)pthread_mutex_lock(&p->lock);
    fan__cuda_block *b = block_holding(p, address);
    if (b && !b->graphs) {
        found = *b;
        block_remove(p, b);
    }
    (void)pthread_mutex_unlock(&p->lock);
    if (!found.address) { /* it was made by a graph */
        fan__cuda_free(s->device, (void *)(uintptr_t)address, 0);
        return;
    }
    if (fan__cuda_enter(p, &scope, NULL) != FAN_OK)
        return;
    if (fan__cuda_queue_of(s, &on, NULL) == FAN_OK) {
        if (!found.pooled)
            (void)fan__cuda_pass(p, on, NULL);
        block_give(p, &found, on);
    }
    fan__cuda_leave(&scope);
}

/* block_graph_gone: a graph is gone. Called on a thread of the driver, from which the driver must not be called. */
static void block_graph_gone(void *ctx)
{
    atomic_size_t *graphs = ctx;
    if (atomic_fetch_sub_explicit(graphs, 1, memory_order_acq_rel) == 1)
        fan_free(graphs);
}

/* block_note_capture: the graph of `capture` has its hold on the memory at `address`. */
static void block_note_capture(fan_cuda_part *p, uint64_t address, uint64_t capture)
{
    (void)pthread_mutex_lock(&p->lock);
    fan__cuda_block *b = block_holding(p, address);
    if (b)
        b->capture = capture;
    (void)pthread_mutex_unlock(&p->lock);
}

fan_status fan__cuda_retain(fan_cuda_part *p, uint64_t address, uint64_t capture, fan_cu_graph graph, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan_cu_object object = NULL;
    atomic_size_t *graphs = NULL;
    fan_status status = FAN_OK;
    (void)pthread_mutex_lock(&p->lock);
    fan__cuda_block *b = block_holding(p, address);
    bool recorded = !b || b->capture == capture; /* not ours, or the capture has it already */
    if (!recorded && !b->graphs) {
        b->graphs = fan_alloc(sizeof *b->graphs);
        if (b->graphs)
            atomic_init(b->graphs, 1);
    }
    if (!recorded && (graphs = b->graphs))
        atomic_fetch_add_explicit(graphs, 1, memory_order_relaxed);
    (void)pthread_mutex_unlock(&p->lock);
    if (recorded)
        return FAN_OK;
    if (!graphs)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph's hold on memory of cuda:%d", p->index);
    if (!api->has[FAN_CUDA_GRAPHS]) {
        block_note_capture(p, address, capture);
        return FAN_OK; /* it is never given back */
    }
    FAN_GO(fan__cuda_check(
        p, api->UserObjectCreate(&object, graphs, block_graph_gone, 1, FAN_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
        "cuUserObjectCreate", err));
    status = fan__cuda_check(p, api->GraphRetainUserObject(graph, object, 1, FAN_CU_GRAPH_USER_OBJECT_MOVE),
                             "cuGraphRetainUserObject", err);
    if (status != FAN_OK) {
        (void)api->UserObjectRelease(object, 1); /* which counts down */
        return status;
    }
    block_note_capture(p, address, capture); /* only now: if this failed, the next job tries again */
done:
    if (status != FAN_OK)
        block_graph_gone(graphs);
    return status;
}

void fan__cuda_blocks_fini(fan_cuda_part *p)
{
    for (size_t i = 0; i < p->nblocks; i++) {
        fan__cuda_block *b = &p->blocks[i];
        if (b->left && atomic_load_explicit(b->graphs, memory_order_acquire) == 1 && fan__cuda_usable(p))
            block_give(
                p, b,
                p->free_stream); /* else a graph may still be launched: what it uses stays until the process ends */
        if (b->graphs && atomic_fetch_sub_explicit(b->graphs, 1, memory_order_acq_rel) == 1)
            fan_free(b->graphs);
    }
    fan_free(p->blocks);
    p->blocks = NULL;
    p->nblocks = p->blocks_cap = p->nleft = 0;
}
