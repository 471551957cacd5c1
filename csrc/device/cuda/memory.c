/* Memory of the CUDA backend.
 *
 * A block is allocated from a pool of our own, in the order of the stream that uses it first.
 * Memory that must be usable anywhere at once comes from the same pool in the order of a stream of
 * our own, followed by a wait: nothing but frees runs there. A block is freed only after all its
 * users have passed, so it is freed on that stream, for which no other stream waits.
 *
 * Without pools, and under a capture, blocks come from cuMemAlloc. cuMemFree waits for the device,
 * and may break the capture of a stream that fanin has not met: so freed blocks are kept for reuse.
 * They go back to the driver when memory is short, by fan_cuda_trim and at the end, and never while
 * a stream known to fanin is captured.
 *
 * The block table, sorted by address, has an entry for each block: its origin, and the graphs that
 * use it. */
#include "device/cuda/part.h"

#include "base/fault.h"
#include "base/mem.h"
#include "base/search.h"

#include <stdio.h>
#include <string.h>

/* block_place: returns the index of the first block at or above `address`. The part's lock is
 * held. */
static size_t block_place(const fan_cuda_part *p, uint64_t address)
{
    if (address == 0)
        return 0;
    return fan_search_end(p->blocks, p->nblocks, sizeof *p->blocks,
                          offsetof(fan__cuda_block, address), address - 1);
}

static fan__cuda_block *block_holding(fan_cuda_part *p, uint64_t address)
{
    size_t i = block_place(p, address + 1);
    if (i == 0)
        return NULL;
    fan__cuda_block *b = &p->blocks[i - 1];
    if (b->kept)
        return NULL;
    if (address - b->address >= b->bytes)
        return NULL;
    return b;
}

/* block_reserve: makes room in the block table for one more block, before the driver is called. */
static fan_status block_reserve(fan_cuda_part *p, fan_error *err)
{
    fan__part_lock(p);
    int failed = fan_grow((void **)&p->blocks, &p->blocks_cap, p->nblocks + 16,
                          sizeof *p->blocks); /* for several threads that reserve */
    fan__part_unlock(p);
    if (failed) {
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the block table of cuda:%d",
                        p->index);
    }
    return FAN_OK;
}

static void block_remove(fan_cuda_part *p, const fan__cuda_block *b)
{
    size_t i = (size_t)(b - p->blocks);
    p->nleft -= b->left;
    p->nblocks--;
    memmove(p->blocks + i, p->blocks + i + 1, (p->nblocks - i) * sizeof *p->blocks);
}

/* block_is_over: returns whether the block has no holder and no graph uses it. */
static bool block_is_over(const fan__cuda_block *b)
{
    return b->left && (!b->graphs || atomic_load_explicit(b->graphs, memory_order_acquire) == 1);
}

/* block_graph_gone: drops a graph's count. Called on a thread of the driver, from which the driver
 * must not be called. */
static void block_graph_gone(void *ctx)
{
    atomic_size_t *graphs = ctx;
    if (atomic_fetch_sub_explicit(graphs, 1, memory_order_acq_rel) == 1)
        fan_free(graphs);
}

/* block_leave: marks it to be freed later. The part's lock is held. */
static void block_leave(fan_cuda_part *p, fan__cuda_block *b)
{
    p->nleft += !b->left;
    b->left = true;
}

/* block_give: frees a pooled block, in the order of `on`; the context is current. If the driver
 * fails, repeats the call once: else the memory would be lost. The next call that can reports a
 * failure. */
static void block_give(fan_cuda_part *p, const fan__cuda_block *b, fan_cu_stream on)
{
    int mode = fan__cuda_relax(p);
    fan_cu_result code = 1;
    for (int i = 0; i < 2 && code != 0 && fan__cuda_usable(p); i++) {
        code = fan__cuda_api_of(p)->MemFreeAsync(b->address, on);
        (void)fan__cuda_check(p, code, "cuMemFreeAsync", NULL);
    }
    fan__cuda_restore(p, mode);
}

/* block_out: removes an unused block from the table (true: *gone is to be freed), or keeps it, if
 * it is from cuMemAlloc. The part's lock is held. */
static bool block_out(fan_cuda_part *p, fan__cuda_block *b, fan__cuda_block *gone)
{
    *gone = *b;
    if (b->pooled) {
        block_remove(p, b);
        return true;
    }
    p->nleft -= b->left;
    *b = (fan__cuda_block){
        .address = b->address,
        .bytes = b->bytes,
        .kept = true,
    };
    return false;
}

