/* node: fanin.Node. */
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

void fan_node_text(const fan_node *n, char *buf, size_t size)
{
    Py_ssize_t all, end = (Py_ssize_t)size - 1;
    const char *name =
        fan_node_object(n)->name ? PyUnicode_AsUTF8AndSize(fan_node_object(n)->name, &all) : NULL;
    if (!name) {
        const PyTypeObject *type = Py_TYPE(fan_node_object(n));
        const char *what = n->ops->leaf                         ? "leaf"
                           : type == fan_state_get()->node_type ? "node"
                                                                : type->tp_name;
        snprintf(buf, size, "%.80s %llu", what, (unsigned long long)n->number);
        return;
    }
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
    .hold = fan_node_hold, .drop = fan_node_drop, .free = node_free_parts, .text = fan_node_text};

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
    for (uint32_t i = 0; i < self->node.nedges; i++)
        if (self->node.edges[i].next)
            Py_VISIT((PyObject *)fan_node_object(self->node.edges[i].next));
    if (!self->more)
        return 0;
    Py_VISIT(self->more->group);
    for (int when = 0; when < FAN_HOOK_TIMES; when++)
        Py_VISIT(self->more->hooks[when]);
    Py_VISIT(self->more->kept);
    Py_VISIT(self->more->out_buffers);
    for (size_t i = 0; self->more->slots.held && i < self->more->slots.n; i++)
        Py_VISIT(self->more->slots.held[i]);
    return 0;
}

int fan_node_clear(PyObject *o)
{
    node_object *self = node_cast(o);
    Py_CLEAR(self->fn);
    Py_CLEAR(self->release);
    for (int when = 0; self->more && when < FAN_HOOK_TIMES; when++)
        Py_CLEAR(self->more->hooks[when]);
    if (self->more) {
        Py_CLEAR(self->more->group);
        Py_CLEAR(self->more->kept);
    }
    fan_node_unlink(&self->node);
    return 0;
}

/* ---- arguments ---- */

node_object *fan_node_arg(PyObject *o)
{
    const fan_state *st = fan_state_get();
    if (Py_TYPE(o) == st->node_type || Py_TYPE(o) == st->leaf_type)
        return node_cast(o);
    return PyType_IsSubtype(Py_TYPE(o), st->node_type) && node_cast(o)->node.made ? node_cast(o)
                                                                                  : NULL;
}

const char *fan_no_node_text(PyObject *root, PyObject *node, char *buf, size_t size)
{
    if (!PyObject_TypeCheck(node, fan_state_get()->node_type))
        return fan_type_text(root, buf, size);
    PyOS_snprintf(buf, size, "a %.160s whose Node.__init__ has not run", Py_TYPE(node)->tp_name);
    return buf;
}

/* declare_arrays: slots= of ndarrays only, the usual case: 1; 0: something else; -1 with an
 * exception. */
static int declare_arrays(fan_slot_specs *d, PyObject *slots)
{
    Py_ssize_t n =
        PyList_CheckExact(slots) || PyTuple_CheckExact(slots) ? PySequence_Fast_GET_SIZE(slots) : 0;
    fan_slot_spec *specs;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(slots, i);
        if (!PyArray_CheckExact(o) ||
            fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)o)) == FAN_DT_NONE)
            return 0;
    }
    if (!n || !(specs = fan_calloc((size_t)n * sizeof *specs)))
        return n ? (PyErr_NoMemory(), -1) : 0;
    d->specs = specs;
    d->n = (size_t)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        const PyArrayObject *a = (PyArrayObject *)PySequence_Fast_GET_ITEM(slots, i);
        size_t bytes = (size_t)PyArray_NDIM(a) * sizeof *specs->shape;
        int64_t *shape = fan_alloc(bytes ? bytes : 1);
        if (!shape) {
            PyErr_NoMemory();
            return -1;
        }
        if (bytes)
            memcpy(shape, PyArray_DIMS(a), bytes);
        specs[i] = (fan_slot_spec){.has_shape = true, .ndim = PyArray_NDIM(a), .shape = shape};
        specs[i].dtype = fan_dtype_of_descr(PyArray_DESCR(a));
        specs[i].accumulate = FAN_DT_NONE;
        specs[i].device = fan_device_hold(fan_cpu());
    }
    return 1;
}

