/* node: fanin.Node.
 *
 * Names and the end of a node; arguments; the declarations of its slots (slots=); its streams
 * (stream=, device=); its edges; creation; the methods and the type. */
#include "py/engine/node_object.h"
#include "py/base/args.h"
#include "py/device/backends.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- the node ---- */

static node_object *node_cast(PyObject *o)
{
    return (node_object *)o;
}

/* ---- names, creation, end ---- */

bool fan_node_is_numbered(const fan_node *n)
{
    return !fan_node_object(n)->name;
}

void fan_node_text(const fan_node *n, char *buf, size_t size)
{
    node_object *self = fan_node_object(n);
    const char *name = NULL;
    Py_ssize_t all;
    if (self->name)
        name = PyUnicode_AsUTF8AndSize(self->name, &all);
    if (!name) {
        const char *type = Py_TYPE(self)->tp_name;
        if (n->ops->leaf)
            type = "leaf";
        else if (Py_TYPE(self) == fan_state_get()->node_type)
            type = "node";
        snprintf(buf, size, "%.80s %llu", type, (unsigned long long)n->number);
        return;
    }
    Py_ssize_t end = (Py_ssize_t)size - 1;
    if (end > all)
        end = all;
    while (end > 0 && ((unsigned char)name[end] & 0xC0) == 0x80) /* not inside a character */
        end--;
    memcpy(buf, name, (size_t)end);
    buf[end] = '\0';
}

void fan_node_hold(fan_node *n)
{
    Py_INCREF((PyObject *)fan_node_object(n));
}
void fan_node_drop(fan_node *n)
{
    Py_DECREF((PyObject *)fan_node_object(n));
}

void fan_node_free_parts(node_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    node_more *more = self->more;
    self->more = NULL;
    Py_CLEAR(self->fn);
    Py_CLEAR(self->release);
    Py_CLEAR(self->name);
    if (more) {
        for (int when = 0; when < FAN_HOOK_TIMES; when++)
            Py_XDECREF(more->hooks[when]);
        fan_slot_specs_fini(&more->slots);
        Py_XDECREF(more->names);
        Py_XDECREF(more->call_site);
        Py_XDECREF(more->kept);
        Py_XDECREF(more->out_buffers);
        Py_XDECREF(more->group);
        fan_free(more);
    }
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static void node_free_parts(fan_node *n)
{
    fan_node_free_parts(fan_node_object(n));
}

static const fan_node_ops node_ops = {
    .hold = fan_node_hold,
    .drop = fan_node_drop,
    .free = node_free_parts,
    .text = fan_node_text,
    .is_numbered = fan_node_is_numbered,
};

void fan_node_dealloc(PyObject *o)
{
    PyObject_GC_UnTrack(o);
    if (node_cast(o)->weakrefs)
        PyObject_ClearWeakRefs(o);
    fan_node_end(&node_cast(o)->node);
}

int fan_node_traverse(PyObject *o, visitproc visit, void *arg)
{
    const node_object *self = node_cast(o);
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(self->fn);
    Py_VISIT(self->release);
    for (uint32_t i = 0; i < self->node.nedges; i++) {
        if (self->node.edges[i].next)
            Py_VISIT((PyObject *)fan_node_object(self->node.edges[i].next));
    }
    const node_more *more = self->more;
    if (!more)
        return 0;
    Py_VISIT(more->group);
    for (int when = 0; when < FAN_HOOK_TIMES; when++)
        Py_VISIT(more->hooks[when]);
    Py_VISIT(more->kept);
    Py_VISIT(more->out_buffers);
    for (size_t i = 0; more->slots.held && i < more->slots.n; i++)
        Py_VISIT(more->slots.held[i]);
    return 0;
}

int fan_node_clear(PyObject *o)
{
    node_object *self = node_cast(o);
    Py_CLEAR(self->fn);
    Py_CLEAR(self->release);
    node_more *more = self->more;
    if (more) {
        for (int when = 0; when < FAN_HOOK_TIMES; when++)
            Py_CLEAR(more->hooks[when]);
        Py_CLEAR(more->group);
        Py_CLEAR(more->kept);
    }
    fan_node_unlink(&self->node);
    return 0;
}

/* ---- arguments ---- */

node_object *fan_node_arg(PyObject *o)
{
    const fan_state *st = fan_state_get();
    PyTypeObject *type = Py_TYPE(o);
    if (type == st->node_type || type == st->leaf_type)
        return node_cast(o);
    if (PyType_IsSubtype(type, st->node_type) && node_cast(o)->node.made)
        return node_cast(o);
    return NULL;
}

/* ---- the declarations of its slots ---- */

static bool is_numeric_array(PyObject *o)
{
    return PyArray_CheckExact(o) &&
           fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) != FAN_DT_NONE;
}