/* block_reuse: returns a kept block of at least so many bytes, and at most twice as many. */
static bool block_reuse(fan_cuda_part *p, size_t bytes, fan__cuda_block *out)
{
    fan__cuda_block *best = NULL;
    fan__part_lock(p);
    for (size_t i = 0; i < p->nblocks; i++) {
        fan__cuda_block *b = &p->blocks[i];
        bool fits = b->bytes >= bytes && b->bytes / 2 <= bytes;
        if (!b->kept || !fits)
            continue;
        if (!best || b->bytes < best->bytes)
            best = b;
    }
    if (best) {
        *out = *best; /* out->kept: it is in the table */
        best->kept = false;
    }
    fan__part_unlock(p);
    return best != NULL;
}

/* block_give_kept: frees the kept blocks, unless a known stream is captured; returns their
 * bytes. */
static size_t block_give_kept(fan_cuda_part *p)
{
    size_t bytes = 0;
    bool more = true;
    if (!fan__cuda_none_captured(p))
        return 0;
    int mode = fan__cuda_relax(p);
    while (more) {
        fan__cuda_block gone = {.address = 0};
        fan__part_lock(p);
        for (size_t i = 0; i < p->nblocks && !gone.address; i++) {
            if (p->blocks[i].kept) {
                gone = p->blocks[i];
                block_remove(p, &p->blocks[i]);
            }
        }
        fan__part_unlock(p);
        if (!gone.address)
            break;
        fan_cu_result code = fan__cuda_api_of(p)->MemFree(gone.address);
        more = fan__cuda_check(p, code, "cuMemFree", NULL) == FAN_OK;
        if (more)
            bytes += gone.bytes;
    }
    fan__cuda_restore(p, mode);
    return bytes;
}

/* block_free_pending: frees the blocks that were dropped while a graph used them, and whose graphs
 * have ended. The context is current. */
static void block_free_pending(fan_cuda_part *p)
{
    for (;;) {
        fan__cuda_block gone = {.address = 0};
        fan__part_lock(p);
        for (size_t i = 0; p->nleft && i < p->nblocks && !gone.address; i++) {
            fan__cuda_block *b = &p->blocks[i];
            /* 1: the block table's own count */
            if (block_is_over(b))
                (void)block_out(p, b, &gone);
        }
        fan__part_unlock(p);
        if (!gone.address)
            return;
        fan_free(gone.graphs);
        if (gone.pooled)
            block_give(p, &gone, p->free_stream);
    }
}

/* block_try: tries once. on NULL: on our own stream, followed by a wait. */
static fan_cu_result block_try(fan_cuda_part *p, fan_cu_stream on, bool pooled, size_t bytes,
                               uint64_t *out)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    int mode = fan__cuda_relax(p);
    fan_cu_result code;
    if (!pooled) {
        code = api->MemAlloc(out, bytes);
    } else if (on) {
        code = api->MemAllocFromPoolAsync(out, bytes, p->pool, on);
    } else {
        code = api->MemAllocFromPoolAsync(out, bytes, p->pool, p->free_stream);
        bool made = code == 0;
        if (made)
            code = api->StreamSynchronize(p->free_stream);
        if (made && code)
            (void)api->MemFreeAsync(*out, p->free_stream);
    }
    fan__cuda_restore(p, mode);
    return code;
}

/* block_trim: frees unused kept memory; returns how many bytes. */
static size_t block_trim(fan_cuda_part *p)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    size_t bytes = block_give_kept(p);
    uint64_t had = 0;
    uint64_t has = 0;
    if (!p->pools)
        return bytes;
    int mode = fan__cuda_relax(p);
    /* all that was freed there is unused from then on */
    (void)api->StreamSynchronize(p->free_stream);
    (void)api->MemPoolGetAttribute(p->pool, FAN_CU_POOL_RESERVED, &had);
    (void)fan__cuda_check(p, api->MemPoolTrimTo(p->pool, 0), "cuMemPoolTrimTo", NULL);
    (void)api->MemPoolGetAttribute(p->pool, FAN_CU_POOL_RESERVED, &has);
    fan__cuda_restore(p, mode);
    if (had > has)
        bytes += (size_t)(had - has);
    return bytes;
}

