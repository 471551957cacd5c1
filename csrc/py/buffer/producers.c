/* producers: for fanin.torch.backward: the places of a graph at which several gradients meet, and
 * the hooks of the nodes that make these gradients. The nodes are torch's: `next_functions` of a
 * node has, for each of its edges, the node that the edge leads to and the index of one of the
 * gradients that this node takes. */
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"
#include "py/arrays/dlpack.h"

/* ---- where gradients meet ---- */

#define NONE (-1)
#define NO_INDEX (-1) /* of the place of a node itself */

/* An edge that leads to a place. from is NULL for a gradient that a pass begins with. */
typedef struct graph_edge {
    PyObject *from;
    Py_ssize_t index;
    Py_ssize_t next; /* another edge to the same place, or NONE */
} graph_edge;

/* A gradient of a node, and the edges that lead there, in the order in which they were found. */
typedef struct place {
    PyObject *to;
    Py_ssize_t index;
    Py_ssize_t first;
    Py_ssize_t last;
    Py_ssize_t count;
} place;

/* An array that grows. */
typedef struct rows {
    void *items;
    size_t size;
    size_t used;
} rows;

/* All nodes are borrowed from walk.nodes, but for those. */
typedef struct walk {
    rows nodes;    /* PyObject *, new references: the nodes that were found */
    rows waiting;  /* PyObject *: those whose edges were not read yet */
    rows places;   /* place */
    rows edges;    /* graph_edge */
    size_t *table; /* by place, with linear probing: a place's number plus one, or 0 */
    size_t size;   /* a power of two */
} walk;

/* rows_add: a new item at the end; NULL with an exception. */
static void *rows_add(rows *r, size_t item)
{
    if (r->used == r->size) {
        size_t size = r->size ? 2 * r->size : 128;
        char *items = fan_realloc(r->items, size * item);
        if (!items) {
            PyErr_NoMemory();
            return NULL;
        }
        r->items = items;
        r->size = size;
    }
    return (char *)r->items + item * r->used++;
}

static size_t place_hash(PyObject *to, Py_ssize_t index)
{
    uint64_t mixed = ((uint64_t)(uintptr_t)to >> 4) + (uint64_t)index * 0x9E3779B9u;
    return (size_t)((mixed * UINT64_C(0x9E3779B97F4A7C15)) >> 32);
}

/* place_find: the entry of a place in the table, or the empty one where it belongs. */
static size_t *place_find(const walk *w, PyObject *to, Py_ssize_t index)
{
    const place *places = w->places.items;
    size_t mask = w->size - 1;
    size_t at = place_hash(to, index) & mask;
    while (w->table[at]) {
        const place *found = &places[w->table[at] - 1];
        if (found->to == to && found->index == index)
            break;
        at = (at + 1) & mask;
    }
    return &w->table[at];
}

static int table_grow(walk *w)
{
    size_t size = w->size ? 2 * w->size : 256;
    size_t *table = fan_calloc(size * sizeof *table);
    if (!table) {
        PyErr_NoMemory();
        return -1;
    }
    fan_free(w->table);
    w->table = table;
    w->size = size;
    const place *places = w->places.items;
    for (size_t i = 0; i < w->places.used; i++)
        *place_find(w, places[i].to, places[i].index) = i + 1;
    return 0;
}

/* place_of: the number of a place, which is new where *found is false; NONE with an exception. */
static Py_ssize_t place_of(walk *w, PyObject *to, Py_ssize_t index, bool *found)
{
    if (2 * w->places.used >= w->size && table_grow(w) < 0)
        return NONE;
    size_t *entry = place_find(w, to, index);
    *found = *entry != 0;
    if (*found)
        return (Py_ssize_t)*entry - 1;
    place *made = rows_add(&w->places, sizeof *made);
    if (!made)
        return NONE;
    *made = (place){
        .to = to,
        .index = index,
        .first = NONE,
        .last = NONE,
    };
    *entry = w->places.used;
    return (Py_ssize_t)w->places.used - 1;
}