/* declare_arrays: the usual case, a list or tuple of ndarrays only: 1; 0: something else; -1 with
 * an exception. */
static int declare_arrays(fan_slot_specs *specs, PyObject *slots)
{
    if (!PyList_CheckExact(slots) && !PyTuple_CheckExact(slots))
        return 0;
    size_t n = (size_t)PySequence_Fast_GET_SIZE(slots);
    PyObject **items = PySequence_Fast_ITEMS(slots);
    for (size_t i = 0; i < n; i++) {
        if (!is_numeric_array(items[i]))
            return 0;
    }
    if (!n)
        return 0;
    specs->specs = fan_calloc(n * sizeof *specs->specs);
    if (!specs->specs)
        return fan_no_memory();
    specs->n = n;
    for (size_t i = 0; i < n; i++) {
        const PyArrayObject *array = (PyArrayObject *)items[i];
        fan_slot_spec *spec = &specs->specs[i];
        spec->dtype = fan_dtype_of_descr(PyArray_DESCR(array));
        spec->accumulate = FAN_DT_NONE;
        spec->device = fan_device_hold(fan_cpu());
        const int64_t *shape = (const int64_t *)PyArray_DIMS(array);
        if (fan_slot_spec_shape(spec, PyArray_NDIM(array), shape) < 0)
            return -1;
    }
    return 1;
}

/* is_single: whether slots= is one array, or another object that is no sequence; -1 with an
 * exception. */
static int is_single(PyObject *slots)
{
    if (PyList_Check(slots) || PyTuple_Check(slots))
        return 0;
    int bare = fan_is_bare(slots);
    if (bare == 0 && !Py_TYPE(slots)->tp_iter)
        return 1;
    return bare;
}

/* declare_other: what declare_arrays left: a single object, which is an error, or a sequence of
 * arrays, Slots and Nones. */
static int declare_other(node_more *more, PyObject *slots, const char *name)
{
    int single = is_single(slots);
    if (single < 0)
        return -1;
    if (single) {
        return fan_refuse(
            PyExc_TypeError,
            "slots: expected a sequence of arrays, Slots and Nones, got one %.200s: give [it]",
            Py_TYPE(slots)->tp_name);
    }
    PyObject *list = PySequence_List(slots);
    if (!list)
        return -1;
    more->slots.nones = true;
    int bad = fan_slot_specs_of(list, name, &more->slots, &more->names);
    Py_DECREF(list);
    return bad;
}

/* is_count: whether there may be n declarations; `inputs` as inputs= gives it, 0: not given. */
static bool is_count(size_t n, uint32_t inputs)
{
    if (inputs)
        return n == inputs;
    return n > 0 && n <= UINT32_MAX;
}

int fan_node_declare(node_object *self, PyObject *slots, uint32_t *inputs)
{
    node_more *more = fan_node_more(self);
    if (!more)
        return -1;
    int arrays = declare_arrays(&more->slots, slots);
    if (arrays < 0)
        return -1;

    /* All else may fail with a message, for which the node's name is written. */
    int bad = 0;
    if (!arrays || !is_count(more->slots.n, *inputs)) {
        const fan_node_label name = fan_node_name(&self->node);
        fan_error_context w = {.buffer = name.text, .slot = -1, .key = -1};
        uint32_t expected = *inputs ? *inputs : 1;
        fan_error_context_push(&w);
        if (!arrays)
            bad = declare_other(more, slots, name.text);
        if (!bad && !is_count(more->slots.n, *inputs)) {
            bad =
                fan_refuse(PyExc_ValueError, "slots: expected one for each of %u input%s, got %zu",
                           expected, FAN_PLURAL(expected), more->slots.n);
        }
        fan_error_context_pop(&w);
    }
    if (!bad)
        *inputs = (uint32_t)more->slots.n;
    return bad;
}

/* ---- its streams (E4) ---- */

/* The arguments. */
typedef struct place_args {
    fan_stream *stream; /* held; NULL: not given */
    fan_device *device; /* held; NULL: not given */
    fan_stream_set *now;
} place_args;

static const fan_slot_specs *specs_of(const node_object *self)
{
    if (!fan_node_specs(&self->node))
        return NULL;
    return &self->more->slots;
}

/* current_for: the current stream of a device, in the example array's library if it has one; a
 * hold; NULL with an exception. */
static fan_stream *current_for(fan_device *d, PyObject *example)
{
    fan_stream *stream = NULL;
    if (example && fan_is_shared(d)) {
        fan_value v;
        bool known =
            fan_import(example, false, true, &v) == 0 && fan_library_stream(&v, NULL, &stream) == 0;
        if (!known)
            PyErr_Clear(); /* a Slot, or a library without streams */
        fan_value_release(&v);
    }
    if (!stream)
        stream = fan_stream_current(d);
    if (!stream)
        PyErr_NoMemory();
    return stream;
}

