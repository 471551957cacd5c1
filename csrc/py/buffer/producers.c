/* producers: for fanin.torch.backward: the places of a graph at which several gradients meet, and
 * the hooks of the nodes that make these gradients. The nodes are torch's: `next_functions` of a
 * node has, for each of its edges, the node that the edge leads to and the index of one of the
 * gradients that this node takes. */
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"
#include "py/arrays/dlpack.h"

/* ---- where gradients meet ---- */

/* A gradient of a node, and the first edge that leads there. from is NULL for a gradient that a
 * pass begins with. All nodes are borrowed from walk.nodes. */
typedef struct place {
    PyObject *to;
    Py_ssize_t index;
    PyObject *from;
    Py_ssize_t edge;
} place;

/* A hash table by node and index, with linear probing; size is a power of two. */
typedef struct place_table {
    place *places;
    size_t size;
    size_t used;
} place_table;

typedef struct walk {
    place_table table;
    PyObject *nodes;   /* a set: the nodes that were found */
    PyObject *waiting; /* a list: those whose edges were not read yet */
    PyObject *several; /* a dict: (node, index) -> list of (node or None, edge) */
} walk;

static size_t place_hash(PyObject *to, Py_ssize_t index)
{
    uint64_t mixed = ((uint64_t)(uintptr_t)to >> 4) + (uint64_t)index * 0x9E3779B9u;
    return (size_t)((mixed * UINT64_C(0x9E3779B97F4A7C15)) >> 32);
}

/* place_find: the entry of a place, or the empty one where it belongs. */
static place *place_find(const place_table *table, PyObject *to, Py_ssize_t index)
{
    size_t mask = table->size - 1;
    size_t at = place_hash(to, index) & mask;
    while (table->places[at].to) {
        place *found = &table->places[at];
        if (found->to == to && found->index == index)
            return found;
        at = (at + 1) & mask;
    }
    return &table->places[at];
}

static int place_table_grow(place_table *table)
{
    place_table larger = {.size = table->size ? 2 * table->size : 256, .used = table->used};
    larger.places = fan_calloc(larger.size * sizeof *larger.places);
    if (!larger.places) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < table->size; i++) {
        const place *old = &table->places[i];
        if (old->to)
            *place_find(&larger, old->to, old->index) = *old;
    }
    fan_free(table->places);
    *table = larger;
    return 0;
}

static int edge_append(PyObject *edges, PyObject *from, Py_ssize_t edge)
{
    PyObject *pair = Py_BuildValue("(On)", fan_or_none(from), edge);
    if (!pair)
        return -1;
    int status = PyList_Append(edges, pair);
    Py_DECREF(pair);
    return status;
}

/* edges_of: the list of the edges that lead to a place, which more than one does. Borrowed. */
static PyObject *edges_of(walk *w, const place *one)
{
    PyObject *key = Py_BuildValue("(On)", one->to, one->index);
    if (!key)
        return NULL;
    PyObject *edges = PyDict_GetItemWithError(w->several, key);
    if (!edges && !PyErr_Occurred()) {
        PyObject *made = PyList_New(0);
        if (made && edge_append(made, one->from, one->edge) == 0 &&
            PyDict_SetItem(w->several, key, made) == 0)
            edges = made;
        Py_XDECREF(made);
    }
    Py_DECREF(key);
    return edges;
}

/* node_found: a node whose edges are to be read, unless they were. */
static int node_found(walk *w, PyObject *node)
{
    int known = PySet_Contains(w->nodes, node);
    if (known)
        return known < 0 ? -1 : 0;
    if (PySet_Add(w->nodes, node) < 0)
        return -1;
    return PyList_Append(w->waiting, node);
}

/* edge_found: an edge leads from a node to a place. */
static int edge_found(walk *w, PyObject *from, Py_ssize_t edge, PyObject *pair)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "_fan_ins: expected pairs of a node and an index");
        return -1;
    }
    PyObject *to = PyTuple_GET_ITEM(pair, 0);
    if (to == Py_None)
        return 0;
    Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1));
    if (index == -1 && PyErr_Occurred())
        return -1;
    if (2 * w->table.used >= w->table.size && place_table_grow(&w->table) < 0)
        return -1;
    place *one = place_find(&w->table, to, index);
    if (one->to) {
        PyObject *edges = edges_of(w, one);
        return edges ? edge_append(edges, from, edge) : -1;
    }
    *one = (place){.to = to, .index = index, .from = from, .edge = edge};
    w->table.used++;
    return node_found(w, to);
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
    while (status == 0 && PyList_GET_SIZE(w->waiting)) {
        Py_ssize_t last = PyList_GET_SIZE(w->waiting) - 1;
        PyObject *node = Py_NewRef(PyList_GET_ITEM(w->waiting, last));
        status = PyList_SetSlice(w->waiting, last, last + 1, NULL);
        if (status == 0)
            status = node_read(w, node, next_functions);
        Py_DECREF(node);
    }
    Py_DECREF(next_functions);
    return status;
}

