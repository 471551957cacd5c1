/* Arrays: storage, geometry that is accepted or refused, views, broadcasts, copies and fills
 * against the oracle, and what fails without memory. */
#include "array/array.h"

#include "array/nditer.h"
#include "array/extents.h"
#include "array/sum.h"
#include "base/mem.h"
#include "check.h"
#include "oracle.h"

static int released;

static void on_release(fan_storage *s)
{
    released++;
    CHECK_INT(*(int *)s->ctx, 42);
}

static void a_storage_is_released_once_by_the_last_drop(void)
{
    char memory[16];
    int ctx = 42;
    fan_storage *s = fan_storage_wrap(memory, sizeof memory, on_release, &ctx);
    CHECK(fan_storage_hold(s) == s);
    fan_array *a;
    int64_t shape = 4;
    int64_t stride = 4;
    CHECK_OK(fan_array_view(s, memory, FAN_DT_FLOAT32, 1, &shape, &stride, false, &a, NULL));
    CHECK(!a->writable);
    fan_storage_drop(s);
    fan_storage_drop(s);
    CHECK_INT(released, 0);
    CHECK(fan_array_hold(a) == a);
    fan_array_drop(a);
    CHECK_INT(released, 0);
    fan_array_drop(a);
    CHECK_INT(released, 1);
    fan_storage_drop(NULL);
    fan_array_drop(NULL);
}

static void fresh_arrays_follow_the_order_of_another(void)
{
    const int64_t shape[] = {2, 3, 4, 5, 6}; /* more axes than fit inline */
    fan_array *a = array_shaped(FAN_DT_INT16, 5, shape);
    const int64_t want[] = {720, 240, 60, 12, 2};
    for (int i = 0; i < 5; i++) {
        CHECK_INT(a->shape[i], shape[i]);
        CHECK_INT(a->strides[i], want[i]);
    }
    CHECK_INT(a->size, 720);
    CHECK((uintptr_t)a->data % 64 == 0);
    CHECK(fan_array_dense(a));

    /* |strides| 8, 40, 8 (tie), -100: axis 3, 1, then 0 and 2 in C order */
    const int64_t like_shape[] = {2, 3, 4, 5};
    const int64_t like_strides[] = {8, 40, 8, -100};
    int64_t strides[4];
    fan_storage *s = fan_storage_wrap(NULL, 0, NULL, NULL);
    static char far[2000];
    fan_array *b = view_of(s, far + 1000, FAN_DT_INT8, 4, like_shape, like_strides);
    fan_dense_strides(4, like_shape, 2, b, strides);
    const int64_t follow[] = {8, 16, 2, 48};
    for (int i = 0; i < 4; i++)
        CHECK_INT(strides[i], follow[i]);
    fan_array_drop(a);
    CHECK_OK(fan_array_new(FAN_DT_INT16, 4, like_shape, b, &a, NULL));
    CHECK_INT(a->strides[3], 48);
    CHECK(fan_array_dense(a));
    fan_array_drop(a);
    fan_dense_strides(3, shape, 1, b, strides); /* another rank: C order */
    CHECK_INT(strides[0], 12);
    fan_array_drop(b);

    a = array_shaped(FAN_DT_FLOAT64, 0, NULL);
    CHECK(a->size == 1 && a->ndim == 0);
    CHECK(a->data && fan_array_dense(a));
    fan_array_drop(a);
    const int64_t empty[] = {3, 0, 2};
    a = array_shaped(FAN_DT_FLOAT64, 3, empty);
    CHECK(a->size == 0 && a->data == NULL);
    CHECK(fan_array_dense(a));
    fan_array_drop(a);
    fan_storage_drop(s);
}

/* Rows 11 to 22 of hostile geometry, of int64 in 64 bytes: each is refused, or accepted and never
 * read. */