/* block_take: allocates a block; the context is current. If memory is short, frees kept memory and
 * tries again. */
static fan_status block_take(fan_cuda_part *p, fan_stream *stream, size_t bytes, fan__cuda_block *b,
                             fan_error *err)
{
    char call[64];
    uint64_t capture = 0;
    fan_cu_stream on = NULL;
    if (stream) {
        FAN_TRY(fan__cuda_queue_of(stream, &on, err));
        FAN_TRY(fan__cuda_capture_of(stream, &capture, NULL, err));
    }
    bool pooled = p->pools && !capture;
    if (!pooled && block_reuse(p, bytes, b))
        return FAN_OK;
    *b = (fan__cuda_block){
        .bytes = bytes,
        .pooled = pooled,
    };
    fan_cu_result code = block_try(p, on, pooled, bytes, &b->address);
    if (code == FAN_CU_OUT_OF_MEMORY) {
        block_free_pending(p);
        if (!capture) /* a capture must not wait */
            (void)block_trim(p);
        code = block_try(p, on, pooled, bytes, &b->address);
    }
    const char *function = pooled ? "cuMemAllocFromPoolAsync" : "cuMemAlloc";
    snprintf(call, sizeof call, "%s(%zu bytes)", function, bytes);
    return fan__cuda_check(p, code, call, err);
}