int fan_node_declare(node_object *self, PyObject *slots, uint32_t *inputs)
{
    node_more *more = fan_node_more(self);
    int arrays = more ? declare_arrays(&more->slots, slots) : -1, bad;
    char name[128];
    if (arrays > 0 && (!*inputs || *inputs == more->slots.n)) {
        *inputs = (uint32_t)more->slots.n;
        return 0;
    }
    if (arrays < 0)
        return -1;
    fan_error_context w = {
        .buffer = fan_node_name(&self->node, name, sizeof name), .slot = -1, .key = -1};
    fan_error_context_push(&w);
    bad = 0;
    if (!arrays) { /* arrays, Slots and Nones */
        int bare = PyList_Check(slots) || PyTuple_Check(slots) ? 0 : fan_is_bare(slots);
        bad = -1;
        PyObject *list = NULL;
        if (bare > 0 || (bare == 0 && !Py_TYPE(slots)->tp_iter))
            fan_refuse(
                PyExc_TypeError,
                "slots: expected a sequence of arrays, Slots and Nones, got one %.200s: give [it]",
                Py_TYPE(slots)->tp_name);
        else if (bare == 0) {
            PyObject *type = fan_lazy(&fan_state_get()->slot_type, "fanin.slots", "Slot");
            list = type ? PySequence_List(slots) : NULL;
            for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(list); i++) {
                PyObject *empty =
                    PyList_GET_ITEM(list, i) == Py_None ? PyObject_CallNoArgs(type) : NULL;
                if (PyList_GET_ITEM(list, i) == Py_None &&
                    (!empty || PyList_SetItem(list, i, empty) < 0))
                    Py_CLEAR(list);
            }
            bad = list ? fan_slot_specs_of(list, w.buffer, &more->slots, &more->names) : -1;
        }
        Py_XDECREF(list);
    }
    if (!bad &&
        (more->slots.n == 0 || more->slots.n > UINT32_MAX || (*inputs && *inputs != more->slots.n)))
        bad = fan_refuse(PyExc_ValueError, "slots: expected one for each of %u input%s, got %zu",
                         *inputs ? *inputs : 1, FAN_PLURAL(*inputs ? *inputs : 1), more->slots.n);
    fan_error_context_pop(&w);
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
    return self->more && self->more->slots.specs ? &self->more->slots : NULL;
}

/* current_for: the current stream of a device, in the example array's library if it has one; a
 * hold; NULL with an exception. */
static fan_stream *current_for(fan_device *d, PyObject *example)
{
    fan_stream *s = NULL;
    fan_value v;
    if (example && fan_is_shared(d)) {
        if (fan_import(example, false, true, &v) < 0 || fan_library_stream(&v, NULL, &s) < 0)
            PyErr_Clear(); /* a Slot, or a library without streams */
        fan_value_release(&v);
    }
    if (!s && !(s = fan_stream_current(d)))
        PyErr_NoMemory();
    return s;
}

/* check_slots: stream= must be of the device of a slot, and able to wait for what every slot
 * holds. */
static int check_slots(const fan_slot_specs *specs, const fan_stream *own)
{
    const fan_slot_spec *wrong = specs ? specs->specs : NULL;
    char one[32], two[32];
    for (size_t i = 0; specs && i < specs->n; i++) {
        const fan_device *d = specs->specs[i].device;
        if (d && d->backend->has_streams &&
            (d->backend != own->device->backend || d->self != own->device->self)) {
            wrong = &specs->specs[i];
            break;
        }
        if (!d || d == own->device)
            wrong = NULL;
    }
    if (!wrong)
        return 0;
    const fan_device *d = wrong->device;
    return fan_refuse(PyExc_ValueError,
                      "stream: expected one of %s, the device of slot %zu, got stream %llu of %s%s",
                      fan_device_text(d, one, sizeof one), (size_t)(wrong - specs->specs),
                      (unsigned long long)own->handle,
                      fan_device_text(own->device, two, sizeof two),
                      fan_device_of_another(own->device, d));
}

