/* graph_function: a function of a graph tree: converts operands and results between Python and the
 * core. */
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
    /* what the function said of its last run, or of the recording replayed; NULL: nothing */
    PyObject *form;
    PyObject *forms;      /* a dict: recording -> its form; NULL: none has one */
    PyObject *all_roles;  /* bytes: */
    const uint8_t *roles; /* of each operand; nroles 0: roles[0] of all */
    size_t nroles;
    bool keeps;
    bool called;
    fan_tree_report last;
    fan_tree_result scratch; /* room for a result, between calls */
    PyObject *weakrefs;
} graph_function;

static graph_function *function_self(PyObject *o)
{
    return (graph_function *)o;
}

static int function_traverse(PyObject *o, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(function_self(o)->fn);
    Py_VISIT(function_self(o)->key);
    Py_VISIT(function_self(o)->keys);
    Py_VISIT(function_self(o)->outside);
    Py_VISIT(function_self(o)->form);
    Py_VISIT(function_self(o)->forms);
    Py_VISIT(function_self(o)->tree);
    return 0;
}

static int function_clear(PyObject *o)
{
    Py_CLEAR(function_self(o)->fn);
    Py_CLEAR(function_self(o)->key);
    Py_CLEAR(function_self(o)->keys);
    Py_CLEAR(function_self(o)->outside);
    Py_CLEAR(function_self(o)->form);
    Py_CLEAR(function_self(o)->forms);
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

/* ---- a body ---- */

typedef struct body {
    graph_function *self;
    PyObject *const *args;
    size_t n;
    fan_array *const *in;
    PyObject *result; /* of the function; NULL: it did not run */
    PyObject *raised; /* by a warning */
    /* verify=: what the function read besides its operands; NULL: it did not run */
    PyObject *outside;
} body;

static int result_add(body *b, PyObject *o, fan_tree_result *out)
{
    fan_device *d = NULL;
    bool none = fan_is_no_gradient(o);
    fan_array *a = none ? NULL : fan_array_arg(o, &d);
    char text[32];
    if (!none && (!a || d != b->self->tree->d))
        return fan_set_error(PyExc_TypeError,
                             "%U: output %zu is a %.80s: a function of a graph tree returns arrays "
                             "on %s, None, or a tuple or list of them",
                             b->self->name, out->n, Py_TYPE(o)->tp_name,
                             fan_device_text(b->self->tree->d, text, sizeof text));
    if (fan_grow((void **)&out->at, &out->cap, out->n + 1, sizeof(fan_array *))) {
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

static int result_read(body *b, PyObject *o, fan_tree_result *out)
{
    fan_tree_result_clear(out);
    out->form = o == Py_None            ? FORM_NONE
                : PyTuple_CheckExact(o) ? FORM_TUPLE
                : PyList_CheckExact(o)  ? FORM_LIST
                                        : FORM_ONE;
    if (out->form == FORM_NONE)
        return 0;
    if (out->form == FORM_ONE)
        return result_add(b, o, out);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); i++)
        if (result_add(b, PySequence_Fast_GET_ITEM(o, i), out) < 0)
            return -1;
    return 0;
}

/* on_cpu: inside a function on the CPU operands are handles: operations on ndarrays could not be
 * recorded. */
static bool on_cpu(const graph_function *self)
{
    return !self->tree->d->backend->has_streams;
}

static PyObject *body_args(const body *b, fan_array *const *in)
{
    PyObject *args = PyTuple_New((Py_ssize_t)b->n);
    for (size_t i = 0; args && i < b->n; i++) {
        bool same = in[i] == b->in[i] && !(in[i] && PyArray_CheckExact(b->args[i]));
        PyObject *o = same ? Py_NewRef(b->args[i]) : fan_array_wrap(in[i], b->self->tree->d);
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
static bool lock_operands(const body *b, const fan_handles_scope *s, bool locks)
{
    bool any = false;
    for (size_t i = 0; i < b->n; i++)
        if (PyArray_CheckExact(b->args[i]) && operand_stays(s, i)) {
            fan_ndarray_lock((PyArrayObject *)b->args[i], locks);
            any = true;
        }
    return any;
}

/* call_on_cpu: calls the function on the CPU; new reference, or NULL with an exception. */
static PyObject *call_on_cpu(const body *b, const fan_handles_scope *scope, PyObject *args)
{
    /* not redirected: it runs as it is */
    bool locks = fan_storage_redirected() && lock_operands(b, scope, true);
    fan_handles_begin(scope);
    PyObject *result = PyObject_Call(b->self->fn, args, NULL);
    fan_handles_end(scope);
    if (!locks)
        return result;
    PyObject *raised = fan_exception_take();
    (void)lock_operands(b, scope, false);
    if (raised && PyObject_TypeCheck(raised, (PyTypeObject *)PyExc_ValueError)) {
        PyObject *refused = fan_call(TREES, "refused_write", "(OO)", b->self->name, raised);
        if (refused)
            Py_SETREF(raised, refused);
    }
    fan_exception_put(raised);
    return result;
}

static fan_status body_run(void *ctx, fan_array *const *in, fan_tree_result *out, fan_error *err)
{
    body *b = ctx;
    fan_handles_scope scope = {PyUnicode_AsUTF8(b->self->name),
                               b->in,
                               b->n,
                               operand_stays,
                               FAN_TREE_FOREIGN,
                               b->self->roles,
                               b->self->nroles > 0};
    fan_gil gil;
    fan_status status = FAN_OK;
    if (!fan_gil_enter(&gil))
        return fan_fail(err, FAN_ERR_STATE,
                        "the interpreter has ended: a Python function cannot run");
    if (b->self->tree->verify)
        Py_XSETREF(b->outside, fan_call(TREES, "outside", "(O)", b->self->fn));
    PyObject *args = b->self->tree->verify && !b->outside ? NULL : body_args(b, in);
    PyObject *result = NULL;
    if (args && on_cpu(b->self))
        result = call_on_cpu(b, &scope, args);
    else if (args)
        result = PyObject_Call(b->self->fn, args, NULL);
    Py_XDECREF(args);
    Py_XSETREF(b->result, result);
    if (!result || result_read(b, result, out) < 0)
        status = fan_from_python(err);
    if (on_cpu(b->self))
        Py_CLEAR(b->result); /* handles; the caller gets other objects */
    fan_gil_leave(&gil);
    return status;
}

static void body_warn(void *ctx, const char *text)
{
    body *b = ctx;
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text, 1) < 0)
        Py_XSETREF(b->raised, fan_exception_take());
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

static void body_cause(void *ctx, int node, char *buf, size_t size)
{
    const graph_function *self = ((body *)ctx)->self;
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    PyObject *number = PyLong_FromLong(node);
    PyObject *before =
        number && self->outside ? PyDict_GetItemWithError(self->outside, number) : NULL;
    PyObject *words = before ? fan_call(TREES, "changed", "(OO)", self->fn, before) : NULL;
    const char *text = words ? PyUnicode_AsUTF8(words) : NULL;
    if (text)
        snprintf(buf, size, "%s", text);
    PyErr_Clear(); /* only the difference counts */
    Py_XDECREF(number);
    Py_XDECREF(words);
    fan_gil_leave(&gil);
}

/* ---- a call ---- */

static const char *const role_names[] = {"auto", "copy", "static", "accumulate"};

/* ndarray_operand: an ndarray as an array of the core, with a hold; NULL with an exception. */
static fan_array *ndarray_operand(const graph_function *self, size_t i, PyObject *o)
{
    PyArray_Descr *d = PyArray_DESCR((PyArrayObject *)o);
    fan_dtype dtype = fan_dtype_of_descr(d);
    fan_array *a = NULL;
    if (dtype == FAN_DT_NONE)
        PyErr_Format(fan_state_get()->dtype_error,
                     "%U: operand %zu has dtype %S, which cannot be recorded; expected bool, "
                     "int8..64, uint8..64, float or complex in native byte order: x.astype(..)",
                     self->name, i, (PyObject *)d);
    else if (!fan_handles_outermost() ||
             fan_ndarray_check_known(o, PyUnicode_AsUTF8(self->name)) == 0)
        (void)fan_view_ndarray((PyArrayObject *)o, dtype, true, &a);
    return a;
}

/* operands_of: the arrays among the arguments; *others: a list of the other arguments, NULL:
 * none. */
static int operands_of(const graph_function *self, PyObject *const *args, size_t n, fan_array **in,
                       PyObject **others)
{
    PyTypeObject *type = fan_state_get()->array_type;
    *others = NULL;
    for (size_t i = 0; i < n; i++) {
        bool is_array = Py_TYPE(args[i]) == type;
        fan_device *d = is_array ? fan_array_self(args[i])->d : NULL;
        char here[32], there[32];
        in[i] = is_array ? fan_array_self(args[i])->a : NULL;
        if (is_array && d == self->tree->d)
            continue;
        if (on_cpu(self) && PyArray_CheckExact(args[i])) {
            if (!(in[i] = ndarray_operand(self, i, args[i])))
                return -1;
            continue;
        }
        if (in[i])
            return fan_set_error(PyExc_ValueError,
                                 "%U: operand %zu lies on %s, but the graph tree is of %s%s",
                                 self->name, i, fan_device_text(d, there, sizeof there),
                                 fan_device_text(self->tree->d, here, sizeof here),
                                 fan_device_of_another(d, self->tree->d));
        if ((self->nroles == 0 || i < self->nroles) &&
            (self->roles[self->nroles ? i : 0] != FAN_TREE_AUTO || PyArray_Check(args[i]))) {
            char text[32];
            return fan_set_error(
                PyExc_TypeError, "%U: operand %zu: its role %s needs an array on %s, got a %.80s",
                self->name, i, role_names[self->roles[self->nroles ? i : 0]],
                fan_device_text(self->tree->d, text, sizeof text), Py_TYPE(args[i])->tp_name);
        }
        if (!*others && !(*others = PyList_New(0)))
            return -1;
        PyObject *one = Py_BuildValue("(nO)", (Py_ssize_t)i, args[i]);
        if (!one || PyList_Append(*others, one) < 0) {
            Py_XDECREF(one);
            return -1;
        }
        Py_DECREF(one);
    }
    return 0;
}

/* key_of: a number for the arguments that are no arrays and the result of key=; 0: there is
 * neither. */
static int key_of(graph_function *self, PyObject *const *args, size_t n, PyObject *others,
                  uint64_t *out)
{
    *out = 0;
    if (!others && !self->key)
        return 0;
    PyObject *given =
        self->key ? PyObject_Vectorcall(self->key, args, n, NULL) : Py_NewRef(Py_None);
    PyObject *number =
        given ? PyObject_CallFunctionObjArgs(self->keys, given, others ? others : Py_None, NULL)
              : NULL;
    Py_XDECREF(given);
    if (!number)
        return -1;
    *out = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return 0;
}

/* object_of: an output: the caller's own object if it is an operand. */
static PyObject *object_of(const body *b, fan_array *a)
{
    if (!a)
        return Py_NewRef(Py_None);
    for (size_t i = 0; i < b->n; i++)
        if (b->in[i] == a)
            return Py_NewRef(b->args[i]);
    return fan_array_wrap(a, b->self->tree->d);
}

static PyObject *result_of(const body *b, const fan_tree_result *r)
{
    if (r->form == FORM_NONE)
        Py_RETURN_NONE;
    if (r->form == FORM_ONE)
        return object_of(b, r->at[0]);
    PyObject *made =
        r->form == FORM_TUPLE ? PyTuple_New((Py_ssize_t)r->n) : PyList_New((Py_ssize_t)r->n);
    for (size_t i = 0; made && i < r->n; i++) {
        PyObject *o = object_of(b, r->at[i]);
        if (!o)
            Py_CLEAR(made);
        else if (r->form == FORM_TUPLE)
            PyTuple_SET_ITEM(made, (Py_ssize_t)i, o);
        else
            PyList_SET_ITEM(made, (Py_ssize_t)i, o);
    }
    return made;
}

/* keep_in: dict[number of the recording] = value; *dict is made at the first. 0, or -1 with an
 * exception. */
static int keep_in(PyObject **dict, int node, PyObject *value)
{
    PyObject *number = PyLong_FromLong(node);
    if (!*dict)
        *dict = PyDict_New();
    int bad = number && *dict ? PyDict_SetItem(*dict, number, value) : -1;
    Py_XDECREF(number);
    return bad;
}

/* update_form: the form of a recording is kept with it, and is the function's again at its replay:
 * 0, or -1 with an exception. */
static int update_form(graph_function *self, const fan_tree_report *report)
{
    if (report->outcome == FAN_TREE_RECORD && self->form)
        return keep_in(&self->forms, report->node, self->form);
    if (report->outcome != FAN_TREE_REPLAY || !self->form)
        return 0;
    PyObject *number = PyLong_FromLong(report->node);
    PyObject *form = number && self->forms ? PyDict_GetItemWithError(self->forms, number) : NULL;
    Py_XDECREF(number);
    if (!form)
        return PyErr_Occurred()
                   ? -1
                   : fan_set_error(PyExc_MemoryError, "out of memory when this was recorded");
    if (form != self->form)
        Py_XSETREF(self->form, Py_NewRef(form));
    return 0;
}

static PyObject *call_with(graph_function *self, body *b, uint64_t key)
{
    char call_site[96];
    fan_error err = {0};
    fan_status status;
    fan_tree_report report = {.node = -1};
    fan_tree_result result = self->scratch;
    fan_tree_args a = {.in = b->in,
                       .n = b->n,
                       .key = key,
                       .call_site = call_site,
                       .body = {body_run, body_warn, body_collect, body_cause, b}};
    PyObject *made = NULL;
    self->scratch = (fan_tree_result){0};
    fan_call_site(call_site, sizeof call_site);
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_function_call(self->f, &a, &result, &report, &err);
    Py_END_ALLOW_THREADS
    if (status == FAN_OK) {
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
        self->last = report;
        self->called = true;
        if (report.outcome == FAN_TREE_RECORD && b->outside) {
            (void)keep_in(&self->outside, report.node, b->outside);
            PyErr_Clear(); /* not fatal: a difference is then reported without its cause */
        }
        if (update_form(self, &report) < 0)
            made = NULL;
        else if (b->raised)
            fan_exception_put(Py_NewRef(b->raised));
        else if (b->result && !self->keeps &&
                 (report.outcome == FAN_TREE_WARM ||
                  (report.outcome == FAN_TREE_EAGER && !report.handed)))
            made = Py_NewRef(b->result);
        else
            made = result_of(b, &result);
    }
    fan_tree_result_clear(&result);
    if (self->scratch.at)
        fan_tree_result_fini(&result);
    else
        self->scratch = result;
    if (status != FAN_OK) {
        fan_raise(status, &err);
        if (status == FAN_ERR_EXTERN) {
            PyObject *raised = fan_exception_take();
            PyObject *note = PyUnicode_FromFormat(
                "raised in %U, a function of a graph tree: nothing was recorded", self->name);
            fan_exception_note(raised, note);
            fan_exception_put(raised);
        }
    }
    return made;
}

#define OPERANDS_ON_STACK 32

static PyObject *function_call(PyObject *o, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    graph_function *self = function_self(o);
    size_t n = (size_t)PyVectorcall_NARGS(nargsf);
    fan_array *on_stack[OPERANDS_ON_STACK], **in = on_stack;
    PyObject *others = NULL, *made = NULL;
    uint64_t key;
    if (kwnames && PyTuple_GET_SIZE(kwnames))
        return PyErr_Format(PyExc_TypeError,
                            "%U: pass operands by position, in the order of roles=", self->name);
    if (n > OPERANDS_ON_STACK && !(in = fan_alloc(n * sizeof *in)))
        return PyErr_NoMemory();
    Py_INCREF(o);
    if (on_cpu(self))
        memset(in, 0, n * sizeof *in);
    if (operands_of(self, args, n, in, &others) == 0 && key_of(self, args, n, others, &key) == 0) {
        body b = {.self = self, .args = args, .n = n, .in = in};
        made = call_with(self, &b, key);
        Py_XDECREF(b.result);
        Py_XDECREF(b.raised);
        Py_XDECREF(b.outside);
    }
    Py_XDECREF(others);
    for (size_t i = 0; on_cpu(self) && i < n; i++)
        if (in[i] && PyArray_CheckExact(args[i]))
            fan_array_drop(in[i]);
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

PyObject *fan_graph_function_make(fan_graph_tree_object *tree, PyObject *const *a)
{
    enum {
        FN,
        ROLES,
        KEEP,
        KEY
    };
    PyObject *fn = a[FN], *roles = a[ROLES], *keep = a[KEEP] ? a[KEEP] : Py_False,
             *key = a[KEY] ? a[KEY] : Py_None;
    PyTypeObject *type = fan_state_get()->graph_function_type;
    fan_error err = {0};
    fan_status status;
    if (!PyCallable_Check(fn) || (key != Py_None && !PyCallable_Check(key)))
        return PyErr_Format(PyExc_TypeError, "function: expected %s, not a %.80s",
                            PyCallable_Check(fn) ? "key= to be called with the operands"
                                                 : "a function of arrays",
                            Py_TYPE(PyCallable_Check(fn) ? key : fn)->tp_name);
    graph_function *self = (graph_function *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->call = function_vector_step;
    self->tree = (fan_graph_tree_object *)Py_NewRef((PyObject *)tree);
    self->fn = Py_NewRef(fn);
    self->key = key == Py_None ? NULL : Py_NewRef(key);
    if ((self->name = name_of(fn)))
        self->keys = fan_call(TREES, "Keys", "(O)", self->name);
    PyObject *options = NULL;
    if (self->keys && roles)
        options = fan_call(TREES, "options", "(OO)", roles, keep);
    else if (self->keys)
        options = fan_call(TREES, "options", "(sO)", "auto", keep);
    if (options) {
        PyObject *kept = PyTuple_GET_ITEM(options, 2); /* None: all */
        size_t nkeep = kept == Py_None ? SIZE_MAX : (size_t)PyBytes_GET_SIZE(kept);
        self->all_roles = Py_NewRef(PyTuple_GET_ITEM(options, 0));
        self->roles = (const uint8_t *)PyBytes_AS_STRING(self->all_roles);
        self->nroles =
            PyTuple_GET_ITEM(options, 1) == Py_True ? (size_t)PyBytes_GET_SIZE(self->all_roles) : 0;
        self->keeps = nkeep > 0;
        status = fan_tree_function_new(
            tree->t, PyUnicode_AsUTF8(self->name), self->roles, self->nroles,
            kept == Py_None ? NULL : (const bool *)PyBytes_AS_STRING(kept), nkeep, &self->f, &err);
        if (status != FAN_OK)
            fan_raise(status, &err);
        Py_DECREF(options);
    }
    if (!self->f)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* ---- the type ---- */

static PyObject *function_get_last(PyObject *o, void *Py_UNUSED(closure))
{
    const fan_tree_report last = function_self(o)->last; /* a copy: another thread may call */
    if (!function_self(o)->called)
        Py_RETURN_NONE;
    return fan_call(TREES, "outcome", "(iziI)", (int)last.outcome,
                    last.reason[0] ? last.reason : NULL, last.node, (unsigned)last.rules);
}

static PyObject *function_explain(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *last = function_get_last(o, NULL);
    return last ? fan_call(TREES, "explained", "(ON)", function_self(o)->name, last) : NULL;
}

static PyObject *function_get_form(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *form = function_self(o)->form;
    return Py_NewRef(form ? form : Py_None);
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
    return owner && owner != Py_None ? PyMethod_New(o, owner) : Py_NewRef(o);
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
