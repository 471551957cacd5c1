/* carry: gradients on their way from node to node, as Python's objects (engine/engine.h,
 * fan_engine_frontend).
 *
 * The workers of a pass; gradients that are handed through; buffers, which gradients are added to
 * and taken from; the call of a node's function; the table of all that. */
#include "py/arrays/facts.h"
#include "py/device/backends.h"
#include "py/engine/node_object.h"

#include "base/trace.h"
#include "buffer/digest.h"
#include "buffer/plain.h"
#include "base/fault.h"

#include <string.h>

static fan_status status_of(bool bad, fan_error *err)
{
    if (bad)
        return fan_from_python(err);
    return FAN_OK;
}

/* out_buffer_of: memory for the sum of a slot; borrowed, NULL: fresh. */
static PyObject *out_buffer_of(const fan_node *n, uint32_t slot)
{
    const node_more *more = fan_node_object(n)->more;
    if (!more || !more->out_buffers)
        return NULL;
    return PyTuple_GET_ITEM(more->out_buffers, (Py_ssize_t)slot);
}

/* ---- workers ---- */

enum {
    CONTEXT,
    ENTERED,
    TRACES,
    PARTS
};

static fan_status worker_new(void **worker, fan_error *err)
{
    PyObject *context = PyContext_CopyCurrent();
    PyObject *entered = NULL;
    PyObject *rings = NULL;
    if (context)
        entered = fan_backends_entered();
    bool bad = !entered;
    if (!bad && fan_trace_on()) {
        rings = fan_call("fanin._trace.recording", "beside", "()");
        bad = !rings;
    }
    *worker = NULL;
    if (!bad)
        *worker = PyTuple_Pack(PARTS, context, entered, fan_or_none(rings));
    Py_XDECREF(context);
    Py_XDECREF(entered);
    Py_XDECREF(rings);
    return status_of(!*worker, err);
}

static void each_ring(PyObject *rings, const char *method)
{
    for (Py_ssize_t i = 0; rings != Py_None && i < PyList_GET_SIZE(rings); i++) {
        PyObject *none = PyObject_CallMethod(PyList_GET_ITEM(rings, i), method, NULL);
        if (!none)
            PyErr_Clear();
        Py_XDECREF(none);
    }
}

static bool worker_enter(void *worker)
{
    PyObject *parts = worker;
    if (fan_finalizing())
        return false;
    (void)PyGILState_Ensure(); /* a thread of the pool has none before */
    if (PyContext_Enter(PyTuple_GET_ITEM(parts, CONTEXT)) < 0)
        PyErr_Clear();
    fan_backends_enter(PyTuple_GET_ITEM(parts, ENTERED));
    each_ring(PyTuple_GET_ITEM(parts, TRACES), "begin");
    return true;
}

static void worker_leave(void *worker)
{
    PyObject *parts = worker;
    each_ring(PyTuple_GET_ITEM(parts, TRACES), "end");
    fan_backends_leave(PyTuple_GET_ITEM(parts, ENTERED));
    if (PyContext_Exit(PyTuple_GET_ITEM(parts, CONTEXT)) < 0)
        PyErr_Clear();
    PyGILState_Release(PyGILState_UNLOCKED);
}

/* ---- handed through (A14) ---- */

static bool can_forward(const fan_node *to, uint32_t slot, void *gradient)
{
    const fan_slot_spec *spec = fan_node_specs(to);
    const fan_facts facts = fan_facts_of(gradient);
    if (FAN_FAULT(HAND_WITHOUT_WAIT) && facts.is == FAN_IS_ARRAY)
        return true;
    if (facts.is != FAN_IS_UNBOXED && out_buffer_of(to, slot))
        return false;
    if (facts.dtype == FAN_DT_NONE)
        return false;
    if (spec && !fan_slot_takes(spec + slot, facts.dtype, facts.ndim, facts.shape))
        return false;
    if (facts.is == FAN_IS_TENSOR)
        return fan_plain_is_detached(gradient) && fan_plain_has_own_value(gradient);
    return true;
}