static bool can_wait_for(const fan_stream *own, const fan_device *d)
{
    if (!d || !d->backend->has_streams)
        return true;
    return d->backend == own->device->backend && d->self == own->device->self;
}

/* check_slots: stream= must be of the device of a slot, and able to wait for what every slot
 * holds. */
static int check_slots(const fan_slot_specs *specs, const fan_stream *own)
{
    if (!specs)
        return 0;
    const fan_slot_spec *wrong = specs->specs;
    for (size_t i = 0; i < specs->n; i++) {
        const fan_device *d = specs->specs[i].device;
        if (!can_wait_for(own, d)) {
            wrong = &specs->specs[i];
            break;
        }
        if (!d || d == own->device)
            wrong = NULL;
    }
    if (!wrong)
        return 0;
    const fan_device *d = wrong->device;
    char one[32], two[32];
    return fan_refuse(PyExc_ValueError,
                      "stream: expected one of %s, the device of slot %zu, got stream %llu of %s%s",
                      fan_device_text(d, one, sizeof one), (size_t)(wrong - specs->specs),
                      (unsigned long long)own->handle,
                      fan_device_text(own->device, two, sizeof two),
                      fan_device_of_another(own->device, d));
}

/* place_by_slots: without stream=: the current stream of the first device with streams that a slot
 * declares. The node is of the host if all slots declare the CPU. */
static int place_by_slots(node_object *self, place_args *a, PyObject *slots)
{
    const fan_slot_specs *specs = specs_of(self);
    self->node.host = a->device || specs;
    if (a->device || !specs)
        return 0;
    for (size_t i = 0; i < specs->n && !a->stream; i++) {
        fan_device *d = specs->specs[i].device;
        bool has_streams = d && d->backend->has_streams;
        if (!d || has_streams)
            self->node.host = false;
        if (!has_streams)
            continue;
        PyObject *example = NULL;
        if (slots && PyList_Check(slots) && (Py_ssize_t)i < PyList_GET_SIZE(slots))
            example = PyList_GET_ITEM(slots, (Py_ssize_t)i);
        a->stream = current_for(d, example);
        if (!a->stream)
            return -1;
    }
    return 0;
}

static int place_in(node_object *self, place_args *a, PyObject *slots)
{
    const fan_device *device = a->device;
    if (a->stream && device && device != a->stream->device) {
        char one[32], two[32];
        return fan_refuse(
            PyExc_ValueError, "stream: expected one of %s, its device, got stream %llu of %s",
            fan_device_text(device, one, sizeof one), (unsigned long long)a->stream->handle,
            fan_device_text(a->stream->device, two, sizeof two));
    }
    if (!a->stream && device && device->backend->has_streams) {
        a->stream = current_for(a->device, NULL);
        if (!a->stream)
            return -1;
    }
    int bad;
    if (a->stream)
        bad = check_slots(specs_of(self), a->stream);
    else
        bad = place_by_slots(self, a, slots);
    if (bad < 0)
        return -1;

    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    fan_status status = fan_stream_set_now(&a->now, &err);
    if (status == FAN_OK && a->stream)
        status = fan_stream_set_with(a->now, a->stream, &self->node.streams, &err);
    else if (status == FAN_OK)
        self->node.streams = fan_stream_set_hold(a->now);
    return fan_check(status, &err);
}

/* raise_about: prefixes the exception with the node and the argument: "Mul: stream: ..". */
static int raise_about(const char *name, const char *what)
{
    PyObject *e = fan_exception_take();
    PyErr_Format((PyObject *)Py_TYPE(e), "%s: %s: %S", name, what, e);
    Py_DECREF(e);
    return -1;
}

int fan_node_place(node_object *self, PyObject *stream, PyObject *device, PyObject *slots)
{
    if (!fan_given(stream) && !fan_given(device) && !specs_of(self)) /* the usual case */
        return FAN_CHECK(fan_stream_set_now(&self->node.streams, &err));
    const fan_node_label name = fan_node_name(&self->node);
    fan_error_context w = {.buffer = name.text, .slot = -1, .key = -1};
    place_args a = {0};
    if (fan_stream_arg(stream, &a.stream) < 0)
        return raise_about(name.text, "stream");
    if (fan_device_arg(device, &a.device) < 0) {
        fan_stream_drop(a.stream);
        return raise_about(name.text, "device");
    }
    fan_error_context_push(&w);
    int bad = place_in(self, &a, slots);
    fan_error_context_pop(&w);
    fan_stream_drop(a.stream);
    fan_device_drop(a.device);
    fan_stream_set_drop(a.now);
    return bad;
}

/* ---- its edges ---- */

