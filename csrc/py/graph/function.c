/* function: a function of a graph tree: converts operands and results between Python and the
 * core.
 *
 * Sections: the body, which the core calls back: it runs the Python function and reads its result;
 * the call: operands and key in, the core's call, the result out; GraphTree.function, which makes
 * one; and the type. */
#include "py/graph/tree_object.h"
#include "py/base/handles.h"
#include "py/arrays/arrays.h"
#include "py/base/args.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

typedef struct graph_function {
    PyObject_HEAD vectorcallfunc call;
    fan_tree_function *f;        /* held */
    fan_graph_tree_object *tree; /* held */
    PyObject *fn, *name;         /* held */
    PyObject *key;               /* a callable, or NULL */
    PyObject *keys;              /* fanin.graph.trees.Keys */
    /* verify=: a dict: recording -> the values that fn read besides its operands */
    PyObject *outside;
    /* the report of its last run, or of the recording replayed; NULL: none */
    PyObject *form;
    PyObject *forms;      /* a dict: recording -> its form; NULL: none has one */
    PyObject *all_roles;  /* the bytes that `roles` points into */
    const uint8_t *roles; /* of each operand; nroles 0: roles[0] of all */
    size_t nroles;
    bool keeps;              /* outputs are not the function's own objects */
    bool holds;              /* keep="held" */
    fan_tree_report last;    /* without rules: it was not called */
    fan_tree_result scratch; /* room for a result, between calls */
    PyObject *weakrefs;
} graph_function;

static graph_function *function_self(PyObject *o)
{
    return (graph_function *)o;
}

static int function_traverse(PyObject *o, visitproc visit, void *arg)
{
    graph_function *self = function_self(o);
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(self->fn);
    Py_VISIT(self->key);
    Py_VISIT(self->keys);
    Py_VISIT(self->outside);
    Py_VISIT(self->form);
    Py_VISIT(self->forms);
    Py_VISIT(self->tree);
    return 0;
}

static int function_clear(PyObject *o)
{
    graph_function *self = function_self(o);
    Py_CLEAR(self->fn);
    Py_CLEAR(self->key);
    Py_CLEAR(self->keys);
    Py_CLEAR(self->outside);
    Py_CLEAR(self->form);
    Py_CLEAR(self->forms);
    return 0;
}

static void function_dealloc(PyObject *o)
{
    graph_function *self = function_self(o);
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    (void)function_clear(o);
    Py_CLEAR(self->name);
    Py_CLEAR(self->all_roles);
    Py_BEGIN_ALLOW_THREADS
        fan_tree_function_drop(self->f);
    Py_END_ALLOW_THREADS
    Py_CLEAR(self->tree);
    fan_tree_result_fini(&self->scratch);
    type->tp_free(o);
    Py_DECREF(type);
}

/* role_of: the role of operand i, a fan_tree_role. */
static uint8_t role_of(const graph_function *self, size_t i)
{
    return self->roles[self->nroles ? i : 0];
}

/* on_cpu: inside a function on the CPU operands are handles: operations on ndarrays could not be
 * recorded. */
static bool on_cpu(const graph_function *self)
{
    return !self->tree->d->backend->has_streams;
}

/* ---- the calls of a pipeline ---- */

static _Thread_local fan_graph_calls calls;

fan_graph_calls fan_graph_calls_set(fan_graph_calls now)
{
    fan_graph_calls before = calls;
    calls = now;
    return before;
}

/* ---- a body ---- */

typedef struct graph_call {
    graph_function *self;
    PyObject *const *args;
    size_t n;
    fan_array *const *in;
    PyObject *result; /* of the function; NULL: it did not run */
    PyObject *raised; /* by a warning */
    /* verify=: what the function read besides its operands; NULL: it did not run */
    PyObject *outside;
} graph_call;