/* ---- buffers ---- */

/* on_host: whether a gradient lies on the CPU, as far as can be read without an import: 1, 0, or -1
 * with an exception, as of a torch function mode. */
static int on_host(PyObject *gradient)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    char *data;
    fan_class is = fan_class_of(gradient);
    if (is == FAN_IS_UNBOXED || is == FAN_IS_NDARRAY)
        return 1;
    if (fan_plain_import(gradient, &kind, &data))
        return 1;
    if (is != FAN_IS_TENSOR)
        return 0;
    PyObject *is_cpu = PyObject_GetAttrString(gradient, "is_cpu");
    if (fan_drop_result(is_cpu) < 0)
        return -1;
    return is_cpu == Py_True;
}

static fan_status place(void *gradient, fan_value *value, fan_stream **current, fan_error *err)
{
    *value = (fan_value){.dtype = FAN_DT_NONE};
    *current = NULL;
    if (!gradient)
        return FAN_OK;
    int host = on_host(gradient);
    if (host)
        return status_of(host < 0, err);
    if (fan_import(gradient, false, true, value) < 0)
        return fan_from_python(err);
    bool has_streams = value->device && value->device->backend->has_streams;
    if (has_streams) {
        if (fan_library_stream(value, NULL, current) < 0)
            PyErr_Clear(); /* the library has none */
        if (!*current)
            *current = fan_stream_current(value->device);
        if (*current)
            return FAN_OK;
    }
    fan_value_release(value);
    if (has_streams)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the current stream");
    return FAN_OK;
}

/* buffer_new: with a stream, but for the one slot of a node that takes what lies on the CPU (A12):
 * that buffer can serve again. */
static fan_status buffer_new(const fan_pass_config *c, const fan_node *n, fan_stream *consumer,
                             void *gradient, void **buffer, fan_error *err)
{
    fan_buffer_config config = {.stream = consumer,
                                .create_graph = c->create_graph,
                                .stats = c->detect,
                                .budget = c->budget};
    int host = 0;
    if (n->inputs == 1 && gradient)
        host = on_host(gradient);
    if (host < 0)
        return fan_from_python(err);
    if (host)
        config.stream = NULL;
    *buffer = fan_node_buffer(fan_node_object(n), config);
    return status_of(!*buffer, err);
}

static void buffer_free(void *buffer)
{
    Py_DECREF((PyObject *)buffer);
}

/* ---- added ---- */

/* producer_text: V3. */
static void producer_text(const void *source, char *buf, size_t size)
{
    const fan_producer *producer = source;
    if (producer->node) {
        PyOS_snprintf(buf, size, "%s%s returned an invalid gradient at index %u",
                      fan_from_hook(producer), fan_node_name(producer->node).text, producer->index);
    } else {
        PyOS_snprintf(buf, size, "%s was given an invalid gradient at index %u", producer->call,
                      producer->index);
    }
}

/* add_between: P is what is current where the gradient was made, unless producer->stream names it;
 * C, and S11's, is what is current where it is consumed. */
static int add_between(buffer_object *b, uint32_t slot, fan_contribution *c,
                       const fan_producer *producer)
{
    fan_device *d = c->value.device;
    bool has_streams = d && d->backend->has_streams;
    fan_stream *current = NULL;
    if (has_streams && !producer->stream) {
        if (fan_library_stream(&c->value, NULL, &current) < 0)
            return -1;
        if (!current)
            current = fan_stream_current(d);
        if (!current)
            return fan_no_memory();
    }
    c->stream = current;
    if (has_streams && !current)
        c->stream = producer->stream;
    fan_streams_outer outer;
    fan_streams_enter(producer->to, &outer);
    int bad = fan_add_on_library_stream(b->core, slot, c);
    fan_streams_leave(&outer);
    fan_stream_drop(current);
    return bad;
}