static const struct {
    int ndim;
    int64_t shape[3], strides[3];
    fan_status want;
} geometries[] = {
    {1, {4}, {8}, FAN_OK},
    {1, {8}, {8}, FAN_OK},
    {1, {9}, {8}, FAN_ERR_VALUE},  /* past the end */
    {1, {2}, {-8}, FAN_ERR_VALUE}, /* before the start */
    {1, {2}, {57}, FAN_ERR_VALUE}, /* last element sticks out by one byte */
    {1, {2}, {56}, FAN_OK},
    {1, {-1}, {8}, FAN_ERR_VALUE},
    {2, {1 << 16, -5}, {8, 8}, FAN_ERR_VALUE},
    /* product wraps to 0 */
    {3, {(int64_t)1 << 32, (int64_t)1 << 32, 16}, {0, 0, 0}, FAN_ERR_VALUE},
    {2, {INT64_MAX, 2}, {0, 0}, FAN_ERR_VALUE},
    /* empty, but its strides cannot be counted */
    {2, {(int64_t)1 << 60, 0}, {1, 1}, FAN_ERR_VALUE},
    {2, {3, 0}, {INT64_MAX, INT64_MIN}, FAN_OK}, /* empty: strides never used */
    {2, {1, 1}, {INT64_MAX, INT64_MIN}, FAN_OK}, /* extent 1: stride never used */
    {1, {3}, {INT64_MAX / 2}, FAN_ERR_VALUE},
    {1, {3}, {INT64_MIN / 2}, FAN_ERR_VALUE},
    {1, {2}, {INT64_MIN}, FAN_ERR_VALUE},
    {2, {2, 2}, {INT64_MAX / 2, INT64_MAX / 2}, FAN_ERR_VALUE}, /* the sum wraps */
    {2, {1000, 1000}, {0, 0}, FAN_OK},
    {0, {0}, {0}, FAN_OK},
};

static void bad_geometry_is_refused(void)
{
    static char memory[64];
    fan_error err;
    fan_array *a = NULL;
    fan_storage *s = fan_storage_wrap(memory, sizeof memory, NULL, NULL);
    int64_t ones[FAN_MAX_NDIM + 1];
    for (int i = 0; i <= FAN_MAX_NDIM; i++)
        ones[i] = 1;
    int64_t size = -1;
    for (size_t i = 0; i < sizeof geometries / sizeof geometries[0]; i++) {
        fan_status got = fan_array_view(s, memory, FAN_DT_INT64, geometries[i].ndim,
                                        geometries[i].shape, geometries[i].strides, true, &a, &err);
        CHECK_INT(got, geometries[i].want);
        CHECK((a != NULL) == (got == FAN_OK));
        if (a) {
            int64_t lo, hi;
            fan_array_reach(a, &lo, &hi);
            CHECK(lo >= 0 && hi <= 64);
            if (a->size == 0) {
                CHECK(a->data == NULL);
                CHECK(lo == 0 && hi == 0);
            }
        } else {
            CHECK(strlen(err.text) > 10);
        }
        fan_array_drop(a);
    }
    CHECK_INT(fan_shape_check(-1, ones, 1, &size, &err), FAN_ERR_VALUE);
    CHECK_INT(fan_shape_check(FAN_MAX_NDIM + 1, ones, 1, &size, &err), FAN_ERR_VALUE);
    CHECK_OK(fan_shape_check(FAN_MAX_NDIM, ones, 1, &size, &err));
    CHECK_INT(size, 1);
    CHECK_INT(fan_array_view(s, NULL, FAN_DT_INT8, 0, NULL, NULL, true, &a, &err), FAN_ERR_VALUE);
    CHECK_HAS(err.text, "NULL");
    CHECK_INT(fan_array_view(s, memory, FAN_DT_NONE, 0, NULL, NULL, true, &a, &err), FAN_ERR_TYPE);
    CHECK_INT(fan_array_new(FAN_DT_NONE, 0, NULL, NULL, &a, &err), FAN_ERR_TYPE);
    fan_storage_drop(s);
}

static void memory_of_unknown_extent_is_bound_by_the_address_space(void)
{
    static char memory[64];
    fan_error err;
    fan_array *a = NULL;
    fan_storage *unknown = fan_storage_wrap(memory, 0, NULL, NULL);
    int64_t two = 2;
    int64_t far = INT64_MIN / 4;
    CHECK_INT(fan_array_view(unknown, memory, FAN_DT_INT8, 1, &two, &far, true, &a, &err),
              FAN_ERR_VALUE);
    CHECK_HAS(err.text, "address space");
    int64_t near = -100;
    CHECK_OK(fan_array_view(unknown, memory, FAN_DT_INT8, 1, &two, &near, true, &a, &err));
    fan_array_drop(a);
    fan_storage_drop(unknown);
}

/* touch: marks the bytes of every element; returns how many there are, or -1 where elements share
 * some. */
