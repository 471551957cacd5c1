/* layout: see layout.h. In this order: the recording; whether all is where it was.
 *
 * Is everything where it was?
 *
 * Components are costly to find and cheap to confirm. The recording holds the components and the
 * clusters: arrays whose extents chain, whether or not they share bytes. If every array is where it
 * was in its cluster, and no two clusters overlap, the layout is the same: within each cluster
 * nothing moved, and between clusters nothing is shared. That costs a subtraction per array and a
 * sort of the clusters. Only if it fails are the components computed again: clusters may have moved
 * against each other without gaining or losing a shared byte. */
#include "array/layout.h"

#include "base/mem.h"

#include <string.h>

/* Of one array. */
typedef struct place {
    uint32_t component, cluster;
    /* of element [0, 0, ..], in bytes from the first byte of each */
    uint64_t in_component, in_cluster;
    bool empty;
} place;

/* Of one cluster: its length, and its first array that is not empty (NO_MEMBER: none). */
typedef struct cluster {
    uint64_t reach; /* bytes from its first to its last */
    size_t first;
} cluster;

struct fan_layout {
    size_t n, nclusters;
    fan_layout_item *items; /* their regions are copies of those in `regions` */
    place *places;
    cluster *clusters;
    fan_overlaps *regions;
};

const char *fan_change_word(fan_change c)
{
    static const char *const words[] = {
#define X(NAME, word) word,
        FAN_CHANGE_LIST(X)
#undef X
    };
    return words[c];
}

static fan_status layout_no_memory(size_t n, fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the layout of %zu arrays", n);
}

fan_region *fan_layout_regions(const fan_layout_item *items, size_t n)
{
    fan_region *regions = fan_alloc(n * sizeof *regions);
    for (size_t i = 0; regions && i < n; i++)
        regions[i] = items[i].region;
    return regions;
}

static fan_status overlaps_of(const fan_layout_item *items, size_t n, fan_overlaps **out,
                              fan_error *err)
{
    *out = NULL;
    fan_region *regions = fan_layout_regions(items, n);
    if (!regions)
        return layout_no_memory(n, err);
    fan_status status = fan_overlaps_new(regions, n, out, err);
    fan_free(regions);
    return status;
}

/* span: the first and last byte of each label's arrays; from > to if it has no bytes. */
typedef struct span {
    uint64_t from, to;
    size_t first;
} span;

/* The labels of all arrays, numbers below `count`, and the span of each. */
typedef struct labels {
    uint32_t *label;
    size_t count;
    span *spans;
} labels;

static void spans_of(const fan_overlaps *regions, const labels *all)
{
    for (size_t k = 0; k < all->count; k++)
        all->spans[k] = (span){UINT64_MAX, 0, FAN_NO_OTHER};
    for (size_t i = 0; i < fan_overlaps_count(regions); i++) {
        span *s = &all->spans[all->label[i]];
        uint64_t lo, last;
        if (!fan_overlaps_extent(regions, i, &lo, &last))
            continue;
        s->from = fan_umin(s->from, lo);
        s->to = fan_umax(s->to, last);
        if (s->first == FAN_NO_OTHER)
            s->first = i;
    }
}

/* way_in: returns the bytes from the first one of array i's label to its element [0, 0, ..]. */
static uint64_t way_in(const labels *all, const fan_layout *l, size_t i)
{
    const span *s = &all->spans[all->label[i]];
    return l->items[i].region.data - s->from;
}

/* layout_record: enters the components and the clusters; `all` has room for each array. */
static fan_status layout_record(fan_layout *l, uint64_t budget, labels *all, fan_error *err)
{
    FAN_TRY(fan_overlaps_components(l->regions, budget, all->label, &all->count, NULL, err));
    spans_of(l->regions, all);
    for (size_t i = 0; i < l->n; i++) {
        place *p = &l->places[i];
        uint64_t lo, last;
        bool empty = !fan_overlaps_extent(l->regions, i, &lo, &last);
        *p = (place){.component = all->label[i], .empty = empty};
        if (!empty)
            p->in_component = way_in(all, l, i);
    }
    FAN_TRY(fan_overlaps_extents(l->regions, all->label, &all->count, err));
    spans_of(l->regions, all);
    for (size_t i = 0; i < l->n; i++) {
        place *p = &l->places[i];
        p->cluster = all->label[i];
        if (!p->empty)
            p->in_cluster = way_in(all, l, i);
    }
    l->nclusters = all->count;
    for (size_t k = 0; k < l->nclusters; k++) {
        const span *s = &all->spans[k];
        l->clusters[k] = (cluster){s->to - s->from, s->first};
    }
    return FAN_OK;
}

