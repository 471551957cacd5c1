/* ask: expect, ready, stats: what a slot is told, and asked, beside its sum. */
#include "base/fault.h"
#include "buffer/enter.h"
#include "buffer/lock.h"
#include "buffer/pass.h"
#include "buffer/stats.h"

#include <inttypes.h>

static int64_t count_of(const fan_slot *s) { return s->p->count + fan_fast_list_count(s->fast); }

fan_status fan_buffer_expect(fan_buffer *b, size_t slot, int64_t n, fan_error *err)
{
    FAN_TRY(fan_slot_check(b, slot, err));
    if (n < 0)
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": expect takes a count >= 0, got %" PRId64,
                        FAN_SLOT_WHO(b, slot), n);
    fan_slot_lock(b, slot);
    fan_status status = FAN_OK;
    if (count_of(&b->slots[slot]) > n)
        status = fan_fail(err, FAN_ERR_VALUE,
                          FAN_SLOT_SAID ": expects %" PRId64 " contribution%s but has %" PRId64 " already (A16)",
                          FAN_SLOT_WHO(b, slot), n, FAN_PLURAL(n), count_of(&b->slots[slot]));
    else
        b->slots[slot].expected = n;
    fan_slot_unlock(b, slot);
    return status;
}

fan_status fan_buffer_ready(fan_buffer *b, size_t slot, bool *ready, fan_error *err)
{
    FAN_TRY(fan_slot_check(b, slot, err));
    fan_slot_lock(b, slot);
    const fan_slot *s = &b->slots[slot];
    fan_status status = fan_slot_poisoned(b, slot, err);
    if (status == FAN_OK && s->expected < 0)
        status = fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": ready() needs expect(%zu, n) first",
                          FAN_SLOT_WHO(b, slot), slot);
    *ready = status == FAN_OK && count_of(s) == s->expected && (s->p->arriving == 0 || FAN_FAULT(READY_TOO_SOON));
    fan_slot_unlock(b, slot);
    return status;
}

/* read: the figures, once the stream has run so far. Blocks, outside the frontend. */
static fan_status read(const fan_buffer *b, size_t slot, fan_sum_stats *k, fan_error *err)
{
    fan_device_stats words;
    uint64_t capture;
    FAN_TRY(fan_stream_capture(k->stream, &capture, err));
    if (capture)
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, 900,
            FAN_SLOT_SAID
            ": stats() waits for the stream that summed, which is captured now: ask before the capture begins, or "
            "once it has ended",
            FAN_SLOT_WHO(b, slot));
    fan_stream *on = fan_stream_hold(k->stream);
    if (FAN_FAULT(STATS_WRONG_STREAM)) {
        fan_stream_drop(on);
        on = fan_stream_current(k->stream->device);
    }
    void *left = b->frontend->allow_threads_begin ? b->frontend->allow_threads_begin() : NULL;
    fan_status status = fan_stats_out_read(on, k->device_words, &words, err);
    if (b->frontend->allow_threads_begin)
        b->frontend->allow_threads_end(left);
    fan_stream_drop(on);
    FAN_TRY(status);
    k->stats = (fan_stats){.count = words.count,
                           .sumsq = words.sumsq,
                           .absmax = words.absmax,
                           .nonfinite = words.nonfinite,
                           .bad = SIZE_MAX};
    k->has_nonfinite = words.bad != 0;
    k->nonfinite_key = words.key;
    return FAN_OK;
}

/* put_down: locked: what was read stays, if the slot's last sum is the same still. What stood there is the caller's to
 * drop, unlocked. */
static fan_sum_stats put_down(fan_buffer *b, size_t slot, const fan_sum_stats *k)
{
    fan_sum_stats had = {.valid = false};
    if (b->sum_stats[slot].device_words == k->device_words) {
        had = b->sum_stats[slot];
        b->sum_stats[slot] = *k;
        b->sum_stats[slot].device_words = NULL;
        b->sum_stats[slot].stream = NULL;
    }
    return had;
}

fan_status fan_buffer_stats(fan_buffer *b, size_t slot, bool *some, fan_stats *out, bool *bad, int64_t *bad_key,
                            fan_error *err)
{
    fan_status status = FAN_OK;
    FAN_TRY(fan_slot_check(b, slot, err));
    if (!b->sum_stats)
        return fan_fail(err, FAN_ERR_VALUE, "%s: stats() needs a buffer that was made with stats=True", b->name);
    fan_slot_lock(b, slot);
    fan_sum_stats k = fan_sum_stats_hold(&b->sum_stats[slot]);
    fan_slot_unlock(b, slot);
    if (!k.valid)
        return fan_fail(err, FAN_ERR_VALUE, FAN_SLOT_SAID ": no sum was taken since something was last added to it",
                        FAN_SLOT_WHO(b, slot));
    if (k.captured)
        return fan_fail_code(
            err, FAN_ERR_CAPTURE, 900,
            FAN_SLOT_SAID
            ": its sum was made while its stream was captured, and no figures are kept of what a graph does: "
            "take it outside the capture, or sum the graph's results with fanin.add_n(.., stats=True)",
            FAN_SLOT_WHO(b, slot));
    if (k.device_words) {
        status = read(b, slot, &k, err);
        if (status == FAN_OK) {
            fan_slot_lock(b, slot);
            fan_sum_stats had = put_down(b, slot, &k);
            fan_slot_unlock(b, slot);
            fan_sum_stats_drop(&had);
        }
    }
    *some = k.stats.count != UINT64_MAX;
    *out = k.stats;
    if (*some && k.multiplicity > 1) {
        out->count *= k.multiplicity;
        out->nonfinite *= k.multiplicity;
        out->sumsq *= (double)k.multiplicity;
    }
    *bad = k.has_nonfinite;
    *bad_key = k.nonfinite_key;
    fan_sum_stats_drop(&k);
    return status;
}