/* add_any: by the general path, to which what is unboxed comes as an ndarray. */
static int add_any(buffer_object *b, uint32_t slot, uint32_t key, void *given,
                   const fan_producer *producer)
{
    void *gradient = given;
    if (given && fan_is_unboxed(given)) {
        fan_array_hold(fan_unboxed_array(given));
        if (fan_box(&gradient) < 0) {
            fan_object_drop(gradient);
            return -1;
        }
    }
    fan_contribution c = {.key = -1,
                          .value = {.dtype = FAN_DT_NONE},
                          .stream = producer->stream,
                          .alone = gradient && fan_alone(gradient, 1)};
    PyObject *number = PyLong_FromUnsignedLong(key);
    int bad = -1;
    if (number)
        bad = fan_contribution_of(b, slot, fan_or_none(gradient), number, &c);
    if (!bad)
        bad = add_between(b, slot, &c, producer);
    if (c.value.form != FAN_FORM_UNDEFINED)
        fan_value_release(&c.value);
    Py_XDECREF(number);
    if (gradient != given)
        fan_object_drop(gradient);
    return bad;
}

static fan_status add(void *buffer, uint32_t slot, uint32_t key, void *gradient,
                      const fan_producer *producer, fan_error *err)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    const fan_plain_kind *defined = NULL;
    buffer_object *b = buffer;
    char *data = NULL;
    bool added = false;
    fan_status status = FAN_OK;
    if (gradient)
        defined = &kind;
    if (!b->create_graph && (!gradient || fan_plain_import(gradient, &kind, &data))) {
        fan_entry one = fan_entry_of(gradient, data, key, false, false);
        one.alone = gradient && fan_alone(gradient, 1);
        status = fan_plain_add(b->core, slot, defined, &one, &added, err);
    }
    if (added && status == FAN_OK)
        return FAN_OK;
    fan_error_producer named = {
        .buffer = fan_buffer_name(b->core), .text = producer_text, .source = producer};
    fan_error_producer_push(&named);
    int bad = fan_check(status, err);
    if (!bad)
        bad = add_any(b, slot, key, gradient, producer);
    fan_error_producer_pop(&named);
    return status_of(bad < 0, err);
}

/* ---- taken ---- */

static fan_status take(const fan_node *n, void *buffer, uint32_t slot, void **sum, fan_error *err)
{
    PyObject *out = out_buffer_of(n, slot);
    buffer_object *b = buffer;
    const size_t only = slot;
    const fan_take options = {.one = true, .slot = only};
    const fan_span span = {only, only + 1};
    bool plain = !out && !b->create_graph;
    if (plain && fan_plain_take(b->core, span, &options, NULL, sum))
        return FAN_OK;
    PyErr_Clear(); /* the general path raises the error again, if it is one */
    const fan_take_args args = {.only = &only, .slot_names = b->names, .out = out};
    PyObject *list = fan_take_list(b->core, &args);
    if (!list)
        return fan_from_python(err);
    if (PyList_GET_ITEM(list, 0) != Py_None)
        *sum = Py_NewRef(PyList_GET_ITEM(list, 0));
    Py_DECREF(list);
    return FAN_OK;
}

/* ---- nodes ---- */

/* lost_fn: the error of a node without its function; -1. */
__attribute__((noinline, cold)) static int lost_fn(const node_object *self)
{
    if (self->node.freed_by)
        return FAN_CHECK(fan_node_freed(&self->node, &err));
    return fan_set_error(PyExc_RuntimeError, "the garbage collector has cleared the function of %s",
                         fan_node_name(&self->node).text);
}

/* warn_undefined: under debug=True, warns of a function all of whose gradients are needed, and
 * undefined: it may lack a `return`. Once a function. -1 with the warning as an exception. */