/* node_found: a node whose edges are to be read, unless they were. */
static int node_found(walk *w, PyObject *node)
{
    bool known;
    if (place_of(w, node, NO_INDEX, &known) == NONE)
        return -1;
    if (known)
        return 0;
    PyObject **kept = rows_add(&w->nodes, sizeof *kept);
    if (!kept)
        return -1;
    *kept = Py_NewRef(node);
    PyObject **waits = rows_add(&w->waiting, sizeof *waits);
    if (!waits)
        return -1;
    *waits = node;
    return 0;
}

/* edge_found: an edge leads from a node to a place. */
static int edge_found(walk *w, PyObject *from, Py_ssize_t index, PyObject *pair)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "_fan_ins: expected pairs of a node and an index");
        return -1;
    }
    PyObject *to = PyTuple_GET_ITEM(pair, 0);
    if (to == Py_None)
        return 0;
    Py_ssize_t to_index = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1));
    if (to_index == -1 && PyErr_Occurred())
        return -1;
    bool known;
    Py_ssize_t number = place_of(w, to, to_index, &known);
    if (number == NONE)
        return -1;
    if ((!known && node_found(w, to) < 0))
        return -1;
    graph_edge *made = rows_add(&w->edges, sizeof *made);
    if (!made)
        return -1;
    *made = (graph_edge){
        .from = from,
        .index = index,
        .next = NONE,
    };
    Py_ssize_t at = (Py_ssize_t)w->edges.used - 1;
    place *one = (place *)w->places.items + number;
    if (one->count++)
        ((graph_edge *)w->edges.items)[one->last].next = at;
    else
        one->first = at;
    one->last = at;
    return 0;
}

static int node_read(walk *w, PyObject *node, PyObject *next_functions)
{
    PyObject *pairs = PyObject_GetAttr(node, next_functions);
    if (!pairs)
        return -1;
    int status = 0;
    if (!PyTuple_CheckExact(pairs)) {
        PyErr_SetString(PyExc_TypeError, "_fan_ins: expected next_functions to be a tuple");
        status = -1;
    }
    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_GET_SIZE(pairs); i++)
        status = edge_found(w, node, i, PyTuple_GET_ITEM(pairs, i));
    Py_DECREF(pairs);
    return status;
}

static int walk_run(walk *w, PyObject *roots)
{
    PyObject *next_functions = PyUnicode_InternFromString("next_functions");
    if (!next_functions)
        return -1;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(roots); i++)
        status = edge_found(w, NULL, i, PyList_GET_ITEM(roots, i));
    while (status == 0 && w->waiting.used) {
        PyObject *const *waiting = w->waiting.items;
        status = node_read(w, waiting[--w->waiting.used], next_functions);
    }
    Py_DECREF(next_functions);
    return status;
}

/* edges_of: a list of the nodes and indices of the edges that lead to a place. */
static PyObject *edges_of(const walk *w, const place *one)
{
    const graph_edge *edges = w->edges.items;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = one->first; list && i != NONE; i = edges[i].next)
        fan_list_add(&list, Py_BuildValue("(On)", fan_or_none(edges[i].from), edges[i].index));
    return list;
}

/* walk_several: a dict: (node, index) of each place with so many edges -> their list. */
static PyObject *walk_several(const walk *w, Py_ssize_t least)
{
    PyObject *several = PyDict_New();
    for (size_t i = 0; several && i < w->places.used; i++) {
        const place *one = (const place *)w->places.items + i;
        if (one->count < least)
            continue;
        PyObject *key = Py_BuildValue("(On)", one->to, one->index);
        PyObject *edges = edges_of(w, one);
        if (!key || !edges || PyDict_SetItem(several, key, edges) < 0)
            Py_CLEAR(several);
        Py_XDECREF(key);
        Py_XDECREF(edges);
    }
    return several;
}

static PyObject *walk_nodes(const walk *w)
{
    PyObject *nodes = PySet_New(NULL);
    PyObject *const *found = w->nodes.items;
    for (size_t i = 0; nodes && i < w->nodes.used; i++) {
        if (PySet_Add(nodes, found[i]) < 0)
            Py_CLEAR(nodes);
    }
    return nodes;
}