/* node_of: the node of a pair (node, slot); borrowed; NULL: it is no such pair. */
static node_object *node_of(PyObject *edge)
{
    if (!PyTuple_Check(edge) || PyTuple_GET_SIZE(edge) != 2)
        return NULL;
    return fan_node_arg(PyTuple_GET_ITEM(edge, 0));
}

/* edge_advice: what to give instead of an edge that is no pair of a node and a slot; "" where that
 * is not known. */
static const char *edge_advice(PyObject *edge)
{
    if (fan_node_arg(edge))
        return ": give [(node, slot)]";
    if (PyTuple_Check(edge) && PyTuple_GET_SIZE(edge))
        edge = PyTuple_GET_ITEM(edge, 0);
    if (fan_is_array(edge))
        return ": arrays and tensors are no nodes; fanin.Leaf(array) makes one";
    return "";
}

/* is_one_edge: whether a sequence of edges is a single edge, as in edges=(node, 0). */
static bool is_one_edge(PyObject *edges)
{
    return node_of(edges) && PyIndex_Check(PyTuple_GET_ITEM(edges, 1));
}

/* edge_of_index: a slot that is another integer; NULL with an exception. */
__attribute__((noinline, cold)) static node_object *edge_of_index(const node_object *self,
                                                                  PyObject *edge, size_t index,
                                                                  uint32_t *slot)
{
    node_object *to = node_of(edge);
    PyObject *which = NULL;
    int64_t i = 0;
    int bad = 0;
    if (to)
        which = PyTuple_GET_ITEM(edge, 1);
    bool out_of_range = which && PyLong_CheckExact(which);
    const fan_node_label name = fan_node_name(&self->node);
    fan_error_context w = {.buffer = name.text, .slot = -1, .key = -1};
    fan_error_context_push(&w);
    if (!to) {
        bad = fan_refuse(PyExc_TypeError,
                         "edge %zu: expected a pair of a fanin.Node or fanin.Leaf and one of its "
                         "slots, or None, got %R%s",
                         index, edge, edge_advice(edge));
    } else if (!out_of_range) {
        bad = fan_slot_index(which, "slot of an edge", &i);
        out_of_range = !bad && i >= (int64_t)to->node.inputs;
    }
    if (out_of_range) {
        bad = fan_refuse(PyExc_IndexError, "edge %zu: expected a slot from 0 to %u of %s, got %R",
                         index, to->node.inputs - 1, fan_node_name(&to->node).text, which);
    }
    fan_error_context_pop(&w);
    *slot = (uint32_t)i;
    if (bad)
        return NULL;
    return to;
}

/* edge_arg: None, or (node, slot): borrowed. */
static int edge_arg(const node_object *self, PyObject *edge, size_t index, fan_node **next,
                    uint32_t *slot)
{
    *slot = 0;
    *next = NULL;
    if (edge == Py_None)
        return 0;
    node_object *to = node_of(edge);
    Py_ssize_t i = -1;
    if (to)
        i = fan_small_index(PyTuple_GET_ITEM(edge, 1));
    if (i >= 0 && i < (Py_ssize_t)to->node.inputs) /* the usual case */
        *slot = (uint32_t)i;
    else
        to = edge_of_index(self, edge, index, slot);
    if (!to)
        return -1;
    *next = &to->node;
    return 0;
}

static int link_edges(node_object *self, PyObject *edges)
{
    PyObject *all = NULL;
    if (!PyList_CheckExact(edges) && !PyTuple_CheckExact(edges)) {
        if (fan_node_arg(edges)) {
            return fan_set_error(PyExc_TypeError,
                                 "edges: expected a sequence, got %s: give [(node, slot)]",
                                 FAN_TYPE_TEXT(edges));
        }
        if (fan_sequence_arg(edges, "edges", &all) < 0)
            return -1;
        edges = all;
    }
    Py_ssize_t n = PySequence_Fast_GET_SIZE(edges);
    int bad = FAN_CHECK(fan_node_room(&self->node, (size_t)n, &err));
    for (Py_ssize_t i = 0; i < n && !bad; i++) {
        if (i >= PySequence_Fast_GET_SIZE(edges)) /* __index__ may change the list */
            break;
        PyObject *edge = Py_NewRef(PySequence_Fast_GET_ITEM(edges, i));
        fan_node *next;
        uint32_t slot;
        bad = edge_arg(self, edge, (size_t)i, &next, &slot);
        if (!bad)
            fan_node_link(&self->node, next, slot);
        Py_DECREF(edge);
    }
    if (bad && is_one_edge(edges)) {
        PyErr_Clear();
        fan_set_error(PyExc_TypeError,
                      "edges: expected a sequence of edges, got the edge %R: give [(node, slot)]",
                      edges);
    }
    Py_XDECREF(all);
    return bad;
}