static int place_in(node_object *self, place_args *a, PyObject *slots)
{
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    char one[32], two[32];
    if (a->stream && a->device && a->device != a->stream->device)
        return fan_refuse(
            PyExc_ValueError, "stream: expected one of %s, its device, got stream %llu of %s",
            fan_device_text(a->device, one, sizeof one), (unsigned long long)a->stream->handle,
            fan_device_text(a->stream->device, two, sizeof two));
    if (!a->stream && a->device && a->device->backend->has_streams &&
        !(a->stream = current_for(a->device, NULL)))
        return -1;
    const fan_slot_specs *specs = specs_of(self);
    if (a->stream) {
        if (check_slots(specs, a->stream) < 0)
            return -1;
    } else {
        self->node.host = a->device || specs; /* all slots declare the CPU */
        for (size_t i = 0; !a->device && specs && i < specs->n && !a->stream; i++) {
            fan_device *d = specs->specs[i].device;
            bool listed = slots && PyList_Check(slots) && (Py_ssize_t)i < PyList_GET_SIZE(slots);
            self->node.host = self->node.host && d && !d->backend->has_streams;
            if (d && d->backend->has_streams &&
                !(a->stream =
                      current_for(d, listed ? PyList_GET_ITEM(slots, (Py_ssize_t)i) : NULL)))
                return -1;
        }
    }
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
    PyObject *e = fan_exception_take(), *type = (PyObject *)Py_TYPE(e);
    PyErr_Format(type, "%s: %s: %S", name, what, e);
    Py_DECREF(e);
    return -1;
}

int fan_node_place(node_object *self, PyObject *stream, PyObject *device, PyObject *slots)
{
    char name[128];
    fan_error_context w = {.slot = -1, .key = -1};
    place_args a = {0};
    int bad;
    /* the usual case */
    if (!(stream && stream != Py_None) && !(device && device != Py_None) && !specs_of(self))
        return FAN_CHECK(fan_stream_set_now(&self->node.streams, &err));
    w.buffer = fan_node_name(&self->node, name, sizeof name);
    if (fan_stream_arg(stream, &a.stream) < 0)
        return raise_about(name, "stream");
    if (fan_device_arg(device, &a.device) < 0) {
        fan_stream_drop(a.stream);
        return raise_about(name, "device");
    }
    fan_error_context_push(&w);
    bad = place_in(self, &a, slots);
    fan_error_context_pop(&w);
    fan_stream_drop(a.stream);
    fan_device_drop(a.device);
    fan_stream_set_drop(a.now);
    return bad;
}

/* ---- its edges ---- */

/* edge_advice: what to give instead of an edge that is no pair of a node and a slot; "" where that
 * is not known. */
static const char *edge_advice(PyObject *edge)
{
    PyObject *first =
        PyTuple_Check(edge) && PyTuple_GET_SIZE(edge) ? PyTuple_GET_ITEM(edge, 0) : edge;
    if (fan_node_arg(edge))
        return ": give [(node, slot)]";
    return fan_is_array(first) ? ": arrays and tensors are no nodes; fanin.Leaf(array) makes one"
                               : "";
}

/* is_one_edge: whether a sequence of edges is a single edge, as in edges=(node, 0). */
static bool is_one_edge(PyObject *edges)
{
    bool pair = PyTuple_Check(edges) && PyTuple_GET_SIZE(edges) == 2;
    return pair && fan_node_arg(PyTuple_GET_ITEM(edges, 0)) &&
           PyIndex_Check(PyTuple_GET_ITEM(edges, 1));
}