static void walk_end(walk *w)
{
    PyObject *const *nodes = w->nodes.items;
    for (size_t i = 0; i < w->nodes.used; i++)
        Py_DECREF(nodes[i]);
    fan_free(w->nodes.items);
    fan_free(w->waiting.items);
    fan_free(w->places.items);
    fan_free(w->edges.items);
    fan_free(w->table);
}

static PyObject *fan_ins(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    enum {
        ROOTS,
        LEAST,
        FEW
    };
    Py_ssize_t least = PyLong_AsSsize_t(a[LEAST]);
    Py_ssize_t few = PyLong_AsSsize_t(a[FEW]);
    if (PyErr_Occurred())
        return NULL;
    walk w = {.table = NULL};
    PyObject *answer = NULL;
    /* Most nodes are objects for the time of the walk alone: the garbage collector would visit them
     * all, and free none. */
    int collects = PyGC_Disable();
    if (walk_run(&w, a[ROOTS]) == 0) {
        PyObject *nodes = NULL;
        if ((Py_ssize_t)w.nodes.used > few)
            nodes = walk_nodes(&w);
        else
            nodes = Py_NewRef(Py_None);
        PyObject *several = walk_several(&w, least);
        if (nodes && several)
            answer = PyTuple_Pack(2, nodes, several);
        Py_XDECREF(nodes);
        Py_XDECREF(several);
    }
    walk_end(&w);
    if (collects)
        PyGC_Enable();
    return answer;
}

/* ---- the order of producers ---- */

/* A gradient that a slot gets: from which node, by which edge. */
typedef struct producer {
    PyObject *node; /* borrowed */
    long long sequence;
    int edge;
    int place; /* among those of its slot */
} producer;

/* The order of all gradients. */
typedef struct ordering {
    PyObject *roots;
    PyObject *sequence_nr; /* a str */
    PyObject *nodes;
    PyObject *numbers; /* of the nodes in their list */
    int *out;          /* of the next gradient */
} ordering;

/* producer_compare: torch's engine runs the node with the largest number first, on one thread. */
static int producer_compare(const void *left, const void *right)
{
    const producer *a = left;
    const producer *b = right;
    if (a->sequence != b->sequence)
        return a->sequence > b->sequence ? -1 : 1;
    if (a->edge != b->edge)
        return a->edge < b->edge ? -1 : 1;
    return a->place < b->place ? -1 : 1;
}

static int producer_read(producer *one, PyObject *pair, const ordering *order)
{
    one->node = PyTuple_GET_ITEM(pair, 0);
    Py_ssize_t edge = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1));
    if (edge == -1 && PyErr_Occurred())
        return -1;
    if (one->node == Py_None) {
        one->node = PyList_GetItem(order->roots, edge);
        edge = 0;
    }
    if (!one->node)
        return -1;
    one->edge = (int)edge;
    PyObject *number = PyObject_CallMethodNoArgs(one->node, order->sequence_nr);
    if (!number)
        return -1;
    one->sequence = PyLong_AsLongLong(number);
    Py_DECREF(number);
    if (one->sequence == -1 && PyErr_Occurred())
        return -1;
    return 0;
}

/* node_number: of a node in the list, which gets it if it is new. NONE with an exception. */
static Py_ssize_t node_number(const ordering *order, PyObject *node)
{
    PyObject *known = PyDict_GetItemWithError(order->numbers, node);
    if (known)
        return PyLong_AsSsize_t(known);
    if (PyErr_Occurred())
        return NONE;
    Py_ssize_t next = PyList_GET_SIZE(order->nodes);
    PyObject *number = PyLong_FromSsize_t(next);
    if (!number)
        return NONE;
    int status = PyDict_SetItem(order->numbers, node, number);
    Py_DECREF(number);
    if (status < 0 || PyList_Append(order->nodes, node) < 0)
        return NONE;
    return next;
}

