/* The plans of a slot: rows by hand, and what must hold in every row. */
#include "buffer/plan.h"

#include "check.h"

static const fan_stream_id HERE = {1, 1}, THERE = {1, 2}, ELSEWHERE = {2, 3};

static fan_reuse_answer reuse_if(bool allowed)
{
    return allowed ? FAN_REUSE_YES : FAN_REUSE_HELD;
}

static fan_stream_id here_if(bool is_here)
{
    return is_here ? HERE : THERE;
}

static void adds(void)
{
    fan_add_facts f = {.defined = false};
    CHECK_INT(fan_plan_add(&f).rules, FAN_S(2));
    f.defined = true;
    CHECK_INT(fan_plan_add(&f).rules, FAN_S(3));
    f.changes = true;
    CHECK_INT(fan_plan_add(&f).convert, FAN_CONVERT_HOST);
    f.download = true;
    CHECK_INT(fan_plan_add(&f).convert, FAN_CONVERT_SOURCE);
    f = (fan_add_facts){
        .defined = true, .device = 1, .producer = THERE, .consumer = HERE, .current = HERE};
    fan_add_plan other = fan_plan_add(&f);
    CHECK(other.sync.stream_case == FAN_CASE_OTHER && other.record == FAN_RECORD_PRODUCER &&
          other.mark);
    CHECK_INT(other.producer_bit, FAN_PLAN_S9_RECORD);
    CHECK(fan_stream_id_same(other.ready, THERE));
    f.changes = true; /* on the producer's stream, before its event */
    fan_add_plan there = fan_plan_add(&f);
    CHECK_INT(there.convert, FAN_CONVERT_PRODUCER);
    CHECK(there.mark_source && there.mark);
    CHECK(!there.wait);
    CHECK_INT(there.record, FAN_RECORD_PRODUCER);
    f.producer = ELSEWHERE; /* on A, which waits; it is ready there, and used nowhere else */
    fan_add_plan here = fan_plan_add(&f);
    CHECK_INT(here.convert, FAN_CONVERT_ACCUM);
    CHECK(here.wait && here.mark_source);
    CHECK(!here.mark);
    CHECK_INT(here.record, FAN_RECORD_NOT); /* the consumer is on A */
    CHECK(fan_stream_id_same(here.ready, HERE));
    f.upload = true; /* the host has no stream to wait for */
    CHECK(!fan_plan_add(&f).wait && !fan_plan_add(&f).mark_source);
}

/* Every fold of dense, sparse and object terms, with every wish. */
static void folds(void)
{
    static const fan_form forms[] = {FAN_FORM_DENSE, FAN_FORM_SPARSE, FAN_FORM_OBJECT};
    int in_place = 0;
    int fresh = 0;
    for (unsigned bits = 0; bits < 1u << 11; bits++) {
        for (int k = 0; k < 9; k++) {
            fan_form first = forms[k % 3];
            fan_form other = forms[k / 3];
            fan_fold_facts f = {
                .terms = 2,
                .sparse = (first == FAN_FORM_SPARSE) + (size_t)(other == FAN_FORM_SPARSE),
                .objects = (first == FAN_FORM_OBJECT) + (size_t)(other == FAN_FORM_OBJECT),
                .first = {.form = first},
                .other = {.form = other, .format = bits >> 10 & 1},
                .other_is_second = bits & 1,
                .coalesced = bits & 2,
                .reuse_first = reuse_if(bits & 4),
                .reuse_other = reuse_if(bits & 8),
                .exact = bits & 16,
                .finish = bits & (32 | 64),
                .has_out = bits & 64,
                .stats = bits & 128,
                .expanded = bits >> 8 & 1,
                .seen = fan_dtype_set_add(0, FAN_DT_FLOAT16, false),
                .accumulate = FAN_DT_NONE,
                .finish_dtype = FAN_DT_NONE,
                .slot = {.consumer = HERE, .accum = bits & 512 ? HERE : (fan_stream_id){0, 0}}};
            fan_fold_plan p = fan_plan_fold(&f);
            bool writes = p.action == FAN_ACTION_INTO_OLD || p.action == FAN_ACTION_INTO_NEW;
            CHECK(p.exclusive == writes);
            bool needs_new = f.finish || f.has_out || f.exact;
            CHECK(!writes || !(needs_new || f.objects));
            CHECK(!(p.action == FAN_ACTION_INTO_OLD && f.reuse_first != FAN_REUSE_YES));
            CHECK(!(p.action == FAN_ACTION_INTO_NEW &&
                    (f.reuse_other != FAN_REUSE_YES || !f.coalesced)));
            CHECK((p.kind == FAN_FOLD_EXACT || p.kind == FAN_FOLD_EXACT_SPARSE) == f.exact);
            CHECK((p.kind == FAN_FOLD_OBJECTS) == (!f.exact && f.objects > 0));
            CHECK(!p.expanded || (p.rules & FAN_A(13)));
            if (p.batches) {
                CHECK_INT(p.kind, FAN_FOLD_DENSE);
                CHECK(!f.stats && fan_stream_id_set(f.slot.accum));
            }
            CHECK_INT(p.dtype, f.finish || f.exact ? FAN_DT_FLOAT16 : FAN_DT_FLOAT32);
            CHECK((p.after.rules & FAN_S(3)) == (fan_stream_id_set(f.slot.accum) ? 0 : FAN_S(3)));
            in_place += writes;
            fresh += p.action == FAN_ACTION_FRESH;
        }
    }
    CHECK(in_place > 100 && fresh > 100);
}