/* edge_of_index: a slot that is another integer; NULL with an exception. */
__attribute__((noinline, cold)) static node_object *edge_of_index(const node_object *self,
                                                                  PyObject *edge, size_t index,
                                                                  uint32_t *slot)
{
    char name[128], there[128];
    node_object *to = PyTuple_Check(edge) && PyTuple_GET_SIZE(edge) == 2
                          ? fan_node_arg(PyTuple_GET_ITEM(edge, 0))
                          : NULL;
    fan_error_context w = {
        .buffer = fan_node_name(&self->node, name, sizeof name), .slot = -1, .key = -1};
    PyObject *which = to ? PyTuple_GET_ITEM(edge, 1) : NULL;
    int64_t i = 0;
    int bad = -1;
    fan_error_context_push(&w);
    if (!to)
        fan_refuse(PyExc_TypeError,
                   "edge %zu: expected a pair of a fanin.Node or fanin.Leaf and one of its slots, "
                   "or None, got %R%s",
                   index, edge, edge_advice(edge));
    else if (!PyLong_CheckExact(which))
        bad = fan_slot_index(which, "slot of an edge", &i);
    if (to && (PyLong_CheckExact(which) || (!bad && i >= (int64_t)to->node.inputs)))
        bad = fan_refuse(PyExc_IndexError, "edge %zu: expected a slot from 0 to %u of %s, got %R",
                         index, to->node.inputs - 1, fan_node_name(&to->node, there, sizeof there),
                         which);
    fan_error_context_pop(&w);
    *slot = (uint32_t)i;
    return bad ? NULL : to;
}

/* edge_arg: None, or (node, slot): borrowed. */
static int edge_arg(const node_object *self, PyObject *edge, size_t index, fan_node **next,
                    uint32_t *slot)
{
    bool pair = PyTuple_Check(edge) && PyTuple_GET_SIZE(edge) == 2;
    node_object *to = pair ? fan_node_arg(PyTuple_GET_ITEM(edge, 0)) : NULL;
    Py_ssize_t i = to ? fan_small_index(PyTuple_GET_ITEM(edge, 1)) : -1; /* the usual case */
    *slot = i < 0 ? 0 : (uint32_t)i;
    if (edge != Py_None && (i < 0 || i >= (Py_ssize_t)to->node.inputs)) {
        *slot = 0;
        to = edge_of_index(self, edge, index, slot);
    }
    *next = to ? &to->node : NULL;
    return to || edge == Py_None ? 0 : -1;
}