static int warn_undefined(const fan_node *n, PyObject *fn, void *const *gradients,
                          uint32_t ngradients)
{
    if (!ngradients || !atomic_load_explicit(&fan_debug_on, memory_order_relaxed))
        return 0;
    for (uint32_t i = 0; i < ngradients; i++) {
        if (gradients[i] || !fan_pass_needs(n, i))
            return 0;
    }
    PyObject *none =
        fan_call("fanin._mistakes", "warn_undefined", "(Os)", fn, fan_node_name(n).text);
    return fan_drop_result(none);
}

/* gradients_returned: what a node's function returned, as gradients; -1 with an exception. Takes
 * both holds; result: NULL with an exception. */
static int gradients_returned(node_object *self, PyObject *fn, PyObject *result, void **gradients,
                              uint32_t ngradients)
{
    int bad = -1;
    if (result)
        bad = fan_gradients_of(result, &self->node, NULL, gradients, ngradients);
    if (!bad)
        bad = warn_undefined(&self->node, fn, gradients, ngradients);
    Py_DECREF(fn);
    return bad;
}

static int run_in_python(node_object *self, void **sums, void **gradients, uint32_t ngradients)
{
    FAN_UNINITIALIZED PyObject *on_stack[FAN_SUMS_ON_STACK + 1];
    PyObject **args = on_stack;
    FAN_UNINITIALIZED fan_guards guards;
    uint32_t n = self->node.inputs;
    if (fan_box_all(sums, n) < 0 || fan_guards_begin(&guards, sums, n) < 0)
        return -1;
    if (n > FAN_SUMS_ON_STACK) {
        args = fan_alloc((n + 1) * sizeof *args);
        if (!args) {
            (void)fan_guards_end(&guards, NULL);
            return fan_no_memory();
        }
    }
    for (uint32_t i = 0; i < n; i++)
        args[i + 1] = fan_or_none(sums[i]);
    PyObject *fn = Py_NewRef(self->fn);
    PyObject *result = PyObject_Vectorcall(fn, args + 1, n | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (args != on_stack)
        fan_free(args);
    if (fan_guards_end(&guards, &self->node) < 0)
        Py_CLEAR(result);
    return gradients_returned(self, fn, result, gradients, ngradients);
}

/* call_boxed: calls the function with a list that has the only holds on the sums, which become
 * NULL: what it pops and drops is gone. Takes nothing else; NULL with an exception. */
static PyObject *call_boxed(PyObject *fn, void **sums, uint32_t n)
{
    PyObject *list = PyList_New(n);
    if (!list)
        return NULL;
    for (uint32_t i = 0; i < n; i++) {
        PyList_SET_ITEM(list, i, fan_take_or_none(sums[i]));
        sums[i] = NULL;
    }
    PyObject *result = PyObject_CallOneArg(fn, list);
    Py_DECREF(list);
    return result;
}

/* drop_line: called where the last reference to a sum goes, inside the node's function: a line for
 * traces. `self`: (slot, bytes). */
static PyObject *drop_line(PyObject *self, PyObject *Py_UNUSED(reference))
{
    fan_trace_line line = {
        .kind = FAN_TRACE_DROP, .device = -1, .key = -1, .start_us = -1, .end_us = -1};
    line.slot = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(self, 0));
    line.bytes = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(self, 1));
    fan_trace_put(&line);
    Py_RETURN_NONE;
}

static PyMethodDef drop_def = {"drop", drop_line, METH_O, NULL};

/* drops_of: under a trace, weak references to the ndarrays among the sums, whose end drop_line
 * writes; they live as long as the list. NULL: no trace is on, or there is no memory: the trace
 * then shows that they live until the function ends. */