static int64_t touch(const fan_array *a, const char *memory, uint8_t *touched, int64_t *lo,
                     int64_t *hi)
{
    int64_t bytes = 0;
    bool twice = false;
    for (int64_t i = 0; i < a->size; i++) {
        for (int64_t at = element(a, i) - memory, end = at + 2; at < end; at++) {
            *lo = smaller(*lo, at);
            *hi = larger(*hi, at + 1);
            twice |= touched[at];
            bytes += !touched[at];
            touched[at] = 1;
        }
    }
    return twice ? -1 : bytes;
}

/* All shapes and strides of small width: the reach is what looking at every element gives; so are
 * dense, apart and expanded. */
static void geometry_equals_looking_at_every_element(void)
{
    enum {
        MIDDLE = 200
    };
    static char memory[2 * MIDDLE];
    fan_storage *s = fan_storage_wrap(memory, sizeof memory, NULL, NULL);
    int dense[2] = {0};
    int apart[2] = {0};
    for (int64_t code = 0; code < 4 * 4 * 13 * 13; code++) {
        int64_t shape[] = {code % 4, code / 4 % 4};
        int64_t strides[] = {code / 16 % 13 - 6, code / 208 - 6};
        fan_array *a = view_of(s, memory + MIDDLE, FAN_DT_INT16, 2, shape, strides);
        uint8_t touched[2 * MIDDLE] = {0};
        int64_t got_lo, got_hi;
        int64_t lo = INT64_MAX;
        int64_t hi = INT64_MIN;
        int64_t bytes = touch(a, memory, touched, &lo, &hi);
        bool is_empty = a->size == 0;
        fan_array_reach(a, &got_lo, &got_hi);
        CHECK_INT(got_lo, is_empty ? 0 : lo - MIDDLE);
        CHECK_INT(got_hi, is_empty ? 0 : hi - MIDDLE);
        bool positive = true;
        uint64_t axes = 0;
        for (int i = 0; i < 2; i++) {
            if (is_empty || shape[i] == 1)
                continue;
            positive &= strides[i] > 0;
            if (strides[i] == 0)
                axes |= (uint64_t)1 << i;
        }
        bool gap_free = is_empty || (positive && bytes == hi - lo);
        CHECK(fan_array_dense(a) == gap_free);
        dense[gap_free]++;
        CHECK(fan_array_expanded(a) == axes);

        char *other = memory + MIDDLE + code % 31 - 15;
        fan_array *b = view_of(s, other, FAN_DT_INT16, 1, (int64_t[]){1}, (int64_t[]){0});
        int64_t at = b->data - memory;
        bool disjoint = is_empty || at >= hi || at + 2 <= lo;
        CHECK(fan_array_extents_disjoint(a, b) == disjoint);
        CHECK(fan_array_extents_disjoint(b, a) == disjoint);
        apart[disjoint]++;
        fan_array_drop(b);
        fan_array_drop(a);
    }
    CHECK(dense[true] > 20 && dense[false] > 100);
    CHECK(apart[true] > 100 && apart[false] > 100);
    fan_storage_drop(s);
}

static void views_say_when_they_are_the_same(void)
{
    const int64_t shape[] = {3, 1};
    const int64_t strides[] = {8, 8};
    const int64_t other[] = {8, 77};
    fan_array *a = array_shaped(FAN_DT_INT64, 2, shape);
    CHECK(fan_array_same_view(a, a));
    fan_array *b = view_of(a->storage, a->data, FAN_DT_INT64, 2, shape, other);
    CHECK(fan_array_same_view(a, b)); /* the stride of an axis of extent 1 does not matter */
    fan_array_drop(b);
    b = view_of(a->storage, a->data, FAN_DT_FLOAT64, 2, shape, strides);
    CHECK(!fan_array_same_view(a, b) && fan_array_same_shape(a, b));
    fan_array_drop(b);
    b = view_of(a->storage, a->data + 8, FAN_DT_INT64, 1, shape + 1, strides);
    CHECK(!fan_array_same_view(a, b) && !fan_array_same_shape(a, b));
    fan_array_drop(b);
    CHECK_OK(fan_array_slice(a, 0, 1, 2, &b, NULL));
    CHECK(b->data == a->data + 8 && b->shape[0] == 2 && b->size == 2);
    fan_array_drop(b);
    CHECK_OK(fan_array_slice(a, 0, 3, 0, &b, NULL));
    CHECK(b->size == 0);
    fan_array_drop(b);
    CHECK_INT(fan_array_slice(a, 0, 2, 2, &b, NULL), FAN_ERR_VALUE);
    CHECK_INT(fan_array_slice(a, 2, 0, 0, &b, NULL), FAN_ERR_VALUE);
    CHECK_INT(fan_array_slice(a, 0, -1, 1, &b, NULL), FAN_ERR_VALUE);
    fan_array_drop(a);
}