/* ---- creation ---- */

/* The arguments of Node, as core.pyi declares them. */
enum {
    FN,
    INPUTS,
    EDGES,
    SLOTS,
    RELEASE,
    NAME,
    STREAM,
    DEVICE,
    GROUP,
    BOXED,
    PARAMETERS
};

int fan_node_set_name(node_object *self, PyObject *name)
{
    self->name = PyObject_Str(name);
    if (!self->name || !fan_text_arg(self->name))
        return -1;
    return 0;
}

static int set_group(node_object *self, PyObject *group)
{
    bool by_value = PyLong_Check(group) || PyFloat_Check(group);
    if (by_value || PyTuple_Check(group) || PyBytes_Check(group)) {
        return fan_set_error(PyExc_TypeError,
                             "group must be a str or an object shared by the nodes (compared by "
                             "identity), got %s",
                             FAN_TYPE_TEXT(group));
    }
    node_more *more = fan_node_more(self);
    if (!more)
        return -1;
    more->group = Py_NewRef(group);
    if (PyUnicode_CheckExact(group)) /* equal strings are one group */
        PyUnicode_InternInPlace(&more->group);
    return 0;
}

/* set_call_site: where the caller made the node, if Python has a line. */
static int set_call_site(node_object *self)
{
    char line[256];
    fan_call_site(line, sizeof line);
    node_more *more = fan_node_more(self);
    if (!more)
        return -1;
    if (!line[0])
        return 0;
    more->call_site = PyUnicode_DecodeUTF8(line, (Py_ssize_t)strlen(line), "replace");
    if (!more->call_site)
        return -1;
    return 0;
}

/* inputs_arg: inputs=; 0: not given. */
static int inputs_arg(PyObject *given, uint32_t *inputs)
{
    *inputs = 0;
    if (!given)
        return 0;
    int64_t n = fan_small_index(given);
    if (PyList_Check(given) || PyTuple_Check(given)) {
        return fan_set_error(
            PyExc_TypeError,
            "Node: inputs: expected a number of gradients, got %s: edges are given "
            "by name, Node(fn, edges=[(node, slot)])",
            FAN_TYPE_TEXT(given));
    }
    if (n < 0 && fan_index(given, "inputs", NULL, &n) < 0)
        return -1;
    if (n < 1 || n >= INT32_MAX) {
        return fan_set_error(PyExc_ValueError,
                             "inputs: expected a number of gradients from 1 to %d, got %R",
                             INT32_MAX - 1, given);
    }
    *inputs = (uint32_t)n;
    return 0;
}

/* set_boxed: boxed=True, which needs a function in Python and no hook that gets the sums
 * afterwards (a subclass may have registered one before Node.__init__). */
static int set_boxed(node_object *self, PyObject *fn)
{
    if (fan_is_function(fn)) {
        return fan_set_error(PyExc_TypeError,
                             "%s: boxed: a function in C gets its sums by address, not in a list: "
                             "give boxed=False",
                             fan_node_name(&self->node).text);
    }
    node_more *more = fan_node_more(self);
    if (!more)
        return -1;
    if (more->hooks[FAN_HOOK_POST]) {
        return fan_set_error(PyExc_ValueError,
                             "%s: boxed: a hook after the node gets its sums: remove it, or give "
                             "boxed=False",
                             fan_node_name(&self->node).text);
    }
    more->boxed = true;
    return 0;
}

static int fill_in(node_object *self, PyObject *const *a)
{
    PyObject *release = fan_given(a[RELEASE]);
    if (!PyCallable_Check(a[FN])) {
        return fan_set_error(PyExc_TypeError, "fn: expected a function, got %s",
                             FAN_TYPE_TEXT(a[FN]));
    }
    if (release && !PyCallable_Check(release)) {
        return fan_set_error(PyExc_TypeError, "release: expected a function, got %s",
                             FAN_TYPE_TEXT(release));
    }
    if (fan_given(a[NAME]) && fan_node_set_name(self, a[NAME]) < 0)
        return -1;

    /* the slots and their place */
    uint32_t inputs;
    if (inputs_arg(a[INPUTS], &inputs) < 0)
        return -1;
    if (fan_given(a[SLOTS]) && fan_node_declare(self, a[SLOTS], &inputs) < 0)
        return -1;
    bool placed = a[STREAM] || a[DEVICE] || a[SLOTS];
    if ((placed || fan_streams_in_use()) &&
        fan_node_place(self, a[STREAM], a[DEVICE], a[SLOTS]) < 0)
        return -1;
    if (fan_given(a[GROUP]) && set_group(self, a[GROUP]) < 0)
        return -1;
    if (a[BOXED] == Py_True && set_boxed(self, a[FN]) < 0)
        return -1;
    if (fan_is_function(a[FN])) {
        uint32_t takes = ((function_object *)a[FN])->inputs;
        if (inputs && inputs != takes) {
            return fan_set_error(PyExc_ValueError, "%s: inputs: its function takes %u, got %u",
                                 fan_node_name(&self->node).text, takes, inputs);
        }
        inputs = takes;
    }
    if (!inputs)
        inputs = 1;
    self->node.inputs = inputs;
    if (fan_state_get()->detect && set_call_site(self) < 0)
        return -1;

    self->fn = Py_NewRef(a[FN]);
    self->release = Py_XNewRef(release);
    if (fan_given(a[EDGES]) && link_edges(self, a[EDGES]) < 0)
        return -1;
    self->node.made = true;
    return 0;
}