fan_status fan_layout_new(const fan_layout_item *items, size_t n, uint64_t budget, fan_layout **out,
                          fan_error *err)
{
    fan_status status = FAN_OK;
    fan_layout *l = fan_calloc(sizeof *l);
    labels all = {.label = fan_alloc(n * sizeof *all.label)};
    all.spans = fan_alloc(n * sizeof *all.spans);
    *out = NULL;
    if (!l || !all.label || !all.spans) {
        status = layout_no_memory(n, err);
        goto done;
    }
    l->n = n;
    l->items = fan_alloc(n * sizeof *l->items);
    l->places = fan_alloc(n * sizeof *l->places);
    l->clusters = fan_alloc(n * sizeof *l->clusters);
    if (!l->items || !l->places || !l->clusters) {
        status = layout_no_memory(n, err);
        goto done;
    }
    FAN_GO(overlaps_of(items, n, &l->regions, err));
    for (size_t i = 0; i < n; i++) {
        l->items[i] = items[i];
        l->items[i].region = *fan_overlaps_region(l->regions, i);
    }
    FAN_GO(layout_record(l, budget, &all, err));
    *out = l;
    l = NULL;
done:
    fan_layout_free(l);
    fan_free(all.label);
    fan_free(all.spans);
    return status;
}

void fan_layout_free(fan_layout *l)
{
    if (!l)
        return;
    fan_free(l->items);
    fan_free(l->places);
    fan_free(l->clusters);
    fan_overlaps_free(l->regions);
    fan_free(l);
}

size_t fan_layout_component(const fan_layout *l, size_t i)
{
    return l->places[i].component;
}

uint64_t fan_layout_offset(const fan_layout *l, size_t i)
{
    return l->places[i].in_component;
}

/* ---- is it the same? ---- */

/* layout_compare: compares all of one array but its address. */
static fan_change layout_compare(const fan_layout_item *was, const fan_layout_item *is, bool empty)
{
    const fan_region *a = &was->region;
    const fan_region *b = &is->region;
    if (was->dtype != is->dtype || a->itemsize != b->itemsize)
        return FAN_CHANGE_DTYPE;
    if (was->device != is->device)
        return FAN_CHANGE_DEVICE;
    if (a->ndim != b->ndim)
        return FAN_CHANGE_SHAPE;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i])
            return FAN_CHANGE_SHAPE;
    }
    for (int i = 0; i < a->ndim && !empty; i++) {
        if (a->strides[i] != b->strides[i] && a->shape[i] > 1)
            return FAN_CHANGE_STRIDES;
    }
    if (was->writable && !is->writable)
        return FAN_CHANGE_READONLY;
    if (!was->writable && is->writable)
        return FAN_CHANGE_WRITABLE;
    return FAN_CHANGE_SAME;
}

/* layout_in_place: returns whether every array is where it was in its cluster, and no clusters
 * overlap. `clusters` has room for each. */
static bool layout_in_place(const fan_layout *l, const fan_layout_item *items, fan_flat *clusters)
{
    for (size_t k = 0; k < l->nclusters; k++) {
        const cluster *was = &l->clusters[k];
        uint64_t start = 0;
        uint64_t bytes = 0;
        if (was->first != FAN_NO_OTHER) {
            start = items[was->first].region.data - l->places[was->first].in_cluster;
            bytes = was->reach + 1;
            if (start + bytes <= start) /* beyond the end of memory */
                return false;
        }
        clusters[k] = (fan_flat){.data = (char *)(uintptr_t)start, .bytes = bytes};
    }
    for (size_t i = 0; i < l->n; i++) {
        const place *p = &l->places[i];
        uint64_t start = items[i].region.data - p->in_cluster;
        if (!p->empty && start != (uintptr_t)clusters[p->cluster].data)
            return false;
    }
    return fan_flats_disjoint(clusters, l->nclusters);
}