static PyObject *drops_of(void *const *sums, uint32_t n)
{
    if (atomic_load_explicit(&fan_traces, memory_order_relaxed) == 0 || !fan_trace_on())
        return NULL;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < n; i++) {
        PyObject *sum = sums[i];
        if (!sum || !PyArray_Check(sum))
            continue;
        PyObject *self = Py_BuildValue("(IK)", (unsigned int)i,
                                       (unsigned long long)PyArray_NBYTES((PyArrayObject *)sum));
        PyObject *fn = NULL;
        PyObject *reference = NULL;
        if (self)
            fn = PyCFunction_New(&drop_def, self);
        if (fn)
            reference = PyWeakref_NewRef(sum, fn);
        Py_XDECREF(self);
        Py_XDECREF(fn);
        fan_list_add(&list, reference);
    }
    PyErr_Clear();
    return list;
}

/* run_boxed: as run_in_python, of a node with boxed=True. A sum that other code holds stays guarded
 * until the function ends, and so it is held as long (H1). */
static int run_boxed(node_object *self, void **sums, void **gradients, uint32_t ngradients)
{
    FAN_UNINITIALIZED fan_guards guards;
    uint32_t n = self->node.inputs;
    if (fan_box_all(sums, n) < 0 || fan_guards_begin(&guards, sums, n) < 0)
        return -1;
    PyObject *shared = fan_guards_shared(&guards);
    PyObject *drops = drops_of(sums, n);
    PyObject *fn = Py_NewRef(self->fn);
    PyObject *result = NULL;
    if (shared)
        result = call_boxed(fn, sums, n);
    if (fan_guards_end(&guards, &self->node) < 0)
        Py_CLEAR(result);
    Py_XDECREF(drops); /* before the gradients are used: a weak reference counts as another user */
    Py_XDECREF(shared);
    return gradients_returned(self, fn, result, gradients, ngradients);
}

static fan_status run(fan_node *n, void **sums, void *node_hooks, void **gradients,
                      uint32_t ngradients, fan_error *err)
{
    node_object *self = fan_node_object(n);
    int bad = 0;
    if (self->fn && node_hooks)
        bad = fan_hooks_pre(self, node_hooks, sums);
    if (!bad && !self->fn) /* a pass inside a hook may have freed it */
        bad = lost_fn(self);
    if (!bad && fan_is_function(self->fn)) {
        PyObject *fn = Py_NewRef(self->fn);
        bad = fan_function_run((function_object *)fn, n, sums, gradients, ngradients);
        Py_DECREF(fn);
        if (!bad && node_hooks)
            bad = fan_box_all(gradients, ngradients);
    } else if (!bad && fan_node_is_boxed(self)) {
        bad = run_boxed(self, sums, gradients, ngradients);
    } else if (!bad) {
        bad = run_in_python(self, sums, gradients, ngradients);
    }
    if (!bad && node_hooks)
        bad = fan_hooks_post(self, node_hooks, sums, gradients, ngradients);
    return status_of(bad, err);
}

/* fetch: of a function in Python its own memory is what it needs. */
static void fetch(const fan_node *const ahead[3])
{
    const char *far = (const char *)fan_node_object(ahead[2]);
    const PyObject *fn = fan_node_object(ahead[0])->fn;
    __builtin_prefetch(far);
    __builtin_prefetch(far + 64);
    __builtin_prefetch(fan_node_object(ahead[1])->fn);
    if (fn && fan_is_function((PyObject *)(uintptr_t)fn))
        __builtin_prefetch(((const function_object *)fn)->ctx);
}

static fan_status accumulate(const fan_pass_config *c, fan_node *leaf, void **sum, void *node_hooks,
                             fan_error *err)
{
    leaf_object *self = (leaf_object *)fan_node_object(leaf);
    if (self->divert && c->weight.on && !c->reduced) {
        PyErr_Format(PyExc_ValueError,
                     "%s: weight: a fanin.dist.Reducer collects its gradients: give the weight to "
                     "reducer.accumulate(weight=), or to reducer.at(key, weight=)",
                     fan_node_name(leaf).text);
        return status_of(-1, err);
    }
    if (self->divert)
        return status_of(fan_leaf_divert(self, sum), err);
    int bad = fan_leaf_accumulate(self, sum, c->create_graph, c->weight);
    if (!bad)
        bad = fan_hooks_accumulated(&self->base, node_hooks);
    return status_of(bad, err);
}