/* slot_order: writes four numbers for each gradient of a slot, in order: that of the node, the
 * edge, the slot, the key. */
static int slot_order(ordering *order, PyObject *pairs, int slot)
{
    Py_ssize_t n = PyList_GET_SIZE(pairs);
    producer *each = fan_calloc((size_t)(n + 1) * sizeof *each);
    if (!each) {
        PyErr_NoMemory();
        return -1;
    }
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        each[i].place = (int)i;
        status = producer_read(&each[i], PyList_GET_ITEM(pairs, i), order);
    }
    if (status == 0)
        qsort(each, (size_t)n, sizeof *each, producer_compare);
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        Py_ssize_t number = node_number(order, each[i].node);
        if (number == NONE)
            status = -1;
        *order->out++ = (int)number;
        *order->out++ = each[i].edge;
        *order->out++ = slot;
        *order->out++ = (int)i;
    }
    fan_free(each);
    return status;
}

static PyObject *in_order(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    PyObject *slots = a[0];
    Py_ssize_t edges = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots); i++)
        edges += PyList_GET_SIZE(PyList_GET_ITEM(slots, i));
    ordering order = {
        .roots = a[1],
        .sequence_nr = PyUnicode_InternFromString("_sequence_nr"),
        .nodes = PyList_New(0),
        .numbers = PyDict_New(),
    };
    PyObject *layout = PyBytes_FromStringAndSize(NULL, edges * 4 * (Py_ssize_t)sizeof(int));
    PyObject *answer = NULL;
    int status = -1;
    bool made = order.sequence_nr && order.nodes && order.numbers;
    if (made && layout) {
        status = 0;
        order.out = (int *)(void *)PyBytes_AS_STRING(layout);
    }
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(slots); i++)
        status = slot_order(&order, PyList_GET_ITEM(slots, i), (int)i);
    if (status == 0)
        answer = PyTuple_Pack(2, order.nodes, layout);
    Py_XDECREF(order.sequence_nr);
    Py_XDECREF(order.nodes);
    Py_XDECREF(order.numbers);
    Py_XDECREF(layout);
    return answer;
}

/* ---- the hooks of producers ---- */

/* Items of what the hooks of a pass share. BUFFER: has the sums. TASK: a list of one: the number of
 * the pass. CURRENT: returns the number of the pass that runs on this thread. COMING, KEPT: lists,
 * an int for each slot: how many gradients have not come yet, and how many are in the buffer.
 * PLACES: a dict: the memory for the sum of each slot that has a gradient. EMPTY_LIKE: makes such
 * memory. ADD, TAKE: of the buffer.
 * ACQUIRE, RELEASE: of a lock, as nodes of several devices run on several threads. ARRIVE: a
 * function of a slot, a key and a gradient, which returns what torch gets. KEY, OUT: the
 * names for add and take. */
enum {
    BUFFER,
    TASK,
    CURRENT,
    COMING,
    KEPT,
    PLACES,
    EMPTY_LIKE,
    ADD,
    TAKE,
    ACQUIRE,
    RELEASE,
    ARRIVE,
    N_GIVEN,
    KEY = N_GIVEN,
    OUT,
    N_SHARED
};

/* Items of an edge: its index, the slot that its gradient belongs to, the key there, the dtype;
 * None in its place: each gradient goes to `arrive`. */
enum {
    EDGE,
    EDGE_SLOT,
    EDGE_KEY,
    EDGE_DTYPE
};

static Py_ssize_t count_of(PyObject *shared, int which, Py_ssize_t slot)
{
    return PyLong_AsSsize_t(PyList_GET_ITEM(PyTuple_GET_ITEM(shared, which), slot));
}

static int count_set(PyObject *shared, int which, Py_ssize_t slot, Py_ssize_t count)
{
    PyObject *number = PyLong_FromSsize_t(count);
    if (!number)
        return -1;
    return PyList_SetItem(PyTuple_GET_ITEM(shared, which), slot, number);
}