static int result_add(const graph_call *call, PyObject *o, fan_tree_result *out)
{
    fan_device *device = call->self->tree->d;
    fan_device *d = device;
    fan_array *a = NULL;
    bool none = fan_is_no_gradient(o);
    if (!none)
        a = fan_array_arg(o, &d);
    if ((!a && !none) || d != device) {
        char text[32];
        return fan_set_error(PyExc_TypeError,
                             "%U: output %zu is a %.80s: a function of a graph tree returns arrays "
                             "on %s, None, or a tuple or list of them",
                             call->self->name, out->n, Py_TYPE(o)->tp_name,
                             fan_device_text(device, text, sizeof text));
    }
    if (fan_grow((void **)&out->at, &out->cap, out->n + 1, sizeof *out->at)) {
        PyErr_NoMemory();
        return -1;
    }
    out->at[out->n++] = a ? fan_array_hold(a) : NULL;
    return 0;
}

enum {
    FORM_NONE,
    FORM_ONE,
    FORM_TUPLE,
    FORM_LIST
};

static int result_read(const graph_call *call, PyObject *o, fan_tree_result *out)
{
    fan_tree_result_clear(out);
    out->form = FORM_NONE;
    if (o == Py_None)
        return 0;
    out->form = FORM_ONE;
    if (PyTuple_CheckExact(o))
        out->form = FORM_TUPLE;
    else if (PyList_CheckExact(o))
        out->form = FORM_LIST;
    else
        return result_add(call, o, out);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); i++) {
        if (result_add(call, PySequence_Fast_GET_ITEM(o, i), out) < 0)
            return -1;
    }
    return 0;
}

/* arguments_of: the arguments for the function: the caller's own, unless one is an ndarray or was
 * staged. */
static PyObject *arguments_of(const graph_call *call, fan_array *const *in)
{
    PyObject *args = PyTuple_New((Py_ssize_t)call->n);
    for (size_t i = 0; args && i < call->n; i++) {
        PyObject *o = call->args[i];
        if (in[i] && (in[i] != call->in[i] || PyArray_CheckExact(o)))
            o = fan_array_wrap(in[i], call->self->tree->d);
        else
            Py_INCREF(o);
        if (!o)
            Py_CLEAR(args);
        else
            PyTuple_SET_ITEM(args, (Py_ssize_t)i, o);
    }
    return args;
}

static bool operand_stays(const fan_handles_scope *s, size_t i)
{
    uint8_t role = s->roles[s->each ? i : 0];
    return role == FAN_TREE_STATIC || role == FAN_TREE_ACCUMULATE;
}

/* lock_operands: while a function is warmed up or recorded, only kernels may write into operands
 * that stay in place: a replay would not repeat what NumPy alone writes. Returns whether there are
 * any. */
static bool lock_operands(const graph_call *call, const fan_handles_scope *scope, bool locks)
{
    bool any = false;
    for (size_t i = 0; i < call->n; i++) {
        if (PyArray_CheckExact(call->args[i]) && operand_stays(scope, i)) {
            fan_ndarray_lock((PyArrayObject *)call->args[i], locks);
            any = true;
        }
    }
    return any;
}

/* call_on_cpu: calls the function on the CPU; new reference, or NULL with an exception. */
static PyObject *call_on_cpu(const graph_call *call, PyObject *args)
{
    graph_function *self = call->self;
    fan_handles_scope scope = {
        .function = PyUnicode_AsUTF8(self->name),
        .in = call->in,
        .n = call->n,
        .stays = operand_stays,
        .foreign = FAN_TREE_FOREIGN,
        .roles = self->roles,
        .each = self->nroles > 0,
    };
    /* not redirected: it runs as it is */
    bool locks = fan_storage_redirected() && lock_operands(call, &scope, true);
    fan_handles_begin(&scope);
    PyObject *result = PyObject_Call(self->fn, args, NULL);
    fan_handles_end(&scope);
    if (!locks)
        return result;
    PyObject *raised = fan_exception_take();
    (void)lock_operands(call, &scope, false);
    if (raised && PyObject_TypeCheck(raised, (PyTypeObject *)PyExc_ValueError)) {
        PyObject *refused = fan_call(TREES, "refused_write", "(OO)", self->name, raised);
        if (refused)
            Py_SETREF(raised, refused);
    }
    fan_exception_put(raised);
    return result;
}