/* node_alloc: an empty node, not tracked yet. */
static node_object *node_alloc(PyTypeObject *type)
{
    node_object *self = PyObject_GC_New(node_object, type);
    if (!self)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    fan_node_init(&self->node, &node_ops, 1);
    return self;
}

static PyObject *node_new(PyTypeObject *type, PyObject *const *values)
{
    node_object *self = node_alloc(type);
    if (!self)
        return NULL;
    if (fill_in(self, values) < 0)
        Py_CLEAR(self);
    else
        PyObject_GC_Track((PyObject *)self); /* or gc.get_objects() would return it half made */
    return (PyObject *)self;
}

/* link_edge: edge i of a node that the C API makes. */
static int link_edge(node_object *self, const fanin_edge *edge, size_t i)
{
    if (!edge->next) {
        fan_node_link(&self->node, NULL, edge->slot);
        return 0;
    }
    node_object *to = fan_node_arg((PyObject *)edge->next);
    if (!to) {
        return fan_set_error(PyExc_TypeError,
                             "%s: edge %zu: expected a fanin.Node, a fanin.Leaf or NULL",
                             fan_node_name(&self->node).text, i);
    }
    if (edge->slot >= to->node.inputs) {
        return fan_set_error(PyExc_IndexError, "%s: edge %zu: expected a slot from 0 to %u, got %u",
                             fan_node_name(&self->node).text, i, to->node.inputs - 1, edge->slot);
    }
    fan_node_link(&self->node, &to->node, edge->slot);
    return 0;
}