static void *leaf_grad(fan_node *leaf)
{
    PyObject *live = fan_exception_take(); /* of an accumulation that failed */
    PyObject *grad = fan_leaf_grad_now((leaf_object *)fan_node_object(leaf));
    if (!grad)
        PyErr_Clear();
    fan_exception_put(live);
    return grad;
}

/* ---- digests ---- */

static bool leaf_is_diverted(const fan_node *leaf)
{
    const leaf_object *self = (const leaf_object *)fan_node_object(leaf);
    return self->divert != NULL;
}

static bool slot_has_hooks(const fan_node *n)
{
    const node_more *more = fan_node_object(n)->more;
    if (!more)
        return false;
    return more->hooks[FAN_HOOK_SLOT] || more->hooks[FAN_HOOK_PRE];
}

/* digest_label: names an object that has no digest by its type. */
static void digest_label(PyObject *object, const char *reason, fan_trace_line *line)
{
    PyOS_snprintf(line->label, sizeof line->label, "%.60s: no digest: %s", Py_TYPE(object)->tp_name,
                  reason);
}

/* digest_ndarray: of an ndarray of numbers, which needs no import; false: it is something else. */
static bool digest_ndarray(PyObject *o, uint64_t known, fan_trace_line *line)
{
    if (!PyArray_CheckExact(o))
        return false;
    PyArrayObject *a = (PyArrayObject *)o;
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(a));
    if (dtype == FAN_DT_NONE)
        return false;
    fan_array view = {.dtype = dtype,
                      .ndim = PyArray_NDIM(a),
                      .size = (int64_t)PyArray_SIZE(a),
                      .shape = (int64_t *)PyArray_DIMS(a),
                      .strides = (int64_t *)PyArray_STRIDES(a),
                      .data = PyArray_BYTES(a)};
    const fan_value v = {
        .form = FAN_FORM_DENSE, .dtype = dtype, .device = fan_cpu(), .array = &view};
    void *left = NULL;
    if (!known && PyArray_NBYTES(a) >= FAN_BUSY_BYTES)
        left = fan_allow_threads_begin();
    fan_digest_fill(&v, NULL, known, line);
    if (left)
        fan_allow_threads_end(left);
    return true;
}

/* value_read: reads a gradient or a sum, for the caller to release. 0, or -1 with an exception. */
static int value_read(void *object, fan_value *v)
{
    *v = fan_value_none();
    if (!object)
        return 0;
    if (!fan_is_unboxed(object))
        return fan_import(object, false, true, v);
    *v = fan_unboxed_value(object);
    return 0;
}

void fan_digest(void *object, fan_stream *on, uint64_t known, fan_trace_line *line)
{
    if (object && !fan_is_unboxed(object) && digest_ndarray(object, known, line))
        return;
    PyObject *live = fan_exception_take();
    fan_value v;
    if (value_read(object, &v) < 0) {
        PyErr_Clear();
        digest_label(object, "it cannot be read", line);
    } else {
        void *left = NULL;
        if (!known && fan_value_bytes(&v) >= FAN_BUSY_BYTES)
            left = fan_allow_threads_begin();
        fan_digest_fill(&v, on, known, line);
        if (left)
            fan_allow_threads_end(left);
        if (v.form == FAN_FORM_OBJECT)
            digest_label(object, "an object of its own", line);
    }
    if (v.form != FAN_FORM_UNDEFINED)
        fan_value_release(&v);
    fan_exception_put(live);
}

/* gradient_memory: writes the bytes and the address of a gradient that is no array of fanin's or
 * NumPy's to a line of the trace, as its import reads them; 0 if the import fails. */