/* body_call: calls the function with the lock of the interpreter: 0, or -1 with an exception. */
static int body_call(graph_call *call, fan_array *const *in, fan_tree_result *out)
{
    graph_function *self = call->self;
    if (self->tree->verify) {
        Py_XSETREF(call->outside, fan_call(TREES, "outside", "(O)", self->fn));
        if (!call->outside)
            return -1;
    }
    PyObject *args = arguments_of(call, in);
    if (!args)
        return -1;
    PyObject *result;
    /* calls inside of the function are a part of it */
    fan_graph_calls before = fan_graph_calls_set((fan_graph_calls){0});
    if (on_cpu(self))
        result = call_on_cpu(call, args);
    else
        result = PyObject_Call(self->fn, args, NULL);
    (void)fan_graph_calls_set(before);
    Py_DECREF(args);
    Py_XSETREF(call->result, result);
    if (!result)
        return -1;
    int failed = result_read(call, result, out);
    if (on_cpu(self))
        Py_CLEAR(call->result); /* handles; the caller gets other objects */
    return failed;
}

static fan_status body_run(void *ctx, fan_array *const *in, fan_tree_result *out, fan_error *err)
{
    fan_gil gil;
    fan_status status = FAN_OK;
    if (!fan_gil_enter(&gil)) {
        return fan_fail(err, FAN_ERR_STATE,
                        "the interpreter has ended: a Python function cannot run");
    }
    if (body_call(ctx, in, out) < 0)
        status = fan_from_python(err);
    fan_gil_leave(&gil);
    return status;
}

static void body_warn(void *ctx, const char *text)
{
    graph_call *call = ctx;
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text, 1) < 0)
        Py_XSETREF(call->raised, fan_exception_take());
    fan_gil_leave(&gil);
}

static void body_collect(void *ctx)
{
    fan_gil gil;
    (void)ctx;
    if (!fan_gil_enter(&gil))
        return;
    PyGC_Collect();
    fan_gil_leave(&gil);
}

/* recording_value: dict[number of the recording], borrowed; NULL: none, perhaps with an exception.
 */
static PyObject *recording_value(PyObject *dict, int node)
{
    PyObject *number = PyLong_FromLong(node);
    PyObject *value = NULL;
    if (number && dict)
        value = PyDict_GetItemWithError(dict, number);
    Py_XDECREF(number);
    return value;
}

static void body_cause(void *ctx, int node, char *buf, size_t size)
{
    const graph_function *self = ((graph_call *)ctx)->self;
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    PyObject *before = recording_value(self->outside, node);
    if (before) {
        PyObject *words = fan_call(TREES, "changed", "(OO)", self->fn, before);
        const char *text = NULL;
        if (words)
            text = PyUnicode_AsUTF8(words);
        if (text)
            snprintf(buf, size, "%s", text);
        Py_XDECREF(words);
    }
    PyErr_Clear(); /* only the difference counts */
    fan_gil_leave(&gil);
}

/* ---- operands ---- */

static const char *const role_names[] = {"auto", "copy", "static", "accumulate"};

/* ndarray_operand: an ndarray as an array of the core, with a hold; NULL with an exception. */
static fan_array *ndarray_operand(const graph_function *self, size_t i, PyObject *o)
{
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)o);
    fan_dtype dtype = fan_dtype_of_descr(descr);
    fan_array *a = NULL;
    if (dtype == FAN_DT_NONE) {
        PyErr_Format(fan_state_get()->dtype_error,
                     "%U: operand %zu has dtype %S, which cannot be recorded; expected bool, "
                     "int8..64, uint8..64, float or complex in native byte order: x.astype(..)",
                     self->name, i, (PyObject *)descr);
        return NULL;
    }
    if (fan_handles_outermost() && fan_ndarray_check_known(o, PyUnicode_AsUTF8(self->name)) < 0)
        return NULL;
    (void)fan_view_ndarray((PyArrayObject *)o, dtype, true, &a);
    return a;
}

/* other_add: an argument that is no array: lists it with its index among the others: 0, or -1 with
 * an exception. */