PyObject *fan_node_new(function_object *fn, const fanin_edge *edges, size_t nedges, PyObject *name)
{
    node_object *self = node_alloc(fan_state_get()->node_type);
    if (!self)
        return NULL;
    self->node.inputs = fn->inputs;
    self->node.host = true;
    self->node.made = true;
    self->fn = Py_NewRef((PyObject *)fn);
    int bad = 0;
    if (name)
        bad = fan_node_set_name(self, name);
    if (!bad)
        bad = FAN_CHECK(fan_node_room(&self->node, nedges, &err));
    for (size_t i = 0; i < nedges && !bad; i++)
        bad = link_edge(self, &edges[i], i);
    if (bad)
        Py_CLEAR(self);
    else
        PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

/* ---- release ---- */

int fan_node_release(node_object *self)
{
    PyObject *release = self->release;
    self->release = NULL;
    Py_CLEAR(self->fn);
    if (!release)
        return 0;
    PyObject *ignored = PyObject_CallNoArgs(release);
    Py_DECREF(release);
    return fan_drop_result(ignored);
}

/* ---- Node ---- */

static PyObject *node_get_fn(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef(fan_or_none(node_cast(o)->fn));
}

static PyObject *node_get_group(PyObject *o, void *Py_UNUSED(closure))
{
    const node_more *more = node_cast(o)->more;
    if (!more)
        Py_RETURN_NONE;
    return Py_NewRef(fan_or_none(more->group));
}

static PyObject *node_get_boxed(PyObject *o, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(fan_node_is_boxed(node_cast(o)));
}

static PyObject *node_get_inputs(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(node_cast(o)->node.inputs);
}

static PyObject *node_get_device(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_device_name(fan_node_device(&node_cast(o)->node));
}

static PyObject *node_get_freed(PyObject *o, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(node_cast(o)->node.freed_by != 0);
}

static PyObject *node_get_edges(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *type = fan_lazy(&fan_state_get()->edges_type, "fanin._engine", "Edges");
    if (!type)
        return NULL;
    return PyObject_CallOneArg(type, o);
}

static PyObject *node_edges(PyObject *o, PyObject *Py_UNUSED(none))
{
    const fan_node *n = &node_cast(o)->node;
    PyObject *all = PyList_New(0);
    for (uint32_t i = 0; all && i < n->nedges; i++) {
        const fan_edge *edge = &n->edges[i];
        PyObject *pair;
        if (edge->next)
            pair = Py_BuildValue("(OI)", (PyObject *)fan_node_object(edge->next), edge->slot);
        else
            pair = Py_NewRef(Py_None);
        fan_list_add(&all, pair);
    }
    return all;
}

static PyObject *node_append_edge(PyObject *o, PyObject *edge)
{
    node_object *self = node_cast(o);
    fan_node *next;
    uint32_t slot;
    if (edge_arg(self, edge, self->node.nedges, &next, &slot) < 0)
        return NULL;
    return FAN_DONE(fan_node_append(&self->node, next, slot, &err));
}

PyObject *fan_node_get_stream(PyObject *o, void *Py_UNUSED(closure))
{
    fan_stream *own = fan_node_stream(&((const node_object *)o)->node);
    if (!own)
        Py_RETURN_NONE;
    return fan_stream_wrap(own);
}

PyObject *fan_node_get_name(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef(fan_or_none(node_cast(o)->name));
}

PyObject *fan_node_get_number(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(node_cast(o)->node.number);
}

static PyObject *node_needs(PyObject *o, PyObject *which)
{
    const fan_node *n = &node_cast(o)->node;
    int64_t i = 0;
    if (fan_index(which, "edge", PyExc_IndexError, &i) < 0)
        return NULL;
    if (i >= (int64_t)n->nedges) {
        return PyErr_Format(PyExc_IndexError, "%s has %u edge%s, got %lld", fan_node_name(n).text,
                            n->nedges, FAN_PLURAL(n->nedges), (long long)i);
    }
    return PyBool_FromLong(fan_pass_needs(n, (uint32_t)i));
}

/* slot_arg: one of the node's; NULL: its first. */
static int slot_arg(const node_object *self, PyObject *given, int64_t *slot)
{
    *slot = 0;
    if (given && fan_slot_index(given, "slot", slot) < 0)
        return -1;
    if (*slot < (int64_t)self->node.inputs)
        return 0;
    return fan_set_error(PyExc_IndexError, "%s: expected a slot from 0 to %u, got %lld",
                         fan_node_name(&self->node).text, self->node.inputs - 1, (long long)*slot);
}

PyObject *fan_node_register_hook(PyObject *o, PyObject *const *a)
{
    int64_t slot;
    if (slot_arg(node_cast(o), a[1], &slot) < 0)
        return NULL;
    return fan_hooks_add(node_cast(o), a[0], FAN_HOOK_SLOT, (uint32_t)slot);
}

static PyObject *node_retain_grad(PyObject *o, PyObject *const *a)
{
    node_more *more = fan_node_more(node_cast(o));
    int64_t slot;
    if (!more || slot_arg(node_cast(o), a[0], &slot) < 0)
        return NULL;
    PyObject *key = PyLong_FromLongLong(slot);
    if (!key)
        return NULL;
    if (!more->kept)
        more->kept = PyDict_New();
    PyObject *there = NULL;
    if (more->kept)
        there = PyDict_SetDefault(more->kept, key, Py_None);
    Py_DECREF(key);
    return fan_none_unless(!there);
}

/* kept_sum: new reference; NULL with an exception. */
static PyObject *kept_sum(const node_more *more, uint32_t index)
{
    if (!more || !more->kept)
        return Py_NewRef(Py_None);
    PyObject *slot = PyLong_FromUnsignedLong(index);
    if (!slot)
        return NULL;
    PyObject *sum = PyDict_GetItemWithError(more->kept, slot);
    Py_DECREF(slot);
    if (!sum && PyErr_Occurred())
        return NULL;
    return Py_NewRef(fan_or_none(sum));
}

static PyObject *node_get_grad(PyObject *o, void *Py_UNUSED(closure))
{
    const node_more *more = node_cast(o)->more;
    uint32_t n = node_cast(o)->node.inputs;
    if (n == 1)
        return kept_sum(more, 0);
    PyObject *all = PyTuple_New(n);
    for (uint32_t i = 0; all && i < n; i++) {
        PyObject *sum = kept_sum(more, i);
        if (sum)
            PyTuple_SET_ITEM(all, i, sum);
        else
            Py_CLEAR(all);
    }
    return all;
}

static int node_set_grad(PyObject *o, PyObject *value, void *Py_UNUSED(closure))
{
    const node_more *more = node_cast(o)->more;
    if (value != Py_None) {
        return fan_set_error(
            PyExc_TypeError,
            "grad: expected None, which forgets the sums that retain_grad() has kept");
    }
    if (!more || !more->kept)
        return 0;
    PyObject *kept = more->kept;
    PyObject *slots = PyDict_Keys(kept);
    if (!slots)
        return -1;
    int bad = 0;
    for (Py_ssize_t i = 0; !bad && i < PyList_GET_SIZE(slots); i++)
        bad = PyDict_SetItem(kept, PyList_GET_ITEM(slots, i), Py_None);
    Py_DECREF(slots);
    return bad;
}

static PyObject *node_register_prehook(PyObject *o, PyObject *hook)
{
    return fan_hooks_add(node_cast(o), hook, FAN_HOOK_PRE, 0);
}

static PyObject *node_register_posthook(PyObject *o, PyObject *hook)
{
    return fan_hooks_add(node_cast(o), hook, FAN_HOOK_POST, 0);
}

static PyObject *node_free(PyObject *o, PyObject *Py_UNUSED(none))
{
    node_object *self = node_cast(o);
    if (!self->node.freed_by)
        self->node.freed_by = FAN_FREED_BY_USER;
    return fan_none_unless(fan_node_release(self) < 0);
}

/* node_sum_into: of a tuple with memory for each slot's sum. */
static PyObject *node_sum_into(PyObject *o, PyObject *out_buffers)
{
    node_more *more = fan_node_more(node_cast(o));
    if (!more)
        return NULL;
    if (!PyTuple_Check(out_buffers) ||
        PyTuple_GET_SIZE(out_buffers) != (Py_ssize_t)node_cast(o)->node.inputs) {
        return PyErr_Format(PyExc_TypeError, "_sum_into: expected a tuple of %u arrays",
                            node_cast(o)->node.inputs);
    }
    Py_XSETREF(more->out_buffers, Py_NewRef(out_buffers));
    Py_RETURN_NONE;
}

static PyObject *node_repr(PyObject *o)
{
    const fan_node *n = &node_cast(o)->node;
    const PyTypeObject *type = Py_TYPE(o);
    if (!n->made)
        return PyUnicode_FromFormat("<%s whose Node.__init__ has not run>", type->tp_name);
    const char *class_name = ""; /* the name of a subclass's node without a name begins with it */
    const char *space = "";
    if (type == fan_state_get()->node_type) {
        class_name = "fanin.Node ";
    } else if (node_cast(o)->name) {
        class_name = type->tp_name;
        space = " ";
    }
    return PyUnicode_FromFormat("<%s%s%s, %u input%s, %u edge%s%s>", class_name, space,
                                fan_node_name(n).text, n->inputs, FAN_PLURAL(n->inputs), n->nedges,
                                FAN_PLURAL(n->nedges), n->freed_by ? ", freed" : "");
}

static PyObject *node_remove_hook(PyObject *o, PyObject *hook)
{
    return fan_hooks_remove(node_cast(o), hook);
}
static PyObject *node_register_hook(PyObject *o, PyObject *const *a)
{
    return fan_node_register_hook(o, a);
}
static PyObject *node_get_stream(PyObject *o, void *closure)
{
    return fan_node_get_stream(o, closure);
}
static PyObject *node_get_name(PyObject *o, void *closure)
{
    return fan_node_get_name(o, closure);
}
static PyObject *node_get_sequence_nr(PyObject *o, void *closure)
{
    return fan_node_get_number(o, closure);
}

#include "py/declared/Node.h"

PyObject *fan_node_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    return node_new_vector_step(type, args, nargsf, kwnames);
}