/* has_dtype: 1: a tensor is of torch's class and of a dtype; -1 with an exception. */
static int has_dtype(PyObject *gradient, PyObject *dtype)
{
    if (!fan_is_tensor(gradient) || !fan_plain_is_detached(gradient))
        return 0;
    PyObject *own = PyObject_GetAttr(gradient, fan_state_get()->str_dtype);
    if (!own)
        return -1;
    int same = own == dtype;
    Py_DECREF(own);
    return same;
}

/* edge_count: a gradient of an edge is in the buffer. */
static int edge_count(PyObject *shared, PyObject *edge)
{
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(edge, EDGE_SLOT));
    if (count_set(shared, COMING, slot, count_of(shared, COMING, slot) - 1) < 0)
        return -1;
    return count_set(shared, KEPT, slot, count_of(shared, KEPT, slot) + 1);
}

/* edge_add: adds a gradient to the sum of its slot. 1: done; 0: it is no plain contribution; -1
 * with an exception. */
static int edge_add(PyObject *shared, PyObject *edge, PyObject *gradient)
{
    PyObject *args[] = {PyTuple_GET_ITEM(edge, EDGE_SLOT), gradient,
                        PyTuple_GET_ITEM(edge, EDGE_KEY)};
    buffer_object *buffer = fan_buffer_self(PyTuple_GET_ITEM(shared, BUFFER));
    int added = fan_buffer_add_plain(buffer, args, PyTuple_GET_ITEM(shared, KEY));
    if (added <= 0)
        return added;
    return edge_count(shared, edge) < 0 ? -1 : 1;
}

/* first_arrive: the first gradient of a slot, which memory for the sum replaces. Returns that
 * memory. NULL without an exception: it is no plain contribution. */
static PyObject *first_arrive(PyObject *shared, PyObject *edge, PyObject *gradient)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    char *data = NULL;
    if (!fan_plain_import_as(gradient, true, &kind, &data))
        return NULL;
    PyObject *slot = PyTuple_GET_ITEM(edge, EDGE_SLOT);
    PyObject *memory = PyObject_CallOneArg(PyTuple_GET_ITEM(shared, EMPTY_LIKE), gradient);
    if (!memory)
        return NULL;
    int status = edge_add(shared, edge, gradient);
    if (status == 0) { /* a new buffer takes its first contribution by its general path */
        PyObject *args[] = {slot, gradient, PyTuple_GET_ITEM(edge, EDGE_KEY)};
        PyObject *add = PyTuple_GET_ITEM(shared, ADD);
        PyObject *names = PyTuple_GET_ITEM(shared, KEY);
        status = fan_drop_result(PyObject_Vectorcall(add, args, 2, names));
        if (status == 0)
            status = edge_count(shared, edge);
    }
    if (status >= 0)
        status = PyDict_SetItem(PyTuple_GET_ITEM(shared, PLACES), slot, memory);
    if (status < 0)
        Py_CLEAR(memory);
    return memory;
}

/* last_write: writes the sum of a slot where torch keeps its first gradient. */
static int last_write(PyObject *shared, PyObject *edge)
{
    PyObject *slot = PyTuple_GET_ITEM(edge, EDGE_SLOT);
    PyObject *places = PyTuple_GET_ITEM(shared, PLACES);
    PyObject *memory = Py_XNewRef(PyDict_GetItemWithError(places, slot));
    if (!memory)
        return -1;
    int status = PyDict_DelItem(places, slot);
    if (status == 0) {
        PyObject *args[] = {slot, memory};
        PyObject *names = PyTuple_GET_ITEM(shared, OUT);
        PyObject *take = PyTuple_GET_ITEM(shared, TAKE);
        status = fan_drop_result(PyObject_Vectorcall(take, args, 0, names));
    }
    Py_DECREF(memory);
    return status;
}

/* plain_arrive: what torch gets instead of a gradient that is a plain contribution. NULL without an
 * exception: it is another one, or the only one of its slot. */