static int other_add(const graph_function *self, size_t i, PyObject *arg, PyObject **others)
{
    bool has_role = self->nroles == 0 || i < self->nroles;
    if (has_role && (role_of(self, i) != FAN_TREE_AUTO || PyArray_Check(arg))) {
        char text[32];
        return fan_set_error(
            PyExc_TypeError, "%U: operand %zu: its role %s needs an array on %s, got a %.80s",
            self->name, i, role_names[role_of(self, i)],
            fan_device_text(self->tree->d, text, sizeof text), Py_TYPE(arg)->tp_name);
    }
    if (!*others)
        *others = PyList_New(0);
    PyObject *one = Py_BuildValue("(nO)", (Py_ssize_t)i, arg);
    int failed = -1;
    if (*others && one)
        failed = PyList_Append(*others, one);
    Py_XDECREF(one);
    return failed;
}

/* operands_of: the arrays among the arguments, into in[], whose items are NULL; *others: a list of
 * the other arguments, NULL: none. */
static int operands_of(const graph_function *self, PyObject *const *args, size_t n, fan_array **in,
                       PyObject **others)
{
    PyTypeObject *type = fan_state_get()->array_type;
    fan_device *device = self->tree->d;
    for (size_t i = 0; i < n; i++) {
        PyObject *arg = args[i];
        if (Py_TYPE(arg) == type) {
            char here[32];
            char there[32];
            fan_device *d = fan_array_self(arg)->d;
            in[i] = fan_array_self(arg)->a;
            if (d == device)
                continue;
            return fan_set_error(
                PyExc_ValueError, "%U: operand %zu lies on %s, but the graph tree is of %s%s",
                self->name, i, fan_device_text(d, there, sizeof there),
                fan_device_text(device, here, sizeof here), fan_device_of_another(d, device));
        }
        if (on_cpu(self) && PyArray_CheckExact(arg)) {
            in[i] = ndarray_operand(self, i, arg);
            if (!in[i])
                return -1;
        } else if (other_add(self, i, arg, others) < 0)
            return -1;
    }
    return 0;
}

/* key_of: a number for the arguments that are no arrays and the result of key=; 0: there is
 * neither. */
static int key_of(const graph_function *self, PyObject *const *args, size_t n, PyObject *others,
                  uint64_t *out)
{
    *out = 0;
    if (!others && !self->key)
        return 0;
    PyObject *given = Py_None;
    if (self->key)
        given = PyObject_Vectorcall(self->key, args, n, NULL);
    if (!given)
        return -1;
    PyObject *number = PyObject_CallFunctionObjArgs(self->keys, given, fan_or_none(others), NULL);
    if (self->key)
        Py_DECREF(given);
    if (!number)
        return -1;
    *out = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return 0;
}

/* ---- a call ---- */

/* output_hold: lists an output that is copied if it lives at the end of the step: 0, or -1 with an
 * exception. */
static int output_hold(fan_graph_tree_object *tree, PyObject *output)
{
    PyObject *ref = PyWeakref_NewRef(output, NULL);
    int failed = -1;
    if (!tree->held)
        tree->held = PyList_New(0);
    if (ref && tree->held)
        failed = PyList_Append(tree->held, ref);
    Py_XDECREF(ref);
    return failed;
}

/* object_of: an output: the caller's own object if it is an operand. */
static PyObject *object_of(const graph_call *call, fan_array *a)
{
    const graph_function *self = call->self;
    if (!a)
        return Py_NewRef(Py_None);
    for (size_t i = 0; i < call->n; i++) {
        if (call->in[i] == a)
            return Py_NewRef(call->args[i]);
    }
    PyObject *made = fan_array_wrap(a, self->tree->d);
    bool held = made && self->holds && fan_tree_memory_under(a);
    if (held && output_hold(self->tree, made) < 0)
        Py_CLEAR(made);
    return made;
}

static PyObject *result_of(const graph_call *call, const fan_tree_result *result)
{
    if (result->form == FORM_NONE)
        Py_RETURN_NONE;
    if (result->form == FORM_ONE)
        return object_of(call, result->at[0]);
    PyObject *made = PyTuple_New((Py_ssize_t)result->n);
    for (size_t i = 0; made && i < result->n; i++) {
        PyObject *o = object_of(call, result->at[i]);
        if (!o)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, (Py_ssize_t)i, o);
    }
    if (made && result->form == FORM_LIST)
        Py_SETREF(made, PySequence_List(made));
    return made;
}