/* node_subclass_new, node_init: for subclasses. Between the two the object exists but is no node
 * yet (fan_node_arg). */
static PyObject *node_subclass_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                                   PyObject *Py_UNUSED(named))
{
    if (type == fan_state_get()->node_type) {
        return PyErr_Format(PyExc_TypeError,
                            "Node.__new__(Node) is not supported: call Node(fn, ..)");
    }
    node_object *self = (node_object *)type->tp_alloc(type, 0);
    if (self)
        fan_node_init(&self->node, &node_ops, 1);
    return (PyObject *)self;
}

static int node_init(PyObject *o, PyObject *args, PyObject *named)
{
    PyObject *values[PARAMETERS];
    if (node_cast(o)->node.begun) {
        return fan_set_error(PyExc_RuntimeError, "Node.__init__ of this %.200s has already run",
                             Py_TYPE(o)->tp_name);
    }
    node_cast(o)->node.begun = true;
    if (fan_parse_tuple(&node_new_decl, args, named, values) < 0)
        return -1;
    return fill_in(node_cast(o), values);
}

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(node_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)node_doc},
    {Py_tp_new, node_subclass_new},
    {Py_tp_init, node_init},
    {Py_tp_dealloc, fan_node_dealloc},
    {Py_tp_traverse, fan_node_traverse},
    {Py_tp_clear, fan_node_clear},
    {Py_tp_repr, node_repr_step},
    {Py_tp_methods, node_methods},
    {Py_tp_members, members},
    {Py_tp_getset, node_getset},
    {0, NULL},
};

PyType_Spec fan_node_spec = {
    .name = "fanin.Node",
    .basicsize = sizeof(node_object),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
