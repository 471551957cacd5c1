/* Patches beside a list of all their elements: which are refused, which have elements in common;
 * and rows, whose sums free what they allocate. */
#include "array/patch.h"
#include "array/rows.h"

#include "base/mem.h"
#include "base/rng.h"
#include "check.h"

#include <string.h>

enum {
    SIDE = 6,
    MOST = 24
};

static const int64_t whole[2] = {SIDE, SIDE};

/* A patch of `whole`, or NULL where it is refused. */
static fan_patch *patch_of(const int64_t *start, const int64_t *step, const int8_t *from,
                           int values, const int64_t *extent)
{
    fan_patch *p = NULL;
    fan_error err = {FAN_OK};
    fan_status status = fan_patch_new(2, whole, start, step, from, values, extent, &p, &err);
    if (status != FAN_OK)
        CHECK_INT(status, FAN_ERR_VALUE);
    return p;
}

/* How often each element of `whole` occurs in a patch; false: some element lies outside. */
static bool patch_marks(const int64_t *start, const int64_t *step, const int8_t *from, int values,
                        const int64_t *extent, int *marks)
{
    bool inside = true;
    int64_t at[2] = {0, 0};
    int64_t n[2] = {1, 1};
    for (int v = 0; v < values; v++)
        n[v] = extent[v];
    memset(marks, 0, SIDE * SIDE * sizeof *marks);
    for (at[0] = 0; at[0] < n[0]; at[0]++) {
        for (at[1] = 0; at[1] < n[1]; at[1]++) {
            int64_t place[2];
            for (int k = 0; k < 2; k++) {
                place[k] = start[k];
                if (from[k] >= 0)
                    place[k] += step[k] * at[from[k]];
            }
            bool in = place[0] >= 0 && place[0] < SIDE && place[1] >= 0 && place[1] < SIDE;
            inside = inside && in;
            if (in)
                marks[place[0] * SIDE + place[1]]++;
        }
    }
    return inside;
}

static bool some_twice(const int *marks)
{
    for (int i = 0; i < SIDE * SIDE; i++) {
        if (marks[i] > 1)
            return true;
    }
    return false;
}

/* A random patch, of any kind, mostly one that lies inside. */
static fan_patch *random_patch(uint64_t *seed, int *marks, long *refused)
{
    int values = (int)(fan_rng(seed) % 3);
    int64_t start[2];
    int64_t step[2];
    int64_t extent[2];
    int8_t from[2];
    for (int k = 0; k < 2; k++) {
        start[k] = (int64_t)(fan_rng(seed) % (SIDE + 2)) - 1;
        step[k] = (int64_t)(fan_rng(seed) % 7) - 3;
        extent[k] = (int64_t)(fan_rng(seed) % 4);
        from[k] = (int8_t)((int)(fan_rng(seed) % (unsigned)(values + 1)) - 1);
    }
    fan_patch *p = patch_of(start, step, from, values, extent);
    bool inside = patch_marks(start, step, from, values, extent, marks);
    bool twice = some_twice(marks);
    CHECK((p != NULL) == (inside && !twice));
    *refused += !p;
    return p;
}