/* keep_in: dict[number of the recording] = value; *dict is made at the first. 0, or -1 with an
 * exception. */
static int keep_in(PyObject **dict, int node, PyObject *value)
{
    PyObject *number = PyLong_FromLong(node);
    int failed = -1;
    if (!*dict)
        *dict = PyDict_New();
    if (number && *dict)
        failed = PyDict_SetItem(*dict, number, value);
    Py_XDECREF(number);
    return failed;
}

/* update_form: the form of a recording is kept with it, and is the function's again at its replay:
 * 0, or -1 with an exception. */
static int update_form(graph_function *self, const fan_tree_report *report)
{
    if (!self->form)
        return 0;
    if (report->outcome == FAN_TREE_RECORD)
        return keep_in(&self->forms, report->node, self->form);
    if (report->outcome != FAN_TREE_REPLAY)
        return 0;
    PyObject *form = recording_value(self->forms, report->node);
    if (form) {
        Py_SETREF(self->form, Py_NewRef(form));
        return 0;
    }
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_MemoryError, "out of memory when this was recorded");
    return -1;
}

/* call_done: after the core's call: what the function keeps of it, and the result. */
static PyObject *call_done(const graph_call *call, const fan_tree_report *report,
                           const fan_tree_result *result)
{
    graph_function *self = call->self;
    fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    self->last = *report;
    if (report->outcome == FAN_TREE_RECORD && call->outside) {
        (void)keep_in(&self->outside, report->node, call->outside);
        PyErr_Clear(); /* not fatal: a difference is then reported without its cause */
    }
    if (update_form(self, report) < 0)
        return NULL;
    if (call->raised) {
        fan_exception_put(Py_NewRef(call->raised));
        return NULL;
    }
    /* the function's own result, if it ran as it is and no output was copied */
    bool as_it_is = report->outcome == FAN_TREE_WARM;
    if (report->outcome == FAN_TREE_EAGER)
        as_it_is = !report->handed;
    if (as_it_is && call->result && !self->keeps)
        return Py_NewRef(call->result);
    return result_of(call, result);
}

/* call_list: lists a call for the pipeline that runs on this thread: the function when it begins,
 * its outcome when it ends. 0, or -1 with an exception. */
static int call_list(const graph_call *call, const fan_tree_report *ended)
{
    if (calls.tree != call->self->tree)
        return 0;
    if (!ended)
        return PyList_Append(calls.list, (PyObject *)call->self);
    PyObject *outcome = PyLong_FromLong((long)ended->outcome);
    int failed = -1;
    if (outcome)
        failed = PyList_Append(calls.list, outcome);
    Py_XDECREF(outcome);
    return failed;
}

static PyObject *call_with(graph_call *call, uint64_t key)
{
    graph_function *self = call->self;
    char call_site[96];
    fan_error err = {0};
    fan_status status;
    fan_tree_report report = {.node = -1};
    fan_tree_result result = self->scratch;
    fan_tree_args args = {
        .in = call->in,
        .n = call->n,
        .key = key,
        .call_site = call_site,
        .body = {body_run, body_warn, body_collect, body_cause, call},
    };
    PyObject *made = NULL;
    if (call_list(call, NULL) < 0)
        return NULL;
    self->scratch = (fan_tree_result){0};
    fan_call_site(call_site, sizeof call_site);
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_function_call(self->f, &args, &result, &report, &err);
    Py_END_ALLOW_THREADS
    if (status == FAN_OK)
        made = call_done(call, &report, &result);
    if (made && call_list(call, &report) < 0)
        Py_CLEAR(made);
    fan_tree_result_clear(&result);
    if (self->scratch.at) /* another thread's call has ended meanwhile */
        fan_tree_result_fini(&result);
    else
        self->scratch = result;
    if (status != FAN_OK)
        fan_raise(status, &err);
    if (status == FAN_ERR_EXTERN) {
        PyObject *raised = fan_exception_take();
        PyObject *note = PyUnicode_FromFormat(
            "raised in %U, a function of a graph tree: nothing was recorded", self->name);
        fan_exception_note(raised, note);
        fan_exception_put(raised);
    }
    return made;
}

#define OPERANDS_ON_STACK 32