static int link_edges(node_object *self, PyObject *edges)
{
    PyObject *all = NULL;
    size_t n = 0;
    int bad;
    if (!PyList_CheckExact(edges) && !PyTuple_CheckExact(edges)) {
        if (fan_node_arg(edges))
            return fan_set_error(PyExc_TypeError,
                                 "edges: expected a sequence, got %s: give [(node, slot)]",
                                 FAN_TYPE_TEXT(edges));
        if (fan_sequence_arg(edges, "edges", &all) < 0)
            return -1;
        edges = all;
    }
    n = (size_t)PySequence_Fast_GET_SIZE(edges);
    bad = FAN_CHECK(fan_node_room(&self->node, n, &err));
    for (size_t i = 0; i < n && !bad && (Py_ssize_t)i < PySequence_Fast_GET_SIZE(edges); i++) {
        /* __index__ may change the list */
        PyObject *edge = Py_NewRef(PySequence_Fast_GET_ITEM(edges, (Py_ssize_t)i));
        fan_node *next;
        uint32_t slot;
        bad = edge_arg(self, edge, i, &next, &slot);
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
    GROUP
};

static int fill_in(node_object *self, PyObject *const *a)
{
    int64_t n = a[INPUTS] ? fan_small_index(a[INPUTS]) : 0;
    if (!PyCallable_Check(a[FN]))
        return fan_set_error(PyExc_TypeError, "fn: expected a function, got %s",
                             FAN_TYPE_TEXT(a[FN]));
    if (a[RELEASE] && a[RELEASE] != Py_None && !PyCallable_Check(a[RELEASE]))
        return fan_set_error(PyExc_TypeError, "release: expected a function, got %s",
                             FAN_TYPE_TEXT(a[RELEASE]));
    if (a[NAME] && a[NAME] != Py_None &&
        (!(self->name = PyObject_Str(a[NAME])) || !fan_text_arg(self->name)))
        return -1;
    if (n < 0 && fan_index(a[INPUTS], "inputs", NULL, &n) < 0)
        return -1;
    if (a[INPUTS] && (n < 1 || n >= INT32_MAX))
        return fan_set_error(PyExc_ValueError,
                             "inputs: expected a number of gradients from 1 to %d, got %R",
                             INT32_MAX - 1, a[INPUTS]);
    uint32_t inputs = (uint32_t)n; /* 0: not given */
    if (a[SLOTS] && a[SLOTS] != Py_None && fan_node_declare(self, a[SLOTS], &inputs) < 0)
        return -1;
    if ((a[STREAM] || a[DEVICE] || a[SLOTS] || fan_streams_in_use()) &&
        fan_node_place(self, a[STREAM], a[DEVICE], a[SLOTS]) < 0)
        return -1;
    if (a[GROUP] && a[GROUP] != Py_None) {
        if (PyLong_Check(a[GROUP]) || PyFloat_Check(a[GROUP]) || PyTuple_Check(a[GROUP]) ||
            PyBytes_Check(a[GROUP]))
            return fan_set_error(PyExc_TypeError,
                                 "group must be a str or an object shared by the nodes (compared "
                                 "by identity), got %s",
                                 FAN_TYPE_TEXT(a[GROUP]));
        if (!fan_node_more(self))
            return -1;
        self->more->group = Py_NewRef(a[GROUP]);
        if (PyUnicode_CheckExact(a[GROUP])) /* equal strings are one group */
            PyUnicode_InternInPlace(&self->more->group);
    }
    if (fan_is_function(a[FN])) {
        uint32_t takes = ((function_object *)a[FN])->inputs;
        char name[128];
        if (inputs && inputs != takes)
            return fan_set_error(PyExc_ValueError, "%s: inputs: its function takes %u, got %u",
                                 fan_node_name(&self->node, name, sizeof name), takes, inputs);
        inputs = takes;
    }
    self->node.inputs = inputs ? inputs : 1;
    if (fan_state_get()->detect) {
        char line[256]; /* "": Python has none */
        fan_call_site(line, sizeof line);
        if (!fan_node_more(self))
            return -1;
        if (line[0] && !(self->more->call_site =
                             PyUnicode_DecodeUTF8(line, (Py_ssize_t)strlen(line), "replace")))
            return -1;
    }
    self->fn = Py_NewRef(a[FN]);
    self->release = a[RELEASE] && a[RELEASE] != Py_None ? Py_NewRef(a[RELEASE]) : NULL;
    if (a[EDGES] && a[EDGES] != Py_None && link_edges(self, a[EDGES]) < 0)
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
        /* not before: gc.get_objects() would return it half made */
        PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

PyObject *fan_node_new(function_object *fn, const fanin_edge *edges, size_t nedges, PyObject *name)
{
    node_object *self = node_alloc(fan_state_get()->node_type);
    if (!self)
        return NULL;
    self->node.inputs = fn->inputs;
    self->node.host = self->node.made = true;
    self->fn = Py_NewRef((PyObject *)fn);
    int bad = (name && (!(self->name = PyObject_Str(name)) || !fan_text_arg(self->name))) ||
              FAN_CHECK(fan_node_room(&self->node, nedges, &err)) < 0;
    for (size_t i = 0; i < nedges && !bad; i++) {
        node_object *to = edges[i].next ? fan_node_arg((PyObject *)edges[i].next) : NULL;
        char own[128];
        if (edges[i].next && (!to || edges[i].slot >= to->node.inputs))
            bad = fan_set_error(to ? PyExc_IndexError : PyExc_TypeError,
                                to ? "%s: edge %zu: expected a slot from 0 to %u, got %u"
                                   : "%s: edge %zu: expected a fanin.Node, a fanin.Leaf or NULL",
                                fan_node_name(&self->node, own, sizeof own), i,
                                to ? to->node.inputs - 1 : 0, edges[i].slot);
        else
            fan_node_link(&self->node, to ? &to->node : NULL, edges[i].slot);
    }
    if (bad)
        Py_CLEAR(self);
    else
        PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

/* ---- run, release ---- */

int fan_node_release(node_object *self)
{
    PyObject *release = self->release, *ignored;
    self->release = NULL;
    Py_CLEAR(self->fn);
    if (!release)
        return 0;
    ignored = PyObject_CallNoArgs(release);
    Py_DECREF(release);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

/* ---- Node ---- */

static PyObject *node_get_fn(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef(node_cast(o)->fn ? node_cast(o)->fn : Py_None);
}

static PyObject *node_get_group(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef(node_cast(o)->more && node_cast(o)->more->group ? node_cast(o)->more->group
                                                                     : Py_None);
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
    return type ? PyObject_CallOneArg(type, o) : NULL;
}

static PyObject *node_edges(PyObject *o, PyObject *Py_UNUSED(none))
{
    const fan_node *n = &node_cast(o)->node;
    PyObject *all = PyList_New(0);
    for (uint32_t i = 0; all && i < n->nedges; i++)
        fan_list_add(&all,
                     n->edges[i].next
                         ? Py_BuildValue("(OI)", (PyObject *)fan_node_object(n->edges[i].next),
                                         n->edges[i].slot)
                         : Py_NewRef(Py_None));
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
    return own ? fan_stream_wrap(own) : Py_NewRef(Py_None);
}

PyObject *fan_node_get_name(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef(node_cast(o)->name ? node_cast(o)->name : Py_None);
}

PyObject *fan_node_get_number(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(node_cast(o)->node.number);
}

static PyObject *node_needs(PyObject *o, PyObject *which)
{
    int64_t i = 0;
    if (fan_index(which, "edge", PyExc_IndexError, &i) < 0)
        return NULL;
    if (i >= (int64_t)node_cast(o)->node.nedges) {
        char name[128];
        return PyErr_Format(PyExc_IndexError, "%s has %u edge%s, got %lld",
                            fan_node_name(&node_cast(o)->node, name, sizeof name),
                            node_cast(o)->node.nedges, FAN_PLURAL(node_cast(o)->node.nedges),
                            (long long)i);
    }
    return PyBool_FromLong(fan_backward_needs(&node_cast(o)->node, (uint32_t)i));
}

/* slot_arg: one of the node's; NULL: its first. */
static int slot_arg(const node_object *self, PyObject *given, int64_t *slot)
{
    char name[128];
    *slot = 0;
    if (given && fan_slot_index(given, "slot", slot) < 0)
        return -1;
    if (*slot < (int64_t)self->node.inputs)
        return 0;
    return fan_set_error(PyExc_IndexError, "%s: expected a slot from 0 to %u, got %lld",
                         fan_node_name(&self->node, name, sizeof name), self->node.inputs - 1,
                         (long long)*slot);
}

PyObject *fan_node_register_hook(PyObject *o, PyObject *const *a)
{
    int64_t slot = 0;
    return slot_arg(node_cast(o), a[1], &slot) < 0
               ? NULL
               : fan_hooks_add(node_cast(o), a[0], FAN_HOOK_SLOT, (uint32_t)slot);
}

static PyObject *node_retain_grad(PyObject *o, PyObject *const *a)
{
    int64_t slot = 0;
    node_more *more = fan_node_more(node_cast(o));
    PyObject *key = NULL;
    if (!more || slot_arg(node_cast(o), a[0], &slot) < 0 || !(key = PyLong_FromLongLong(slot)))
        return NULL;
    if (!more->kept)
        more->kept = PyDict_New();
    PyObject *there = more->kept ? PyDict_SetDefault(more->kept, key, Py_None) : NULL;
    Py_DECREF(key);
    return there ? Py_NewRef(Py_None) : NULL;
}

static PyObject *node_get_grad(PyObject *o, void *Py_UNUSED(closure))
{
    const node_more *more = node_cast(o)->more;
    uint32_t n = node_cast(o)->node.inputs;
    PyObject *all = PyTuple_New(n), *only;
    for (uint32_t i = 0; all && i < n; i++) {
        PyObject *slot = PyLong_FromUnsignedLong(i);
        PyObject *sum =
            slot && more && more->kept ? PyDict_GetItemWithError(more->kept, slot) : NULL;
        PyTuple_SET_ITEM(all, i, Py_NewRef(sum ? sum : Py_None));
        Py_XDECREF(slot);
        if (PyErr_Occurred())
            Py_CLEAR(all);
    }
    if (!all || n > 1)
        return all;
    only = Py_NewRef(PyTuple_GET_ITEM(all, 0));
    Py_DECREF(all);
    return only;
}

static int node_set_grad(PyObject *o, PyObject *value, void *Py_UNUSED(closure))
{
    PyObject *kept = node_cast(o)->more ? node_cast(o)->more->kept : NULL, *slots;
    int bad = 0;
    if (value != Py_None)
        return fan_set_error(
            PyExc_TypeError,
            "grad: expected None, which forgets the sums that retain_grad() has kept");
    if (!kept)
        return 0;
    slots = PyDict_Keys(kept);
    for (Py_ssize_t i = 0; slots && i < PyList_GET_SIZE(slots) && !bad; i++)
        bad = PyDict_SetItem(kept, PyList_GET_ITEM(slots, i), Py_None) < 0;
    Py_XDECREF(slots);
    return slots && !bad ? 0 : -1;
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
    node_cast(o)->node.freed_by =
        node_cast(o)->node.freed_by ? node_cast(o)->node.freed_by : FAN_FREED_BY_USER;
    return fan_node_release(node_cast(o)) < 0 ? NULL : Py_NewRef(Py_None);
}

/* node_sum_into: of a tuple with memory for each slot's sum. */
static PyObject *node_sum_into(PyObject *o, PyObject *out_buffers)
{
    node_more *more = fan_node_more(node_cast(o));
    if (!more)
        return NULL;
    if (!PyTuple_Check(out_buffers) ||
        PyTuple_GET_SIZE(out_buffers) != (Py_ssize_t)node_cast(o)->node.inputs)
        return PyErr_Format(PyExc_TypeError, "_sum_into: expected a tuple of %u arrays",
                            node_cast(o)->node.inputs);
    Py_XSETREF(more->out_buffers, Py_NewRef(out_buffers));
    Py_RETURN_NONE;
}

static PyObject *node_repr(PyObject *o)
{
    const fan_node *n = &node_cast(o)->node;
    bool own = Py_TYPE(o) == fan_state_get()->node_type;
    const char *type = own ? "fanin.Node " : node_cast(o)->name ? Py_TYPE(o)->tp_name : "";
    char name[128];
    if (!n->made)
        return PyUnicode_FromFormat("<%s whose Node.__init__ has not run>", Py_TYPE(o)->tp_name);
    return PyUnicode_FromFormat("<%s%s%s, %u input%s, %u edge%s%s>", type, own || !*type ? "" : " ",
                                fan_node_name(n, name, sizeof name), n->inputs,
                                FAN_PLURAL(n->inputs), n->nedges, FAN_PLURAL(n->nedges),
                                n->freed_by ? ", freed" : "");
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
    node_object *self;
    if (type == fan_state_get()->node_type)
        return PyErr_Format(PyExc_TypeError,
                            "Node.__new__(Node) is not supported: call Node(fn, ..)");
    self = (node_object *)type->tp_alloc(type, 0);
    if (self)
        fan_node_init(&self->node, &node_ops, 1);
    return (PyObject *)self;
}

static int node_init(PyObject *o, PyObject *args, PyObject *named)
{
    PyObject *values[9];
    if (node_cast(o)->node.begun)
        return fan_set_error(PyExc_RuntimeError, "Node.__init__ of this %.200s has already run",
                             Py_TYPE(o)->tp_name);
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