static PyObject *plain_arrive(PyObject *shared, PyObject *edge, PyObject *gradient)
{
    PyObject *places = PyTuple_GET_ITEM(shared, PLACES);
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(edge, EDGE_SLOT));
    Py_ssize_t kept = count_of(shared, KEPT, slot);
    bool is_last = count_of(shared, COMING, slot) == 1;
    bool is_only = is_last && kept == 0;
    if (kept < 0 || is_only || fan_sched_active())
        return NULL;
    PyObject *dtype = PyTuple_GET_ITEM(edge, EDGE_DTYPE);
    if (dtype == Py_None)
        return NULL;
    if (kept == 0) { /* the others are plain if they are like the first one */
        if (has_dtype(gradient, dtype) <= 0)
            return NULL;
        return first_arrive(shared, edge, gradient);
    }
    if (!fan_is_tensor(gradient))
        return NULL;
    if (is_last && PyDict_Contains(places, PyTuple_GET_ITEM(edge, EDGE_SLOT)) <= 0)
        return NULL;
    if (edge_add(shared, edge, gradient) <= 0)
        return NULL;
    if (is_last && last_write(shared, edge) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

/* edge_arrive: what torch gets instead of a gradient. */
static PyObject *edge_arrive(PyObject *shared, PyObject *edge, PyObject *gradient)
{
    PyObject *goes_on = plain_arrive(shared, edge, gradient);
    if (goes_on || PyErr_Occurred())
        return goes_on;
    return PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(shared, ARRIVE),
                                        PyTuple_GET_ITEM(edge, EDGE_SLOT),
                                        PyTuple_GET_ITEM(edge, EDGE_KEY), gradient, NULL);
}

/* is_of_pass: 1: the pass that runs on this thread is that of the hooks. */
static int is_of_pass(PyObject *shared)
{
    PyObject *current = PyObject_CallNoArgs(PyTuple_GET_ITEM(shared, CURRENT));
    if (!current)
        return -1;
    PyObject *task = PyList_GetItem(PyTuple_GET_ITEM(shared, TASK), 0);
    int same = -1;
    if (task)
        same = PyObject_RichCompareBool(current, task, Py_EQ);
    Py_DECREF(current);
    return same;
}

/* edges_arrive: replaces the gradients of a node's edges in a new tuple. */
static int edges_arrive(PyObject *shared, PyObject *edges, PyObject *goes_on)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(edges); i++) {
        PyObject *edge = PyTuple_GET_ITEM(edges, i);
        Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GET_ITEM(edge, EDGE));
        if (at >= PyTuple_GET_SIZE(goes_on)) {
            PyErr_Format(PyExc_RuntimeError, "backward: a node made %zd gradients, not %zd or more",
                         PyTuple_GET_SIZE(goes_on), at + 1);
            return -1;
        }
        PyObject *gradient = PyTuple_GET_ITEM(goes_on, at);
        PyObject *one = edge_arrive(shared, edge, gradient);
        if (!one)
            return -1;
        PyTuple_SET_ITEM(goes_on, at, one);
        Py_DECREF(gradient);
    }
    return 0;
}

/* produced: the hook of a node: what it made, and what it took. Returns what torch gets, or None:
 * nothing is replaced. self: what the hooks share, and the edges of the node. */
static PyObject *produced(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *shared = PyTuple_GET_ITEM(self, 0);
    if (nargs != 2 || !PyTuple_CheckExact(args[0]))
        return PyErr_Format(PyExc_TypeError, "backward: expected two tuples of gradients");
    int ours = is_of_pass(shared);
    if (ours <= 0)
        return ours < 0 ? NULL : Py_NewRef(Py_None);
    Py_ssize_t n = PyTuple_GET_SIZE(args[0]);
    PyObject *goes_on = PyTuple_New(n);
    if (!goes_on)
        return NULL;
    for (Py_ssize_t i = 0; i < n; i++)
        PyTuple_SET_ITEM(goes_on, i, Py_NewRef(PyTuple_GET_ITEM(args[0], i)));
    int status = fan_drop_result(PyObject_CallNoArgs(PyTuple_GET_ITEM(shared, ACQUIRE)));
    if (status == 0) {
        status = edges_arrive(shared, PyTuple_GET_ITEM(self, 1), goes_on);
        PyObject *error = fan_exception_take();
        if (fan_drop_result(PyObject_CallNoArgs(PyTuple_GET_ITEM(shared, RELEASE))) < 0)
            status = -1;
        if (error)
            fan_exception_put(error);
    }
    if (status < 0)
        Py_CLEAR(goes_on);
    return goes_on;
}