fan_status fan__cuda_alloc(fan_device *d, fan_stream *stream, size_t bytes, void **out,
                           fan_error *err)
{
    fan_cuda_part *p = fan__cuda_part_of(d);
    fan__cuda_scope scope;
    fan__cuda_block b = {.address = 0};
    FAN_TRY(block_reserve(p, err));
    FAN_TRY(fan__cuda_enter(p, &scope, err));
    block_free_pending(p);
    fan_status status = block_take(p, stream, bytes, &b, err);
    bool listed = true;
    if (status == FAN_OK && !b.kept) {
        fan__part_lock(p);
        listed =
            fan_grow((void **)&p->blocks, &p->blocks_cap, p->nblocks + 1, sizeof *p->blocks) == 0;
        if (listed) {
            size_t i = block_place(p, b.address);
            memmove(p->blocks + i + 1, p->blocks + i, (p->nblocks - i) * sizeof *p->blocks);
            p->blocks[i] = (fan__cuda_block){
                .address = b.address,
                .bytes = b.bytes,
                .pooled = b.pooled,
            };
            p->nblocks++;
        }
        fan__part_unlock(p);
    }
    if (!listed) {
        if (b.pooled) /* else it stays: there is no room to list it */
            block_give(p, &b, p->free_stream);
        status =
            fan_fail(err, FAN_ERR_NOMEM, "out of memory for the block table of cuda:%d", p->index);
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
    bool in = usable && fan__cuda_enter(p, &scope, NULL) == FAN_OK;
    bool give = false;
    fan__part_lock(p);
    fan__cuda_block *b = block_holding(p, (uint64_t)(uintptr_t)data);
    bool stays = usable && !in;
    bool captured = b && b->graphs;
    if (captured && usable && !FAN_FAULT(CUDA_CAPTURED_FREE))
        stays |= atomic_load_explicit(b->graphs, memory_order_acquire) > 1;
    if (b && stays)
        block_leave(p, b);
    else if (b)
        give = block_out(p, b, &gone);
    fan__part_unlock(p);
    if (gone.graphs)
        block_graph_gone(gone.graphs); /* the last graph frees it */
    if (!in)
        return;
    if (give)
        block_give(p, &gone, p->free_stream);
    if (gone.address)
        block_free_pending(p);
    fan__cuda_leave(&scope);
}

size_t fan__cuda_trim(fan_cuda_part *p)
{
    fan__cuda_scope scope;
    if (!fan__cuda_usable(p))
        return 0;
    if (fan__cuda_enter(p, &scope, NULL) != FAN_OK)
        return 0;
    block_free_pending(p);
    size_t bytes = block_trim(p);
    fan__cuda_leave(&scope);
    return bytes;
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

/* scratch_enter: returns false if the driver fails. Repeats the call once: else the memory would be
 * lost. */
static bool scratch_enter(fan_stream *s, fan__cuda_scope *scope, fan_cu_stream *on)
{
    for (int i = 0; i < 2; i++) {
        if (fan__cuda_enter(fan__cuda_part_of(s->device), scope, NULL) != FAN_OK)
            continue;
        if (fan__cuda_queue_of(s, on, NULL) == FAN_OK)
            return true;
        fan__cuda_leave(scope);
    }
    return false;
}

void fan__cuda_scratch_free(fan_stream *s, uint64_t address)
{
    fan_cuda_part *p = fan__cuda_part_of(s->device);
    fan__cuda_scope scope;
    fan__cuda_block found = {.address = 0};
    fan_cu_stream on = NULL;
    if (!scratch_enter(s, &scope, &on))
        return;
    fan__part_lock(p);
    const fan__cuda_block *plain = block_holding(p, address);
    bool pass = plain && !plain->pooled && !plain->graphs;
    fan__part_unlock(p);
    if (pass)
        (void)fan__cuda_pass(p, on, NULL);
    fan__part_lock(p);
    fan__cuda_block *b = block_holding(p, address);
    bool of_graph = b && b->graphs;
    bool give = b && !of_graph && block_out(p, b, &found);
    fan__part_unlock(p);
    if (of_graph)
        fan__cuda_free(s->device, (void *)(uintptr_t)address, 0);
    if (give)
        block_give(p, &found, on);
    fan__cuda_leave(&scope);
}

/* block_note_capture: notes that the graph of `capture` holds the memory at `address`. */
static void block_note_capture(fan_cuda_part *p, uint64_t address, uint64_t capture)
{
    fan__part_lock(p);
    fan__cuda_block *b = block_holding(p, address);
    if (b)
        b->capture = capture;
    fan__part_unlock(p);
}

fan_status fan__cuda_retain(fan_cuda_part *p, uint64_t address, uint64_t capture,
                            fan_cu_graph graph, fan_error *err)
{
    const fan_cuda_api *api = fan__cuda_api_of(p);
    fan_cu_object object = NULL;
    atomic_size_t *graphs = NULL;
    fan_status status = FAN_OK;
    fan__part_lock(p);
    fan__cuda_block *b = block_holding(p, address);
    /* foreign memory, or held by the capture already */
    bool recorded = !b || b->capture == capture;
    if (!recorded && !b->graphs) {
        b->graphs = fan_alloc(sizeof *b->graphs);
        if (b->graphs)
            atomic_init(b->graphs, 1);
    }
    if (!recorded)
        graphs = b->graphs;
    if (graphs)
        atomic_fetch_add_explicit(graphs, 1, memory_order_relaxed);
    fan__part_unlock(p);
    if (recorded)
        return FAN_OK;
    if (!graphs) {
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph's hold on memory of cuda:%d",
                        p->index);
    }
    if (!api->has[FAN_CUDA_GRAPHS]) {
        block_note_capture(p, address, capture);
        return FAN_OK; /* it is never freed */
    }
    FAN_GO(fan__cuda_check(p,
                           api->UserObjectCreate(&object, graphs, block_graph_gone, 1,
                                                 FAN_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
                           "cuUserObjectCreate", err));
    status = fan__cuda_check(
        p, api->GraphRetainUserObject(graph, object, 1, FAN_CU_GRAPH_USER_OBJECT_MOVE),
        "cuGraphRetainUserObject", err);
    if (status != FAN_OK) {
        (void)api->UserObjectRelease(object, 1); /* which drops the count */
        return status;
    }
    /* only now: after a failure, the next job tries again */
    block_note_capture(p, address, capture);
done:
    if (status != FAN_OK)
        block_graph_gone(graphs);
    return status;
}

void fan__cuda_blocks_fini(fan_cuda_part *p)
{
    for (size_t i = 0; i < p->nblocks; i++) {
        fan__cuda_block *b = &p->blocks[i];
        bool unused = b->kept || block_is_over(b);
        if (unused && b->pooled && fan__cuda_usable(p))
            block_give(p, b, p->free_stream);
        else if (unused && fan__cuda_usable(p))
            (void)fan__cuda_api_of(p)->MemFree(b->address);
        /* else a graph may still be launched: its memory stays until the process ends */
        if (b->graphs)
            block_graph_gone(b->graphs);
    }
    fan_free(p->blocks);
    p->blocks = NULL;
    p->nblocks = 0;
    p->blocks_cap = 0;
    p->nleft = 0;
}