/* Arrays whose components are found anew. */
typedef struct anew {
    const fan_layout *l;
    const fan_layout_item *items;
    uint64_t budget;
    fan_overlaps *regions;
    uint32_t *label; /* of the present component */
    size_t *was;     /* the first array of each recorded component; FAN_NO_OTHER: not met yet */
    size_t *is;      /* .. of each present one */
} anew;

/* other_component: whether two arrays were in different components. */
static bool other_component(const anew *all, size_t i, size_t j)
{
    return all->l->places[i].component != all->l->places[j].component;
}

/* new_overlap: returns the first array of i's present component that was in another one; preferably
 * one that overlaps i itself. */
static size_t new_overlap(const anew *all, size_t i)
{
    const fan_region *own = fan_overlaps_region(all->regions, i);
    size_t other = FAN_NO_OTHER;
    for (size_t j = 0; j < all->l->n; j++) {
        const fan_region *region = fan_overlaps_region(all->regions, j);
        fan_verdict v = FAN_OVERLAP_DISJOINT;
        if (all->label[j] != all->label[i] || !other_component(all, i, j))
            continue;
        if (other == FAN_NO_OTHER)
            other = j;
        fan_status status = fan_overlap(own, region, all->budget, NULL, NULL, &v, NULL);
        if (status == FAN_OK && v != FAN_OVERLAP_DISJOINT)
            return j;
    }
    return other;
}

/* moved: whether the way from one array to the other is not what it was. */
static bool moved(const anew *all, size_t i, size_t other)
{
    uint64_t apart = all->items[i].region.data - all->items[other].region.data;
    return apart != all->l->items[i].region.data - all->l->items[other].region.data;
}

/* layout_differ: compares the present components with the recorded ones. */
static fan_difference layout_differ(const anew *all)
{
    for (size_t i = 0; i < all->l->n; i++) {
        all->was[i] = FAN_NO_OTHER;
        all->is[i] = FAN_NO_OTHER;
    }
    for (size_t i = 0; i < all->l->n; i++) {
        size_t *was = &all->was[all->l->places[i].component];
        size_t *is = &all->is[all->label[i]];
        if (*was == FAN_NO_OTHER)
            *was = i;
        if (all->label[*was] != all->label[i])
            return (fan_difference){FAN_CHANGE_APART, i, *was};
        if (moved(all, i, *was))
            return (fan_difference){FAN_CHANGE_OFFSET, i, *was};
        if (*is == FAN_NO_OTHER)
            *is = i;
        if (other_component(all, i, *is))
            return (fan_difference){FAN_CHANGE_OVERLAP, i, new_overlap(all, i)};
    }
    return (fan_difference){FAN_CHANGE_SAME, 0, FAN_NO_OTHER};
}

static fan_status find_anew(const fan_layout *l, const fan_layout_item *items, uint64_t budget,
                            fan_difference *out, fan_error *err)
{
    anew all = {.l = l, .items = items, .budget = budget};
    fan_status status = FAN_OK;
    size_t count;
    all.label = fan_alloc(l->n * sizeof *all.label);
    all.was = fan_alloc(2 * l->n * sizeof *all.was);
    if (!all.label || !all.was) {
        status = layout_no_memory(l->n, err);
        goto done;
    }
    all.is = all.was + l->n;
    FAN_GO(overlaps_of(items, l->n, &all.regions, err));
    FAN_GO(fan_overlaps_components(all.regions, budget, all.label, &count, NULL, err));
    *out = layout_differ(&all);
done:
    fan_free(all.label);
    fan_free(all.was);
    fan_overlaps_free(all.regions);
    return status;
}

fan_status fan_layout_check(const fan_layout *l, const fan_layout_item *items, uint64_t budget,
                            fan_difference *out, fan_error *err)
{
    *out = (fan_difference){FAN_CHANGE_SAME, 0, FAN_NO_OTHER};
    for (size_t i = 0; i < l->n; i++) {
        fan_change what = layout_compare(&l->items[i], &items[i], l->places[i].empty);
        if (what != FAN_CHANGE_SAME) {
            *out = (fan_difference){what, i, FAN_NO_OTHER};
            return FAN_OK;
        }
    }
    fan_flat *clusters = fan_alloc(l->nclusters * sizeof *clusters);
    if (!clusters)
        return layout_no_memory(l->n, err);
    bool same = layout_in_place(l, items, clusters);
    fan_free(clusters);
    if (same)
        return FAN_OK;
    return find_anew(l, items, budget, out, err);
}