static PyObject *fan_ins(PyObject *Py_UNUSED(m), PyObject *roots)
{
    if (!PyList_Check(roots))
        return PyErr_Format(PyExc_TypeError, "_fan_ins: expected a list, got %s",
                            FAN_TYPE_TEXT(roots));
    walk w = {.nodes = PySet_New(NULL), .waiting = PyList_New(0), .several = PyDict_New()};
    PyObject *answer = NULL;
    bool is_made = w.nodes && w.waiting && w.several;
    if (is_made && walk_run(&w, roots) == 0)
        answer = PyTuple_Pack(2, w.nodes, w.several);
    fan_free(w.table.places);
    Py_XDECREF(w.nodes);
    Py_XDECREF(w.waiting);
    Py_XDECREF(w.several);
    return answer;
}

/* ---- the hooks of producers ---- */

/* Items of what the hooks of a pass share. BUFFER: has the sums. TASK: a list of one: the number of
 * the pass. CURRENT: returns the number of the pass that runs on this thread. COMING, KEPT: lists,
 * an int for each slot: how many gradients have not come yet, and how many are in the buffer.
 * PLACES: a dict: the memory for the sum of each slot that has a gradient. EMPTY_LIKE: makes such
 * memory. ADD, TAKE: of the buffer.
 * ACQUIRE, RELEASE: of a lock, as nodes of several devices run on several threads. ARRIVE: a
 * function of a slot, a key and a gradient, which returns what goes on to torch. KEY, OUT: the
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
    /* A new buffer takes its first contribution by its general path. */
    PyObject *args[] = {slot, gradient, PyTuple_GET_ITEM(edge, EDGE_KEY)};
    PyObject *add = PyTuple_GET_ITEM(shared, ADD);
    int status = fan_drop_result(PyObject_Vectorcall(add, args, 2, PyTuple_GET_ITEM(shared, KEY)));
    if (status == 0)
        status = edge_count(shared, edge);
    if (status == 0)
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

/* plain_arrive: what goes on to torch in the place of a gradient that is a plain contribution. NULL
 * without an exception: it is another one, or the only one of its slot. */
static PyObject *plain_arrive(PyObject *shared, PyObject *edge, PyObject *gradient)
{
    PyObject *places = PyTuple_GET_ITEM(shared, PLACES);
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(edge, EDGE_SLOT));
    Py_ssize_t kept = count_of(shared, KEPT, slot);
    bool is_last = count_of(shared, COMING, slot) == 1;
    bool is_only = is_last && kept == 0;
    if (kept < 0 || is_only || fan_sched_active())
        return NULL;
    if (has_dtype(gradient, PyTuple_GET_ITEM(edge, EDGE_DTYPE)) <= 0)
        return NULL;
    if (kept == 0)
        return first_arrive(shared, edge, gradient);
    if (is_last && PyDict_Contains(places, PyTuple_GET_ITEM(edge, EDGE_SLOT)) <= 0)
        return NULL;
    if (edge_add(shared, edge, gradient) <= 0)
        return NULL;
    if (is_last && last_write(shared, edge) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

/* edge_arrive: what goes on to torch in the place of a gradient. */
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

/* produced: the hook of a node: what it made, and what it took. Returns what goes on, or None:
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

static PyMethodDef produced_def = {"produced", (PyCFunction)(void (*)(void))produced, METH_FASTCALL,
                                   NULL};

static PyObject *producers(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    const fan_state *state = fan_state_get();
    PyObject *each = a[N_GIVEN];
    if (Py_TYPE(a[BUFFER]) != state->buffer_type)
        return PyErr_Format(PyExc_TypeError, "_producers: expected an InputBuffer, got %s",
                            FAN_TYPE_TEXT(a[BUFFER]));
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