/* handle_remove: what `remove()` of torch's RemovableHandle does to the one dict of a node's hook,
 * without Python. */
static int handle_remove(PyObject *handle, PyObject *names)
{
    PyObject *ref = PyObject_GetAttr(handle, PyTuple_GET_ITEM(names, 0));
    PyObject *id = NULL;
    PyObject *hooks = NULL;
    int status = -1;
    if (ref)
        id = PyObject_GetAttr(handle, PyTuple_GET_ITEM(names, 1));
    if (id)
        hooks = PyObject_CallNoArgs(ref);
    if (hooks)
        status = 0;
    if (hooks && hooks != Py_None && PyObject_DelItem(hooks, id) < 0) {
        status = -1;
        if (PyErr_ExceptionMatches(PyExc_KeyError)) {
            PyErr_Clear();
            status = 0;
        }
    }
    Py_XDECREF(ref);
    Py_XDECREF(id);
    Py_XDECREF(hooks);
    return status;
}

static PyObject *remove_hooks(PyObject *Py_UNUSED(m), PyObject *handles)
{
    PyObject *names = Py_BuildValue("(ss)", "hooks_dict_ref", "id");
    int status = names ? 0 : -1;
    while (status == 0 && PyList_GET_SIZE(handles)) {
        Py_ssize_t last = PyList_GET_SIZE(handles) - 1;
        status = handle_remove(PyList_GET_ITEM(handles, last), names);
        if (status == 0)
            status = PyList_SetSlice(handles, last, last + 1, NULL);
    }
    Py_XDECREF(names);
    return fan_none_unless(status);
}

static PyMethodDef produced_def = {"produced", (PyCFunction)(void (*)(void))produced, METH_FASTCALL,
                                   NULL};

static PyObject *producers(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    const fan_state *state = fan_state_get();
    PyObject *each = a[N_GIVEN];
    if (Py_TYPE(a[BUFFER]) != state->buffer_type) {
        return PyErr_Format(PyExc_TypeError, "_producers: expected an InputBuffer, got %s",
                            FAN_TYPE_TEXT(a[BUFFER]));
    }
    size_t n = fan_buffer_self(a[BUFFER])->n;
    if ((size_t)PyList_GET_SIZE(a[COMING]) != n || (size_t)PyList_GET_SIZE(a[KEPT]) != n)
        return PyErr_Format(PyExc_ValueError, "_producers: expected one item for each slot");
    PyObject *key = Py_BuildValue("(O)", state->str_key);
    PyObject *out = PyTuple_Pack(2, state->str_slot, state->str_out);
    PyObject *shared = NULL;
    if (key && out)
        shared = PyTuple_New(N_SHARED);
    if (shared) {
        for (Py_ssize_t i = 0; i < N_GIVEN; i++)
            PyTuple_SET_ITEM(shared, i, Py_NewRef(a[i]));
        PyTuple_SET_ITEM(shared, KEY, Py_NewRef(key));
        PyTuple_SET_ITEM(shared, OUT, Py_NewRef(out));
    }
    PyObject *hooks = NULL;
    if (shared)
        hooks = PyList_New(0);
    for (Py_ssize_t i = 0; hooks && i < PyList_GET_SIZE(each); i++) {
        PyObject *self = PyTuple_Pack(2, shared, PyList_GET_ITEM(each, i));
        PyObject *hook = NULL;
        if (self)
            hook = PyCFunction_New(&produced_def, self);
        Py_XDECREF(self);
        fan_list_add(&hooks, hook);
    }
    Py_XDECREF(key);
    Py_XDECREF(out);
    Py_XDECREF(shared);
    return hooks;
}

#include "py/declared/producers.h"