static void broadcasting_follows_numpys_rules(void)
{
    fan_array *b, *c;
    fan_error err;
    const int64_t shape[] = {3, 1};
    const int64_t wide[] = {2, 3, 4};
    const int64_t wrong[] = {2, 4, 4};
    const int64_t none[] = {2, 3, 0};
    fan_array *a = array_shaped(FAN_DT_INT32, 2, shape);
    for (int i = 0; i < 3; i++)
        put_number(a, i, (number){(uint64_t)i, 0, 0});
    CHECK(fan_broadcasts_from(3, wide, 2, shape));
    CHECK(fan_broadcasts_from(3, wide, 0, NULL));
    CHECK(!fan_broadcasts_from(3, wrong, 2, shape));
    CHECK(!fan_broadcasts_from(2, shape, 3, wide));
    CHECK_OK(fan_array_broadcast(a, 3, wide, &b, NULL));
    CHECK(b->size == 24 && !b->writable && b->data == a->data);
    CHECK(fan_array_expanded(b) == 5);
    for (int64_t i = 0; i < 24; i++)
        CHECK_INT(get(b, i).whole, i / 4 % 3);
    CHECK_OK(fan_array_compact(b, ~(uint64_t)0, &c, NULL));
    CHECK(c->ndim == 3 && c->size == 3);
    CHECK(c->shape[0] == 1 && c->shape[2] == 1);
    fan_array_drop(c);
    CHECK_OK(fan_array_compact(b, 4, &c, NULL));
    CHECK(c->size == 6 && c->shape[0] == 2 && c->shape[2] == 1);
    fan_array_drop(c);
    fan_array_drop(b);
    CHECK_OK(fan_array_broadcast(a, 2, shape, &b, NULL)); /* nothing is stretched */
    CHECK(b->writable && fan_array_same_view(a, b));
    fan_array_drop(b);
    CHECK_OK(fan_array_broadcast(a, 3, none, &b, NULL));
    CHECK(b->size == 0);
    fan_array_drop(b);
    CHECK_INT(fan_array_broadcast(a, 3, wrong, &b, &err), FAN_ERR_VALUE);
    CHECK(b == NULL);
    CHECK_HAS(err.text, "(3, 1)");
    CHECK_HAS(err.text, "(2, 4, 4)");
    CHECK_INT(fan_array_broadcast(a, 65, wide, &b, &err), FAN_ERR_VALUE);
    fan_array_drop(a);
}

static void shapes_print_as_tuples(void)
{
    char buf[32];
    const int64_t shape[] = {3, 0, 1234567};
    CHECK_STR(fan_shape_text(0, shape, buf, sizeof buf), "()");
    CHECK_STR(fan_shape_text(1, shape, buf, sizeof buf), "(3,)");
    CHECK_STR(fan_shape_text(3, shape, buf, sizeof buf), "(3, 0, 1234567)");
    CHECK_STR(fan_shape_text(3, shape, buf, 8), "(3, 0, ");
    CHECK(fan_shape_text(3, shape, buf, 0) == buf);
}

static int64_t random_extent(int round)
{
    if (!one_in(12))
        return 1 + random_below(round % 50 ? 6 : 40);
    return round % 7 != 0;
}