static void gradient_memory(void *gradient, fan_trace_line *line)
{
    PyObject *live = fan_exception_take();
    fan_value v;
    if (value_read(gradient, &v) < 0)
        PyErr_Clear();
    line->bytes = fan_value_bytes(&v);
    if (v.form == FAN_FORM_DENSE)
        line->other = (uint64_t)(uintptr_t)v.array->data;
    else if (v.form == FAN_FORM_SPARSE)
        line->other = (uint64_t)(uintptr_t)v.sparse->values->data;
    if (v.form != FAN_FORM_UNDEFINED)
        fan_value_release(&v);
    fan_exception_put(live);
}

static fan_status release(fan_node *n, fan_error *err)
{
    return status_of(fan_node_release(fan_node_object(n)), err);
}

/* check_signals: what a scheduled thread does between two nodes is done to the graph. */
static fan_status check_signals(fan_error *err)
{
    if (fan_sched_active())
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    return status_of(PyErr_CheckSignals(), err);
}

static const void *group(const fan_node *n)
{
    const node_more *more = fan_node_object(n)->more;
    if (!more)
        return NULL;
    return more->group;
}

static void error_put(void *error)
{
    fan_exception_put(error);
}

/* pick: the user's schedule, of the tuple of nodes that are ready. */
static fan_status pick(void *schedule, const fan_pass *pass, size_t *place, fan_error *err)
{
    PyObject *list = PyList_New(0);
    PyObject *one = NULL;
    size_t at = 0;
    bool found = false;
    for (const fan_node *n; list && (n = fan_pass_ready(pass, &at)); at++)
        fan_list_add(&list, Py_NewRef((PyObject *)fan_node_object(n)));
    PyObject *ready = fan_tuple_of(list);
    if (ready)
        one = PyObject_CallOneArg((PyObject *)schedule, ready);
    at = 0;
    for (const fan_node *n; one && !found && (n = fan_pass_ready(pass, &at)); at++) {
        found = (PyObject *)fan_node_object(n) == one;
        *place = at;
    }
    if (one && !found) {
        PyErr_Format(PyExc_ValueError, "schedule: expected one of the %zd ready nodes, got %R",
                     PyTuple_GET_SIZE(ready), one);
    }
    Py_XDECREF(one);
    Py_XDECREF(ready);
    return status_of(!found, err);
}

static fan_status progress(void *progress, uint32_t ran, uint32_t all, fan_error *err)
{
    PyObject *none = PyObject_CallFunction((PyObject *)progress, "II", ran, all);
    return status_of(fan_drop_result(none) < 0, err);
}

const fan_engine_frontend fan_python_engine = {
    .hold = fan_object_hold_here,
    .drop = fan_object_drop_here,
    .can_forward = can_forward,
    .place = place,
    .place_drop = fan_value_release,
    .buffer_new = buffer_new,
    .buffer_free = buffer_free,
    .add = add,
    .take = take,
    .read_stats = fan_explain_read_stats,
    .nonfinite = fan_explain_nonfinite,
    .hooks = fan_hooks_sums,
    .run = run,
    .is_from_hook = fan_hooks_produced,
    .fetch = fetch,
    .accumulate = accumulate,
    .leaf_grad = leaf_grad,
    .leaf_is_diverted = leaf_is_diverted,
    .slot_has_hooks = slot_has_hooks,
    .digest = fan_digest,
    .memory = gradient_memory,
    .release = release,
    .check_signals = check_signals,
    .group = group,
    .allow_threads_begin = fan_allow_threads_begin,
    .allow_threads_end = fan_allow_threads_end,
    .worker_new = worker_new,
    .worker_enter = worker_enter,
    .worker_leave = worker_leave,
    .error_take = fan_error_take,
    .error_both = fan_error_both,
    .error_put = error_put,
    .orphaned = fan_error_orphaned,
    .pick = pick,
    .progress = progress,
};