static PyObject *function_call(PyObject *o, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    graph_function *self = function_self(o);
    size_t n = (size_t)PyVectorcall_NARGS(nargsf);
    fan_array *on_stack[OPERANDS_ON_STACK];
    fan_array **in = on_stack;
    PyObject *others = NULL;
    PyObject *made = NULL;
    if (kwnames && PyTuple_GET_SIZE(kwnames)) {
        return PyErr_Format(PyExc_TypeError,
                            "%U: pass operands by position, in the order of roles=", self->name);
    }
    if (n > OPERANDS_ON_STACK) {
        in = fan_alloc(n * sizeof *in);
        if (!in)
            return PyErr_NoMemory();
    }
    Py_INCREF(o);
    memset(in, 0, n * sizeof *in);
    uint64_t key = 0;
    int failed = operands_of(self, args, n, in, &others);
    if (!failed)
        failed = key_of(self, args, n, others, &key);
    if (!failed) {
        graph_call call = {
            .self = self,
            .args = args,
            .n = n,
            .in = in,
        };
        made = call_with(&call, key);
        Py_XDECREF(call.result);
        Py_XDECREF(call.raised);
        Py_XDECREF(call.outside);
    }
    Py_XDECREF(others);
    for (size_t i = 0; i < n; i++) {
        if (in[i] && PyArray_CheckExact(args[i])) /* else the argument holds it */
            fan_array_drop(in[i]);
    }
    if (in != on_stack)
        fan_free(in);
    Py_DECREF(o);
    return made;
}

FAN_STEP_VECTOR(function, function_call)

/* ---- GraphTree.function ---- */

static PyObject *name_of(PyObject *fn)
{
    PyObject *name = PyObject_GetAttrString(fn, "__name__");
    if (name && PyUnicode_Check(name) && PyUnicode_AsUTF8(name))
        return name;
    Py_XDECREF(name);
    PyErr_Clear();
    return PyUnicode_FromString("function");
}

/* The parameters of GraphTree.function. */
enum {
    FN,
    ROLES,
    KEEP,
    KEY,
    ONLY,
    MIN_KERNELS
};

/* function_options: reads the options (NULL: the default), and makes the core's function: 0, or -1
 * with an exception. */
static int function_options(graph_function *self, PyObject *const *a)
{
    fan_error err = {0};
    fan_tree_function_options read = {.nkeep = SIZE_MAX};
    PyObject *keep = a[KEEP] ? a[KEEP] : Py_False;
    PyObject *only = fan_or_none(a[ONLY]);
    int64_t kernels = 0;
    PyObject *options;
    if (fan_number_arg(a[MIN_KERNELS], "function: min_kernels", &kernels) < 0)
        return -1;
    if (kernels < 0) {
        return fan_set_error(PyExc_ValueError,
                             "function: min_kernels: expected a number of at least 0, got %lld",
                             (long long)kernels);
    }
    read.min_kernels = (size_t)kernels;
    if (a[ROLES])
        options = fan_call(TREES, "options", "(OOO)", a[ROLES], keep, only);
    else
        options = fan_call(TREES, "options", "(sOO)", "auto", keep, only);
    if (!options)
        return -1;
    PyObject *kept = PyTuple_GET_ITEM(options, 2); /* None: all */
    if (kept != Py_None) {
        read.nkeep = (size_t)PyBytes_GET_SIZE(kept);
        read.keep = (const bool *)PyBytes_AS_STRING(kept);
    }
    PyObject *sizes = PyTuple_GET_ITEM(options, 3);
    read.nonly = (size_t)PyBytes_GET_SIZE(sizes) / sizeof *read.only;
    read.only = (const int64_t *)(const void *)PyBytes_AS_STRING(sizes);
    self->holds = PyTuple_GET_ITEM(options, 4) == Py_True;
    self->keeps = read.nkeep > 0 || self->holds;
    self->all_roles = Py_NewRef(PyTuple_GET_ITEM(options, 0));
    self->roles = (const uint8_t *)PyBytes_AS_STRING(self->all_roles);
    if (PyTuple_GET_ITEM(options, 1) == Py_True)
        self->nroles = (size_t)PyBytes_GET_SIZE(self->all_roles);
    read.roles = self->roles;
    read.nroles = self->nroles;
    fan_status status =
        fan_tree_function_new(self->tree->t, PyUnicode_AsUTF8(self->name), &read, &self->f, &err);
    Py_DECREF(options);
    if (status == FAN_OK)
        return 0;
    fan_raise(status, &err);
    return -1;
}