static void what_leaves_the_whole_or_has_an_element_twice_is_refused(void)
{
    const int8_t along[2] = {0, -1};
    const int8_t diagonal[2] = {0, 0};
    const int8_t beyond[2] = {1, -1};
    const int64_t one[1] = {1};
    const int64_t three[1] = {3};
    const int64_t ahead[2] = {2, 0};
    const int64_t back[2] = {-2, 0};
    const int64_t nowhere[2] = {0, 0};
    const int64_t both[2] = {1, -1};
    const int64_t far[2] = {INT64_MAX, 0};
    const struct {
        int64_t start[2];
        const int64_t *step;
        const int8_t *from;
        const int64_t *extent;
        bool good;
    } cases[] = {
        {{0, 0}, ahead, along, three, true},   {{1, 5}, ahead, along, three, true},
        {{2, 0}, ahead, along, three, false},  {{5, 0}, back, along, three, true},
        {{3, 0}, back, along, three, false},   {{SIDE, 0}, back, along, three, false},
        {{-1, 0}, ahead, along, three, false}, {{0, SIDE}, ahead, along, three, false},
        {{0, -1}, ahead, along, three, false}, {{SIDE, 0}, nowhere, along, one, false},
        {{-1, 0}, nowhere, along, one, false}, {{0, 0}, nowhere, along, three, false},
        {{0, 5}, both, diagonal, three, true}, {{0, 1}, both, diagonal, three, false},
        {{0, 0}, ahead, beyond, three, false}, {{1, 0}, far, along, three, false},
        {{0, 0}, far, along, three, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fan_patch *p = patch_of(cases[i].start, cases[i].step, cases[i].from, 1, cases[i].extent);
        if (!CHECK((p != NULL) == cases[i].good))
            fprintf(stderr, "case %zu\n", i);
        fan_patch_drop(p);
    }
}

/* A whole has as many elements as 16 bytes each can be addressed. */
static void the_largest_whole_has_patches_and_a_larger_one_none(void)
{
    const int64_t zero = 0;
    const int64_t one = 1;
    const int8_t along = 0;
    const int64_t most = INT64_MAX / 16;
    for (int64_t n = most; n <= most + 1; n++) {
        fan_patch *p = NULL;
        fan_error err = {FAN_OK};
        fan_status status = fan_patch_new(1, &n, &zero, &one, &along, 1, &one, &p, &err);
        CHECK((status == FAN_OK) == (n == most));
        fan_patch_drop(p);
    }
}

static void patches_that_are_called_disjoint_are(void)
{
    uint64_t seed = 40;
    long apart = 0;
    long unknown = 0;
    long refused = 0;
    int marks[SIDE * SIDE];
    for (int round = 0; round < 20000; round++) {
        fan_patch *all[MOST];
        const fan_patch *list[MOST];
        int total[SIDE * SIDE] = {0};
        size_t n = 0;
        size_t want = fan_rng(&seed) % 3 ? fan_rng(&seed) % 4 : fan_rng(&seed) % MOST;
        for (size_t k = 0; k < want; k++) {
            fan_patch *p = random_patch(&seed, marks, &refused);
            if (!p || p->size == 0) {
                fan_patch_drop(p);
                continue;
            }
            for (int i = 0; i < SIDE * SIDE; i++)
                total[i] += marks[i];
            all[n] = p;
            list[n++] = p;
        }
        bool disjoint = fan_patches_disjoint(list, n);
        if (disjoint)
            CHECK(!some_twice(total));
        apart += disjoint && n > 1;
        unknown += !disjoint && !some_twice(total);
        for (size_t i = 0; i < n; i++)
            fan_patch_drop(all[i]);
    }
    CHECK(apart > 500 && unknown < apart && refused > 1000);
}

/* Every second row, and the others: they meet along axis 0, and have no element in common. */
static void patches_that_interleave_are_disjoint(void)
{
    const int8_t from[2] = {0, 1};
    for (int axis = 0; axis < 2; axis++) {
        for (int64_t sign = -1; sign <= 1; sign += 2) {
            int64_t extent[2] = {SIDE, SIDE};
            int64_t step[2] = {1, 1};
            int64_t even[2] = {0, 0};
            int64_t odd[2] = {0, 0};
            extent[axis] = SIDE / 2;
            step[axis] = 2;
            odd[axis] = 1;
            fan_patch *a = patch_of(even, step, from, 2, extent);
            step[axis] = 2 * sign;
            odd[axis] += sign < 0 ? SIDE - 2 : 0;
            fan_patch *b = patch_of(odd, step, from, 2, extent);
            even[axis] = sign < 0 ? SIDE - 2 : 0;
            fan_patch *c = patch_of(even, step, from, 2, extent);
            if (!CHECK(a && b && c))
                return;
            const fan_patch *apart[2] = {a, b};
            const fan_patch *met[2] = {a, c};
            CHECK(fan_patches_disjoint(apart, 2));
            CHECK(!fan_patches_disjoint(met, 2));
            fan_patch_drop(a);
            fan_patch_drop(b);
            fan_patch_drop(c);
        }
    }
}

static void sums_of_rows_free_what_they_allocate(void)
{
    const int64_t shape[2] = {40, 9};
    const int64_t table[2] = {5, 9};
    int64_t ids[40];
    int64_t bad;
    fan_array *rows = NULL;
    fan_array *out = NULL;
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 2, shape, NULL, &rows, NULL));
    CHECK_OK(fan_array_new(FAN_DT_FLOAT32, 2, table, NULL, &out, NULL));
    for (int i = 0; i < 40 * 9; i++)
        ((float *)(void *)rows->data)[i] = i % 7 ? 1.5F : 1e30F;
    for (int i = 0; i < 40; i++)
        ids[i] = i % 5;
    int64_t before = fan_mem_get().live;
    CHECK_OK(fan_rows_sum(out, ids, rows, FAN_DT_FLOAT64, false, &bad, NULL));
    CHECK_OK(fan_rows_sum(out, ids, rows, FAN_DT_FLOAT32, true, &bad, NULL));
    ids[39] = 5;
    CHECK_INT(fan_rows_sum(out, ids, rows, FAN_DT_FLOAT64, false, &bad, NULL), FAN_ERR_VALUE);
    CHECK_INT(bad, 39);
    CHECK_INT(fan_mem_get().live, before);
    fan_array_drop(rows);
    fan_array_drop(out);
}

int main(void)
{
    what_leaves_the_whole_or_has_an_element_twice_is_refused();
    the_largest_whole_has_patches_and_a_larger_one_none();
    patches_that_are_called_disjoint_are();
    patches_that_interleave_are_disjoint();
    sums_of_rows_free_what_they_allocate();
    return check_done();
}