static void copies_equal_the_oracle(void)
{
    int met[2] = {0}; /* with elements, empty */
    for (int round = 0; round < 2500; round++) {
        int ndim = (int)random_below(5);
        int64_t shape[4];
        for (int i = 0; i < ndim; i++)
            shape[i] = random_extent(round);
        fan_dtype from = random_dtype();
        fan_dtype to = random_dtype();
        if (!fan_dtype_can_cast(from, to))
            to = from;
        fan_array *src = random_view(from, ndim, shape, true);
        fan_array *dst = random_view(to, ndim, shape, false);
        fan_array_copy(dst, src);
        for (int64_t i = 0; i < src->size; i++)
            CHECK(same_number(get(dst, i), convert_number(from, get(src, i), to)));
        met[src->size == 0]++;

        /* one hash for the same bytes, whatever the layout; another when one element changes */
        fan_array *plain = array_shaped(to, ndim, shape);
        for (int64_t i = 0; i < dst->size; i++)
            memcpy(element(plain, i), element(dst, i), fan_dtype_size(to));
        uint64_t h = fan_array_hash(dst);
        CHECK(fan_array_hash(plain) == h);
        if (plain->size) {
            *element(plain, random_below(plain->size)) ^= (char)(1 << random_below(8));
            CHECK(fan_array_hash(plain) != h);
        }
        drop_arrays((fan_array *[]){plain, src, dst}, 3);
    }
    CHECK(met[true] > 10 && met[false] > 1000);
}

static void fills_reach_every_element_and_no_other(void)
{
    for (int d = 0; d < FAN_DT_COUNT; d++) {
        const int64_t shape[] = {3, 5, 70};
        fan_array *a = random_view((fan_dtype)d, 3, shape, false);
        number zero = {0, 0, 0};
        fan_fill_zero(a);
        for (int64_t i = 0; i < a->size; i++)
            CHECK(same_number(get(a, i), zero));
        size_t touched = 0;
        for (size_t i = 0; i < a->storage->bytes; i++)
            touched += ((unsigned char *)a->storage->data)[i] != 0x5a;
        CHECK(touched <= (size_t)a->size * fan_dtype_size(a->dtype));
        fan_array_drop(a);
    }
}

/* made_of_blocks: an array whose allocations each fail once before. */
static fan_array *made_of_blocks(const int64_t *shape, int blocks)
{
    fan_array *a = NULL;
    int64_t live = fan_mem_get().live;
    for (int n = 0; n < blocks; n++) {
        fan_mem_fail_at(n, 1);
        CHECK_INT(fan_array_new(FAN_DT_INT8, 5, shape, NULL, &a, NULL), FAN_ERR_NOMEM);
        CHECK_INT(fan_mem_get().live, live);
    }
    fan_mem_fail_at(blocks, 1);
    CHECK_OK(fan_array_new(FAN_DT_INT8, 5, shape, NULL, &a, NULL));
    fan_mem_fail_at(-1, 0);
    CHECK_INT(fan_mem_get().live - live, blocks);
    return a;
}

static void no_memory_is_said_and_nothing_is_lost(void)
{
    const int64_t shape[] = {2, 3, 4, 5, 6};
    const int64_t large[] = {2, 3, 4, 5, 60};
    fan_error err;
    fan_array *a, *b;
    int64_t live = fan_mem_get().live;
    a = made_of_blocks(shape, 1); /* a small one is one block with its memory */
    CHECK_OK(fan_array_slice(a, 0, 0, 1, &b, &err));
    fan_array_drop(a); /* the view keeps the whole block */
    fan_array_drop(b);
    CHECK_INT(fan_mem_get().live, live);
    a = made_of_blocks(large, 3);
    fan_mem_fail_at(0, 1);
    CHECK_INT(fan_array_slice(a, 0, 0, 1, &b, &err), FAN_ERR_NOMEM);
    fan_mem_fail_at(0, 1);
    CHECK(fan_storage_wrap(NULL, 0, NULL, NULL) == NULL);
    for (int n = 0; n < 2; n++) {
        fan_mem_fail_at(n, 1);
        CHECK(fan_storage_new(100) == NULL);
    }
    fan_mem_fail_at(-1, 0);
    fan_array_drop(a);
    CHECK_INT(fan_mem_get().live, live);
}

int main(void)
{
    int64_t live = fan_mem_get().live;
    a_storage_is_released_once_by_the_last_drop();
    fresh_arrays_follow_the_order_of_another();
    bad_geometry_is_refused();
    memory_of_unknown_extent_is_bound_by_the_address_space();
    geometry_equals_looking_at_every_element();
    views_say_when_they_are_the_same();
    broadcasting_follows_numpys_rules();
    shapes_print_as_tuples();
    copies_equal_the_oracle();
    fills_reach_every_element_and_no_other();
    no_memory_is_said_and_nothing_is_lost();
    CHECK_INT(fan_mem_get().live, live);
    return check_done();
}