PyObject *fan_graph_function_make(fan_graph_tree_object *tree, PyObject *const *a)
{
    PyObject *fn = a[FN];
    PyObject *key = a[KEY];
    PyTypeObject *type = fan_state_get()->graph_function_type;
    if (!PyCallable_Check(fn)) {
        return PyErr_Format(PyExc_TypeError, "function: expected a function of arrays, not a %.80s",
                            Py_TYPE(fn)->tp_name);
    }
    if (key == Py_None)
        key = NULL;
    if (key && !PyCallable_Check(key)) {
        return PyErr_Format(PyExc_TypeError,
                            "function: expected key= to be called with the operands, not a %.80s",
                            Py_TYPE(key)->tp_name);
    }
    graph_function *self = (graph_function *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->call = function_vector_step;
    self->tree = (fan_graph_tree_object *)Py_NewRef((PyObject *)tree);
    self->fn = Py_NewRef(fn);
    self->key = Py_XNewRef(key);
    self->name = name_of(fn);
    if (self->name)
        self->keys = fan_call(TREES, "Keys", "(O)", self->name);
    if (!self->keys || function_options(self, a) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* ---- the type ---- */

static PyObject *function_get_last(PyObject *o, void *Py_UNUSED(closure))
{
    const fan_tree_report last = function_self(o)->last; /* a copy: another thread may call */
    if (!last.rules)
        Py_RETURN_NONE;
    return fan_call(TREES, "outcome", "(iziI)", (int)last.outcome,
                    last.reason[0] ? last.reason : NULL, last.node, (unsigned)last.rules);
}

static PyObject *function_explain(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *last = function_get_last(o, NULL);
    if (!last)
        return NULL;
    return fan_call(TREES, "explained", "(ON)", function_self(o)->name, last);
}

static PyObject *function_get_stats(PyObject *o, void *Py_UNUSED(closure))
{
    fan_tree_function_stats s;
    fan_tree_function *f = function_self(o)->f;
    Py_BEGIN_ALLOW_THREADS
        fan_tree_function_get_stats(f, &s);
    Py_END_ALLOW_THREADS
    return fan_call(TREES, "FunctionStats", "(KKKKK)", s.warmed, s.recorded, s.replayed, s.eager,
                    s.nodes);
}

static PyObject *function_get_tree(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)function_self(o)->tree);
}

static PyObject *function_get_form(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *form = function_self(o)->form;
    return Py_NewRef(fan_or_none(form));
}

static PyObject *function_put_form(PyObject *o, PyObject *form)
{
    Py_XSETREF(function_self(o)->form, Py_NewRef(form));
    Py_RETURN_NONE;
}

static PyObject *function_get_name(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef(function_self(o)->name);
}

static PyObject *function_repr(PyObject *o)
{
    return PyUnicode_FromFormat("<fanin.GraphFunction %U>", function_self(o)->name);
}

/* function_bind: as functions do, it binds as a method of an object. */
static PyObject *function_bind(PyObject *o, PyObject *owner, PyObject *Py_UNUSED(type))
{
    if (!owner || owner == Py_None)
        return Py_NewRef(o);
    return PyMethod_New(o, owner);
}

#include "py/declared/GraphFunction.h"

static PyMemberDef function_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(graph_function, call), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(graph_function, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot function_slots[] = {
    {Py_tp_doc, (void *)function_doc},
    {Py_tp_dealloc, function_dealloc},
    {Py_tp_traverse, function_traverse},
    {Py_tp_clear, function_clear},
    {Py_tp_repr, function_repr},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getset, function_getset},
    {Py_tp_methods, function_methods},
    {Py_tp_members, function_members},
    {Py_tp_descr_get, function_bind},
    {0, NULL},
};

PyType_Spec fan_graph_function_spec = {
    .name = "fanin._core.GraphFunction",
    .basicsize = sizeof(graph_function),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = function_slots,
};
