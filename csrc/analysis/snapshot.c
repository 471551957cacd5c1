/* snapshot: see snapshot.h. One block of memory holds all rows, one after the other; a row is a
 * comb's tooth. */
#include "analysis/snapshot.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

typedef struct shown {
    uint64_t data; /* the first element */
    uint64_t lo;   /* the first byte */
    int64_t tooth; /* 0: empty */
    size_t at;     /* where its rows begin in the block */
    size_t axes;   /* where its axes begin in `axes` */
    int n;
} shown;

struct fan_snapshot {
    size_t n, size;
    shown *items;
    fan_axis *axes;
    unsigned char *block;
};

/* A row of a walk: the array's bytes and the kept ones. Returns false to stop. */
typedef bool row_fn(unsigned char *there, unsigned char *kept, size_t n);

static bool row_save(unsigned char *there, unsigned char *kept, size_t n)
{
    memcpy(kept, there, n);
    return true;
}

static bool row_is_same(unsigned char *there, unsigned char *kept, size_t n)
{
    return memcmp(kept, there, n) == 0;
}

static bool row_put_back(unsigned char *there, unsigned char *kept, size_t n)
{
    if (memcmp(kept, there, n) == 0)
        return true;
    for (size_t i = 0; i < n; i++) {
        if (there[i] != kept[i])
            there[i] = kept[i];
    }
    return true;
}

/* row_line: visits the rows along one axis. */
static inline bool row_line(fan_axis axis, unsigned char *there, unsigned char *kept, size_t tooth,
                            row_fn *row)
{
    for (int64_t i = 0; i < axis.count; i++) {
        if (!row(there + i * axis.step, kept + (size_t)i * tooth, tooth))
            return false;
    }
    return true;
}

/* LINES(function): a line of rows, with a loop for each of the usual element widths. */
#define LINES(row)                                                                    \
    static bool lines_##row(fan_axis axis, unsigned char *there, unsigned char *kept, \
                            size_t tooth)                                             \
    {                                                                                 \
        switch (tooth) {                                                              \
        case 1:                                                                       \
            return row_line(axis, there, kept, 1, row);                               \
        case 2:                                                                       \
            return row_line(axis, there, kept, 2, row);                               \
        case 4:                                                                       \
            return row_line(axis, there, kept, 4, row);                               \
        case 8:                                                                       \
            return row_line(axis, there, kept, 8, row);                               \
        case 16:                                                                      \
            return row_line(axis, there, kept, 16, row);                              \
        default:                                                                      \
            return row_line(axis, there, kept, tooth, row);                           \
        }                                                                             \
    }
LINES(row_save)
LINES(row_is_same)
LINES(row_put_back)

typedef bool line_fn(fan_axis axis, unsigned char *there, unsigned char *kept, size_t tooth);

/* each_line: visits the rows along axes 0 .. k - 1, smallest step innermost. */
static bool each_line(const fan_axis *axes, int k, unsigned char *there, unsigned char **kept,
                      size_t tooth, line_fn *lines)
{
    if (k <= 1) {
        fan_axis axis = {0, 1};
        if (k)
            axis = axes[0];
        unsigned char *mine = *kept;
        *kept += (size_t)axis.count * tooth;
        return lines(axis, there, mine, tooth);
    }
    const fan_axis *outer = &axes[k - 1];
    for (int64_t i = 0; i < outer->count; i++) {
        if (!each_line(axes, k - 1, there + i * outer->step, kept, tooth, lines))
            return false;
    }
    return true;
}

static bool walk_all(const fan_snapshot *s, const shown *item, uint64_t lo, line_fn *lines)
{
    unsigned char *there = (unsigned char *)(uintptr_t)lo;
    unsigned char *kept = s->block + item->at;
    if (item->tooth == 0)
        return true;
    return each_line(s->axes + item->axes, item->n, there, &kept, (size_t)item->tooth, lines);
}

/* rows_of: computes how many bytes the rows of a comb have; false: more than `all`. */
static bool rows_of(const fan_comb *c, size_t all, size_t *bytes)
{
    *bytes = (size_t)c->tooth;
    for (int i = 0; i < c->n; i++) {
        if (__builtin_mul_overflow(*bytes, (size_t)c->axes[i].count, bytes) || *bytes > all)
            return false;
    }
    return true;
}

static fan_status snapshot_no_memory(size_t n, fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a copy of %zu arrays", n);
}

/* snapshot_plan: decides which bytes of region r are kept, after those kept already. */
static fan_status snapshot_plan(fan_snapshot *s, const fan_region *r, size_t i, size_t *axes,
                                fan_error *err)
{
    shown *item = &s->items[i];
    fan_comb c;
    *item = (shown){.data = r->data, .at = s->size, .axes = *axes};
    fan_comb_of(r, s->axes + *axes, &c);
    if (c.empty)
        return FAN_OK;
    if (c.far)
        return fan_fail(err, FAN_ERR_VALUE, "array %zu reaches beyond the address space", i);
    size_t all = (size_t)(c.last - c.lo) + 1;
    size_t bytes;
    item->lo = c.lo;
    item->tooth = c.tooth;
    item->n = c.n;
    if (!rows_of(&c, all, &bytes)) {
        bytes = all;
        item->tooth = (int64_t)all;
        item->n = 0;
    }
    *axes += (size_t)item->n;
    if (__builtin_add_overflow(s->size, bytes, &s->size))
        return snapshot_no_memory(s->n, err);
    return FAN_OK;
}

fan_status fan_snapshot_new(const fan_region *r, size_t n, fan_snapshot **out, fan_error *err)
{
    fan_snapshot *s = fan_calloc(sizeof *s);
    fan_status status = FAN_ERR_NOMEM;
    size_t axes = 0;
    *out = NULL;
    if (!s)
        return snapshot_no_memory(n, err);
    for (size_t i = 0; i < n; i++)
        axes += (size_t)r[i].ndim;
    s->n = n;
    s->items = fan_alloc(n * sizeof *s->items);
    s->axes = fan_alloc(axes * sizeof *s->axes);
    axes = 0;
    if (!s->items || !s->axes)
        goto nomem;
    for (size_t i = 0; i < n; i++) {
        status = snapshot_plan(s, &r[i], i, &axes, err);
        if (status != FAN_OK)
            goto fail;
    }
    s->block = fan_alloc_data(s->size);
    if (!s->block)
        goto nomem;
    for (size_t i = 0; i < n; i++)
        (void)walk_all(s, &s->items[i], s->items[i].lo, lines_row_save);
    *out = s;
    return FAN_OK;
nomem:
    status = fan_fail(err, FAN_ERR_NOMEM, "out of memory for a copy of %zu arrays, %zu bytes", n,
                      s->size);
fail:
    fan_snapshot_free(s);
    return status;
}

void fan_snapshot_free(fan_snapshot *s)
{
    if (!s)
        return;
    fan_free(s->items);
    fan_free(s->axes);
    fan_free_data(s->block, s->size);
    fan_free(s);
}

size_t fan_snapshot_bytes(const fan_snapshot *s)
{
    return s->size;
}

uint64_t fan_snapshot_data(const fan_snapshot *s, size_t i)
{
    return s->items[i].data;
}

bool fan_snapshot_changed(const fan_snapshot *s, size_t i)
{
    return !walk_all(s, &s->items[i], s->items[i].lo, lines_row_is_same);
}

void fan_snapshot_restore(const fan_snapshot *s, size_t i, uint64_t data)
{
    const shown *item = &s->items[i];
    (void)walk_all(s, item, item->lo - item->data + data, lines_row_put_back);
}