/* The fast path makes no plan: its door lets in what leaves but one question open, where the sum
 * lies. What it does without asking is what the plans say of all that its door lets in, and it
 * names their rules. */
static void the_fast_path_does_what_the_plans_say(void)
{
    static const fan_reuse_answer answers[] = {FAN_REUSE_YES, FAN_REUSE_HELD};
    for (int defined = 0; defined < 2; defined++) {
        for (int consumer = 0; consumer < 2; consumer++) { /* on no device, or on another one */
            fan_add_facts f = {.defined = defined,
                               .consumer = consumer ? HERE : (fan_stream_id){0, 0}};
            fan_add_plan p = fan_plan_add(&f);
            CHECK(p.convert == FAN_CONVERT_NOT && p.record == FAN_RECORD_NOT);
            CHECK(!p.wait && !p.mark && !p.mark_source);
            CHECK(!fan_stream_id_set(p.ready));
            CHECK(p.rules == fan_plan_plain_slot(defined, !defined));
        }
    }
    for (size_t terms = 2; terms < 5; terms++) {
        for (int first = 0; first < 2; first++) {
            /* the second is the buffer's alone, too: nobody looks */
            for (int other = 0; other < 2; other++) {
                for (int stats = 0; stats < 2; stats++) {
                    fan_fold_facts f = {.terms = terms,
                                        .first = {.form = FAN_FORM_DENSE},
                                        .other = {.form = FAN_FORM_DENSE},
                                        .other_is_second = true,
                                        .reuse_first = answers[first],
                                        .reuse_other = answers[other],
                                        .stats = stats,
                                        .accumulate = FAN_DT_NONE,
                                        .finish_dtype = FAN_DT_NONE,
                                        .seen = fan_dtype_set_add(0, FAN_DT_FLOAT32, false)};
                    fan_fold_plan p = fan_plan_fold(&f);
                    CHECK(p.kind == FAN_FOLD_DENSE && p.dtype == FAN_DT_FLOAT32);
                    CHECK(!p.expanded && !p.batches);
                    CHECK(p.action == (first ? FAN_ACTION_FRESH : FAN_ACTION_INTO_OLD));
                    CHECK(p.rules == fan_plan_plain_fold(!first));
                    CHECK(!p.after.wait_taker && !p.after.mark_out &&
                          !fan_stream_id_set(p.after.slot.accum));
                    fan_take_facts t = {
                        .terms = terms, .dense = terms, .same_dtype = true, .whole = true};
                    CHECK(fan_plan_take(&t).way == FAN_TAKE_COMMIT && !fan_plan_take(&t).rules);
                }
            }
        }
    }
    fan_take_facts one = {.terms = 1, .dense = 1, .same_dtype = true, .whole = true};
    CHECK(fan_plan_take(&one).way == FAN_TAKE_HAND); /* and so it is handed through (A14) */
    one.has_out = true;
    CHECK(fan_plan_take(&one).way == FAN_TAKE_INTO_OUT && !fan_plan_take(&one).copy_out);
}

static void takes(void)
{
    fan_take_facts f = {.has_out = false};
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_NOTHING);
    f.has_zero = true;
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_ZERO);
    f.has_out = true;
    CHECK(fan_plan_take(&f).way == FAN_TAKE_NOTHING && fan_plan_take(&f).copy_out);
    f = (fan_take_facts){.terms = 1, .dense = 1, .same_dtype = true, .whole = true};
    CHECK(fan_plan_take(&f).way == FAN_TAKE_HAND && fan_plan_take(&f).rules == FAN_A(14));
    f.summed = true; /* a sum is no single contribution */
    CHECK(fan_plan_take(&f).way == FAN_TAKE_HAND && !fan_plan_take(&f).rules);
    f.writable = true;
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_HAND);
    f.reuse = FAN_REUSE_HELD; /* the taker will write it */
    CHECK(fan_plan_take(&f).way == FAN_TAKE_FINISH && fan_plan_take(&f).counts &&
          !fan_plan_take(&f).rules);
    f = (fan_take_facts){.terms = 2, .dense = 2, .whole = true};
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_COMMIT);
    f.scaled = true;
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_FINISH);
    f.scaled = false;
    f.whole = false; /* the missing key may still come, should another slot fail */
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_FINISH);
    f.first_donated = true;
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_LATE);
    f.last = true;
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_COMMIT);
    f.has_out = true;
    CHECK_INT(fan_plan_take(&f).way, FAN_TAKE_INTO_OUT);
    f.out_overlaps_inputs = true; /* D11 */
    CHECK(fan_plan_take(&f).way == FAN_TAKE_FINISH && fan_plan_take(&f).copy_out);
}

static void targets(void)
{
    int direct = 0;
    for (int bits = 0; bits < 32; bits++) {
        fan_target_facts f = {.idle = bits & 1,
                              .reuse = reuse_if(bits & 2),
                              .complete = bits & 4,
                              .producer = HERE,
                              .accum = here_if(bits & 8),
                              .ready = here_if(bits & 16)};
        fan_target_plan p = fan_plan_target(&f);
        CHECK(p.direct == (bits == 31));
        direct += p.direct;
    }
    CHECK_INT(direct, 1);
}

int main(void)
{
    adds();
    folds();
    the_fast_path_does_what_the_plans_say();
    takes();
    targets();
    CHECK_INT(fan_plan_plain_slot(true, false), FAN_S(3));
    CHECK_INT(fan_plan_plain_slot(true, true), FAN_S(2) | FAN_S(3));
    CHECK_INT(fan_plan_plain_fold(true), FAN_A(6));
    CHECK_INT(fan_plan_plain_fold(false), FAN_A(7));
    return check_done();
}
