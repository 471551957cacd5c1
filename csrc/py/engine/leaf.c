/* leaf: fanin.Leaf, where gradients end (rules L; engine/leaf.h decides).
 *
 * Read and write the gradient; accumulate: read the facts, run the plan; the attribute grad;
 * creation and end; the methods and the type. */
#include "py/arrays/facts.h"
#include "py/engine/node_object.h"
#include "py/base/args.h"

#include "array/extents.h"
#include "array/overlap.h"

#include <stdio.h>
#include <string.h>

static leaf_object *leaf_cast(PyObject *o)
{
    return (leaf_object *)o;
}

static const fan_slot_spec *spec_of(const leaf_object *self)
{
    return fan_node_specs(&self->base.node);
}

/* ---- read and write the gradient ---- */

/* grad_read: new reference; NULL without an exception: there is none. */
static PyObject *grad_read(leaf_object *self)
{
    fan_leaf_touch(&self->claim, FAN_SCHED_READ);
    if (!self->outside)
        return Py_XNewRef(self->grad);
    PyObject *grad = PyObject_GetAttrString(self->array, "grad");
    if (grad == Py_None)
        Py_CLEAR(grad);
    return grad;
}

/* grad_write: takes the reference; NULL: no gradient. */
static int grad_write(leaf_object *self, PyObject *grad)
{
    fan_leaf_touch(&self->claim, FAN_SCHED_WRITE);
    if (self->outside) {
        int bad = PyObject_SetAttrString(self->array, "grad", fan_or_none(grad));
        Py_XDECREF(grad);
        return bad;
    }
    Py_XSETREF(self->grad, grad);
    return 0;
}

/* ---- accumulate ---- */

static bool is_number(PyObject *o)
{
    switch (fan_class_of(o)) {
    case FAN_IS_NUMBER:
    case FAN_IS_NUMBER_SUBCLASS:
    case FAN_IS_NUMPY_SCALAR:
        return true;
    default:
        return false;
    }
}

static fan_leaf_form form_of_value(const fan_value *v, PyObject *o)
{
    if (v->form == FAN_FORM_SPARSE)
        return FAN_LEAF_SPARSE;
    if (v->form == FAN_FORM_OBJECT)
        return FAN_LEAF_OTHER;
    /* jax's arrays are never written */
    if (v->form == FAN_FORM_DENSE && !v->array->writable && !PyArray_Check(o))
        return FAN_LEAF_OTHER;
    return FAN_LEAF_DENSE;
}

/* form_of: -1 with an exception. */
static int form_of(const leaf_object *self, PyObject *o, fan_leaf_form *out)
{
    fan_value v;
    *out = FAN_LEAF_DENSE;
    if (!o)
        *out = FAN_LEAF_ABSENT;
    if (!o || PyArray_CheckExact(o))
        return 0;
    if (is_number(o)) {
        if (!PyArray_Check(self->array))
            *out = FAN_LEAF_OTHER;
        return 0;
    }
    if (fan_import(o, false, true, &v) < 0)
        return -1;
    *out = form_of_value(&v, o);
    fan_value_release(&v);
    return 0;
}

static bool same_layout(const leaf_object *self, PyObject *sum)
{
    if (!PyArray_CheckExact(self->array) || !PyArray_CheckExact(sum))
        return false;
    const PyArrayObject *a = (PyArrayObject *)self->array;
    const PyArrayObject *b = (PyArrayObject *)sum;
    if (PyArray_NDIM(a) != PyArray_NDIM(b))
        return false;
    for (int i = 0; i < PyArray_NDIM(a); i++) {
        npy_intp n = PyArray_DIM(a, i);
        if (n != PyArray_DIM(b, i))
            return false;
        if (n <= 1)
            continue;
        /* strides in elements: grad_dtype may differ */
        if (PyArray_STRIDE(a, i) * PyArray_ITEMSIZE(b) !=
            PyArray_STRIDE(b, i) * PyArray_ITEMSIZE(a))
            return false;
    }
    return true;
}

/* descr_of_copy: the dtype of an array's or number's copy; new reference. */
static PyArray_Descr *descr_of_copy(const leaf_object *self, PyObject *sum)
{
    const fan_slot_spec *spec = spec_of(self);
    PyObject *like = self->array;
    if (PyArray_CheckExact(sum))
        like = sum;
    else if (spec && spec->dtype != FAN_DT_NONE)
        return fan_descr_of_dtype(spec->dtype);
    return (PyArray_Descr *)Py_NewRef((PyObject *)PyArray_DESCR((PyArrayObject *)like));
}

/* copied: L4. New reference. */
static PyObject *copied(const leaf_object *self, PyObject *sum, bool recording)
{
    const fan_node_sum_options options = {.writable = true, .create_graph = recording};
    if (fan_storage_redirected()) /* use a kernel of the core, which is recorded */
        return fan_node_sum(&self->base, 0, sum, NULL, options);
    if (recording && PyObject_HasAttrString(sum, "clone")) /* torch's copies are differentiable */
        return PyObject_CallMethod(sum, "clone", NULL);
    if (!PyArray_Check(self->array) || (!PyArray_CheckExact(sum) && !is_number(sum))) {
        fan_leaf_form form;
        if (form_of(self, sum, &form) < 0)
            return NULL;
        return fan_node_sum(&self->base, 0, sum, NULL, options);
    }
    PyArray_Descr *d = descr_of_copy(self, sum);
    if (!d)
        return NULL;
    PyObject *copy =
        PyArray_NewLikeArray((PyArrayObject *)self->array, NPY_KEEPORDER, d, 0); /* takes d */
    PyObject *from = NULL;
    if (copy)
        from = PyArray_FROM_O(sum);
    if (!from || PyArray_CopyInto((PyArrayObject *)copy, (PyArrayObject *)from) < 0)
        Py_CLEAR(copy);
    Py_XDECREF(from);
    return copy;
}

/* add_plain: adds a plain sum to a plain gradient of the same kind; false: they are not, and
 * nothing happened. */
static bool add_plain(PyObject *grad, PyObject *sum)
{
    FAN_UNINITIALIZED fan_plain_kind kind, other;
    char *to = NULL;
    char *from = NULL;
    if (!fan_plain_allowed() || !PyArray_CheckExact(grad) || !PyArray_CheckExact(sum))
        return false;
    if (!fan_plain_import(grad, &kind, &to) || !fan_plain_import(sum, &other, &from))
        return false;
    if (!fan_plain_same(&kind, &other) || !PyArray_ISWRITEABLE((PyArrayObject *)grad))
        return false;
    uint64_t bytes = fan_plain_bytes(&kind);
    if (!fan_plain_fits(kind.dtype, fan_dtype_accumulate(kind.dtype), bytes))
        return false;
    if (fan_flats_meet(to, bytes, from, bytes))
        return false;
    if (!fan_plain_is_unchanged(grad, &kind, to) || !fan_plain_is_unchanged(sum, &other, from))
        return false;
    const char *terms[2] = {to, from};
    fan_plain_sum(&fan_python, &kind, terms, 2, NULL, to);
    return true;
}

/* weighed: the sum times a weight, a new object, laid out like the leaf. New reference. */
static PyObject *weighed(const leaf_object *self, PyObject *sum, bool recording, fan_weight weight)
{
    fan_node_sum_options options = {.writable = true, .create_graph = recording, .weight = weight};
    bool arrays = PyArray_CheckExact(self->array) && PyArray_CheckExact(sum);
    if (!arrays || recording || fan_storage_redirected())
        return fan_node_sum(&self->base, 0, sum, NULL, options);
    PyArray_Descr *d = descr_of_copy(self, sum);
    if (!d)
        return NULL;
    PyObject *made =
        PyArray_NewLikeArray((PyArrayObject *)self->array, NPY_KEEPORDER, d, 0); /* takes d */
    options.out = made;
    if (made && fan_drop_result(fan_node_sum(&self->base, 0, sum, NULL, options)) < 0)
        Py_CLEAR(made);
    return made;
}

/* add_in_place: L5: 0, or -1 with an exception. */
static int add_in_place(const leaf_object *self, PyObject *grad, PyObject *sum, fan_weight weight)
{
    if (!weight.on && add_plain(grad, sum))
        return 0;
    const fan_node_sum_options options = {.out = grad, .weight = weight};
    return fan_drop_result(fan_node_sum(&self->base, 0, grad, sum, options));
}

/* weight_number: a weight as Python has it; new reference. */
static PyObject *weight_number(fan_weight weight)
{
    if (!weight.on)
        Py_RETURN_NONE;
    if (weight.integer)
        return PyLong_FromDouble(weight.re);
    if (weight.im != 0)
        return PyComplex_FromDoubles(weight.re, weight.im);
    return PyFloat_FromDouble(weight.re);
}

static int add_wide(leaf_object *self, PyObject *wide, PyObject *sum, fan_weight weight)
{
    PyObject *number = weight_number(weight);
    PyObject *const args[] = {wide, fan_state_get()->zero, sum, Py_True, number};
    PyObject *method = PyUnicode_FromString("add");
    PyObject *names = Py_BuildValue("(OO)", fan_state_get()->str_copy, fan_state_get()->str_weight);
    PyObject *none = NULL;
    if (number && method && names)
        none = PyObject_VectorcallMethod(method, args, 3, names);
    Py_XDECREF(number);
    Py_XDECREF(method);
    Py_XDECREF(names);
    self->stale |= none != NULL;
    return fan_drop_result(none);
}

static int run_plan(leaf_object *self, fan_leaf_action action, PyObject *grad, void **sum,
                    bool recording, fan_weight weight)
{
    const fan_node_sum_options options = {.create_graph = recording, .weight = weight};
    PyObject *made = NULL;
    if (weight.on && (action == FAN_LEAF_STEAL || action == FAN_LEAF_COPY)) {
        made = weighed(self, *sum, recording, weight);
        return made ? grad_write(self, made) : -1;
    }
    switch (action) {
    case FAN_LEAF_NOTHING:
    case FAN_LEAF_CALL:
        return 0;
    case FAN_LEAF_WIDE:
        return add_wide(self, self->wide, *sum, weight);
    case FAN_LEAF_ADD:
        return add_in_place(self, grad, *sum, weight);
    case FAN_LEAF_STEAL:
        made = *sum;
        *sum = NULL;
        break;
    case FAN_LEAF_COPY:
        made = copied(self, *sum, recording);
        break;
    case FAN_LEAF_REPLACE:
        made = fan_node_sum(&self->base, 0, grad, *sum, options);
        break;
    }
    if (!made)
        return -1;
    return grad_write(self, made);
}

/* part_is_unique: an ndarray without other references, a tuple of such, or an immutable object. */
static bool part_is_unique(PyObject *part)
{
    if (PyTuple_CheckExact(part)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part); i++) {
            PyObject *item = PyTuple_GET_ITEM(part, i);
            if (!part_is_unique(item) || (PyArray_Check(item) && Py_REFCNT(part) != 1))
                return false;
        }
        return true;
    }
    if (PyArray_Check(part))
        return fan_only_ours(part, 1);
    bool is_constant = part == Py_None || PyBool_Check(part);
    return is_constant || PyLong_CheckExact(part) || PyUnicode_CheckExact(part);
}

/* parts_are_unique: L3: a fanin.Sparse, SciPy array or torch tensor, and its parts, have no other
 * references. */
static bool parts_are_unique(PyObject *sum)
{
    if (Py_REFCNT(sum) != 1)
        return false;
    PyObject *parts = NULL;
    bool ours = false;
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(sum), "__module__");
    const char *name = NULL;
    if (module && PyUnicode_Check(module))
        name = PyUnicode_AsUTF8(module);
    bool scipy = name && strncmp(name, "scipy.sparse.", 13) == 0;
    Py_XDECREF(module);
    if (strcmp(Py_TYPE(sum)->tp_name, "Sparse") == 0) {
        parts = PyObject_GetAttrString(sum, "parts");
        ours = parts && PyTuple_CheckExact(parts) && Py_REFCNT(parts) == 2;
        for (Py_ssize_t i = 0; ours && i < PyTuple_GET_SIZE(parts); i++)
            ours = fan_only_ours(PyTuple_GET_ITEM(parts, i), 1);
    } else if (scipy) { /* its parts are in its __dict__ */
        parts = PyObject_GetAttrString(sum, "__dict__");
        ours = parts && PyDict_CheckExact(parts);
        PyObject *key, *part;
        Py_ssize_t at = 0;
        while (ours && PyDict_Next(parts, &at, &key, &part))
            ours = part_is_unique(part);
    } else {
        PyObject *check =
            fan_lazy(&fan_state_get()->parts_alone, "fanin._interop.sharing", "has_parts_alone");
        if (check)
            parts = PyObject_CallOneArg(check, sum);
        ours = parts == Py_True;
    }
    Py_XDECREF(parts);
    PyErr_Clear();
    return ours;
}

PyObject *fan_leaf_grad_now(leaf_object *self)
{
    if (self->accumulate || self->wide)
        return NULL;
    return grad_read(self);
}

/* claim: 0, or -1 with an exception. */
static int claim(leaf_object *self)
{
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    fan_status status = fan_leaf_claim_begin(&self->claim, &fan_python, &err);
    if (status == FAN_ERR_STATE) {
        return fan_set_error(PyExc_RuntimeError, "%s: %s", fan_node_name(&self->base.node).text,
                             err.text);
    }
    return fan_check(status, &err);
}

static int call_with(leaf_object *self, PyObject *fn, void **sum)
{
    if (fan_box(sum) < 0)
        return -1;
    FAN_UNINITIALIZED fan_guards guards;
    if (fan_guards_begin(&guards, sum, 1) < 0)
        return -1;
    Py_INCREF(fn);
    PyObject *ignored = PyObject_CallOneArg(fn, *sum);
    Py_DECREF(fn);
    if (fan_guards_end(&guards, &self->base.node) < 0)
        Py_CLEAR(ignored);
    return fan_drop_result(ignored);
}

/* is_unshared: whether a sum, boxed or not, has only the caller's reference. */
static bool is_unshared(void *sum)
{
    if (fan_is_unboxed(sum))
        return fan_unboxed_is_unique(sum);
    return fan_only_ours(sum, 1);
}

/* give_to: calls a function with a sum that nothing else has, and has no reference to it then. */
static int give_to(PyObject *fn, void **sum)
{
    if (fan_box(sum) < 0)
        return -1;
    PyObject *gradient = *sum;
    *sum = NULL;
    Py_INCREF(fn);
    PyObject *ignored = PyObject_CallOneArg(fn, gradient);
    Py_DECREF(fn);
    Py_DECREF(gradient);
    return fan_drop_result(ignored);
}

int fan_leaf_divert(leaf_object *self, void **sum)
{
    PyObject *fn = PyTuple_GET_ITEM(self->divert, 0);
    PyObject *kept = PyTuple_GET_ITEM(self->divert, 1);
    PyObject *i = PyTuple_GET_ITEM(self->divert, 2);
    PyObject *own = PyTuple_GET_ITEM(self->divert, 3);
    bool wanted = kept != Py_None || own != Py_None;
    if (!wanted || !is_unshared(*sum) || fan_storage_redirected())
        return call_with(self, fn, sum);
    if (own != Py_None)
        return give_to(own, sum);
    int full = PyDict_Contains(kept, i);
    if (full < 0 || fan_box(sum) < 0)
        return -1;
    if (full || !same_layout(self, *sum))
        return call_with(self, fn, sum);
    if (fan_dtype_of_descr(PyArray_DESCR((PyArrayObject *)*sum)) != spec_of(self)->dtype)
        return call_with(self, fn, sum);
    int bad = PyDict_SetItem(kept, i, *sum);
    Py_CLEAR(*(PyObject **)sum);
    return bad;
}

/* read_facts: boxes the sum, and reads what decides how it is accumulated: 0, or -1 with an
 * exception. */
static int read_facts(const leaf_object *self, PyObject *grad, void **sum, fan_leaf_facts *facts)
{
    bool was_unique = fan_is_unboxed(*sum) && fan_unboxed_is_unique(*sum);
    if (fan_box(sum) < 0)
        return -1;
    if (form_of(self, grad, &facts->grad) < 0 || form_of(self, *sum, &facts->sum) < 0)
        return -1;
    if (was_unique)
        facts->unshared = true;
    else if (facts->sum == FAN_LEAF_SPARSE)
        facts->unshared = parts_are_unique(*sum);
    else
        facts->unshared = fan_only_ours(*sum, 1);
    if (fan_storage_redirected()) /* L8 */
        facts->unshared = false;
    facts->same_layout = same_layout(self, *sum);
    return 0;
}

/* call_weighed: calls the owner's function with the sum times the weight. */
static int call_weighed(leaf_object *self, void **sum, bool recording, fan_weight weight)
{
    if (weight.on) {
        if (fan_box(sum) < 0)
            return -1;
        PyObject *made = weighed(self, *sum, recording, weight);
        if (!made)
            return -1;
        Py_DECREF((PyObject *)*sum);
        *sum = made;
    }
    return call_with(self, self->accumulate, sum);
}

int fan_leaf_accumulate(leaf_object *self, void **sum, bool recording, fan_weight weight)
{
    if (self->accumulate) /* without a claim: it may start a pass */
        return call_weighed(self, sum, recording, weight);
    if (claim(self) < 0)
        return -1;
    fan_leaf_facts facts = {.wide = self->wide != NULL, .recording = recording};
    PyObject *grad = grad_read(self);
    int bad = -1;
    if (grad || !PyErr_Occurred())
        bad = read_facts(self, grad, sum, &facts);
    if (!bad)
        bad = run_plan(self, fan_plan_leaf(&facts).action, grad, sum, recording, weight);
    Py_XDECREF(grad);
    fan_leaf_claim_end(&self->claim);
    return bad;
}

/* ---- the attribute grad ---- */

/* update_wide: rounds the sum in the wider dtype into the existing array, if there is one (L5).
 * Needs the claim, since NumPy releases the interpreter's lock while it sums and copies. */
static int update_wide(leaf_object *self)
{
    PyObject *now = PySequence_GetItem(self->wide, 0);
    if (!now)
        return -1;
    PyObject *grad = Py_XNewRef(self->grad);
    fan_leaf_form form;
    int bad = form_of(self, grad, &form);
    if (!bad && form == FAN_LEAF_DENSE) {
        bad = fan_drop_result(
            fan_node_sum(&self->base, 0, now, NULL, (fan_node_sum_options){.out = grad}));
    } else if (!bad)
        Py_XSETREF(self->grad, Py_XNewRef(fan_given(now)));
    Py_DECREF(now);
    Py_XDECREF(grad);
    if (!bad)
        self->stale = false;
    return bad;
}

/* update_on_stream: update_wide on the leaf's stream, which first waits for the reader's use of
 * `.grad`. */
static int update_on_stream(leaf_object *self, fan_stream *own)
{
    fan_stream *reader = fan_stream_current(own->device);
    if (!reader)
        return fan_no_memory();
    int bad = 0;
    if (self->stale) {
        fan_streams_outer outer;
        bad = FAN_CHECK(fan_stream_join(own, &reader, 1, NULL, 0, &err));
        fan_streams_enter(self->base.node.streams, &outer);
        if (!bad)
            bad = update_wide(self);
        fan_streams_leave(&outer);
    }
    fan_value v = {.dtype = FAN_DT_NONE};
    if (!bad && self->grad)
        bad = fan_import(self->grad, false, true, &v);
    if (!bad) { /* S20: the reader's stream waits for the leaf's */
        bad = FAN_CHECK(fan_stream_join(reader, &own, 1, &v, self->grad != NULL, &err));
        fan_value_release(&v);
    }
    fan_stream_drop(reader);
    return bad;
}

/* check_kernel: a kernel of a graph tree must not use .grad: in a replay the leaf has that of an
 * earlier call: 0, or -1 with an exception. */
static int check_kernel(const leaf_object *self, const char *verb)
{
    if (!fan_kernel_running())
        return 0;
    return fan_set_error(fan_state_get()->capture_error,
                         "%R %s .grad of %s inside of its function, but in a replay that is the "
                         "gradient of another call: pass "
                         "it among its reads or writes, tape.update(fn, [w.grad], ..)",
                         fan_kernel_running(), verb, fan_node_name(&self->base.node).text);
}

static PyObject *leaf_get_grad(PyObject *o, void *Py_UNUSED(closure))
{
    leaf_object *self = leaf_cast(o);
    if (check_kernel(self, "reads") < 0)
        return NULL;
    bool claimed = self->wide != NULL;
    int bad = 0;
    if (claimed) {
        if (claim(self) < 0)
            return NULL;
        fan_stream *own = fan_node_stream(&self->base.node);
        if (own)
            bad = update_on_stream(self, own);
        else if (self->stale)
            bad = update_wide(self);
    }
    PyObject *grad = NULL;
    if (!bad)
        grad = grad_read(self);
    if (claimed)
        fan_leaf_claim_end(&self->claim);
    if (PyErr_Occurred())
        return grad;
    return fan_take_or_none(grad);
}

/* check_array: a pass must be able to add to it in place (L5): 0, or -1 with an exception. */
static int check_array(const leaf_object *self, PyObject *value, const fan_value *v,
                       const char *name)
{
    bool is_scalar = is_number(value) && PyArray_Check(self->array);
    if (v->form == FAN_FORM_OBJECT || is_scalar) {
        const char *advice = "np.array(x)";
        if (PyArray_Check(value))
            advice = "x.astype(float)";
        else if (v->form == FAN_FORM_OBJECT)
            advice = "np.asarray(x)";
        return fan_set_error(
            PyExc_TypeError,
            "%s: grad: expected an array that can be added to in place, got %s%s: set %s", name,
            FAN_TYPE_TEXT(value), PyArray_Check(value) ? " of objects" : "", advice);
    }
    if (PyArray_Check(value) && !fan_ndarray_may_write((PyArrayObject *)value)) {
        return fan_set_error(
            PyExc_ValueError,
            "%s: grad: expected a writable array, got a read-only one: set a copy, x.copy()", name);
    }
    if (v->form != FAN_FORM_DENSE)
        return 0;
    const fan_region region = fan_region_of(v->array);
    fan_verdict overlap = FAN_OVERLAP_DISJOINT;
    if (FAN_CHECK(fan_overlap_itself(&region, 0, NULL, NULL, &overlap, &err)) < 0)
        return -1;
    if (overlap != FAN_OVERLAP_DISJOINT) {
        return fan_set_error(PyExc_ValueError,
                             "%s: grad: expected an array whose elements have memory of their own, "
                             "got %s that overlaps "
                             "itself: set a copy of it",
                             name, FAN_TYPE_TEXT(value));
    }
    return 0;
}

/* check_value: the shape, dtype and device of a new gradient: 0, or -1 with an exception. */
static int check_value(const fan_slot_spec *spec, const fan_value *v, const char *name)
{
    char has[160], wants[160];
    const int64_t *shape;
    int ndim = fan_value_shape(v, &shape);
    if (ndim >= 0 && spec->has_shape) {
        size_t bytes = (size_t)ndim * sizeof *shape;
        bool same = ndim == spec->ndim && (!ndim || memcmp(shape, spec->shape, bytes) == 0);
        if (!same) {
            return fan_set_error(PyExc_ValueError, "%s: grad: expected %s, got %s", name,
                                 fan_shape_text(spec->ndim, spec->shape, wants, sizeof wants),
                                 fan_shape_text(ndim, shape, has, sizeof has));
        }
    }
    if (ndim >= 0 && spec->dtype != FAN_DT_NONE && v->dtype != spec->dtype) {
        return fan_set_error(PyExc_ValueError, "%s: grad: expected %s, got %s", name,
                             fan_dtype_name(spec->dtype), fan_dtype_name(v->dtype));
    }
    if (!spec->device || !v->device || v->device == spec->device)
        return 0;
    fan_device_text(spec->device, wants, sizeof wants);
    fan_device_text(v->device, has, sizeof has);
    return fan_refuse(PyExc_ValueError, "%s: grad: expected an array on %s, got one on %s%s", name,
                      wants, has, fan_device_of_another(v->device, spec->device));
}

/* check_grad: of the leaf's shape and dtype, and passes can add to it: 0, or -1 with an
 * exception. */
static int check_grad(const leaf_object *self, PyObject *value)
{
    const fan_slot_spec *spec = spec_of(self);
    fan_value v;
    const fan_node_label name = fan_node_name(&self->base.node);
    fan_error_context w = {.buffer = name.text, .slot = -1, .key = -1};
    fan_error_context_push(&w);
    int bad = fan_import(value, false, false, &v);
    fan_error_context_pop(&w);
    if (bad < 0)
        return -1;
    if (self->arrays)
        bad = check_array(self, value, &v, name.text);
    if (!bad && spec)
        bad = check_value(spec, &v, name.text);
    fan_value_release(&v);
    return bad;
}

/* set_wide: `value` (NULL: none) replaces the sum of the passes in the wider dtype. The old sum is
 * kept until nothing can fail. */
static int set_wide(leaf_object *self, PyObject *value)
{
    if (claim(self) < 0)
        return -1;
    bool stale = self->stale;
    PyObject *dropped =
        PyObject_CallOneArg((PyObject *)fan_state_get()->buffer_type, self->wide_slots);
    PyObject *was = NULL;
    int bad = -1;
    if (dropped)
        bad = 0;
    if (dropped && value)
        bad = add_wide(self, dropped, value, (fan_weight){.on = false});
    self->stale = bad && stale;
    if (!bad) {
        PyObject *wide = dropped;
        dropped = self->wide;
        self->wide = wide;
        was = self->grad;
        self->grad = Py_XNewRef(value);
    }
    fan_leaf_claim_end(&self->claim);
    Py_XDECREF(dropped); /* without the claim: a finalizer may use the leaf */
    Py_XDECREF(was);
    return bad;
}

static int leaf_set_grad(PyObject *o, PyObject *value, void *Py_UNUSED(closure))
{
    leaf_object *self = leaf_cast(o);
    if (value && fan_is_no_gradient(value))
        value = NULL;
    if (check_kernel(self, "sets") < 0)
        return -1;
    if (self->accumulate) {
        return fan_set_error(PyExc_AttributeError,
                             "%s has no .grad: its accumulate= function takes the gradients",
                             fan_node_name(&self->base.node).text);
    }
    if (value && self->divert) {
        return fan_set_error(PyExc_RuntimeError,
                             "%s: grad: a fanin.dist.Reducer collects its gradients now, and what "
                             "is set here would be no sum over ranks: set it before or after the "
                             "pass",
                             fan_node_name(&self->base.node).text);
    }
    if (value && check_grad(self, value) < 0)
        return -1;
    if (self->wide)
        return set_wide(self, value);
    return grad_write(self, Py_XNewRef(value));
}

static PyObject *leaf_get_array(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef(leaf_cast(o)->array);
}

/* ---- creation and end ---- */

static void leaf_free(fan_node *n)
{
    leaf_object *self = (leaf_object *)fan_node_object(n);
    Py_CLEAR(self->array);
    Py_CLEAR(self->grad);
    Py_CLEAR(self->accumulate);
    Py_CLEAR(self->divert);
    Py_CLEAR(self->wide);
    Py_CLEAR(self->wide_slots);
    fan_leaf_claim_fini(&self->claim);
    fan_node_free_parts(&self->base);
}

static const fan_node_ops leaf_ops = {.leaf = true,
                                      .hold = fan_node_hold,
                                      .drop = fan_node_drop,
                                      .free = leaf_free,
                                      .text = fan_node_text,
                                      .is_numbered = fan_node_is_numbered};

static int leaf_traverse(PyObject *o, visitproc visit, void *arg)
{
    Py_VISIT(leaf_cast(o)->array);
    Py_VISIT(leaf_cast(o)->grad);
    Py_VISIT(leaf_cast(o)->accumulate);
    Py_VISIT(leaf_cast(o)->divert);
    Py_VISIT(leaf_cast(o)->wide);
    Py_VISIT(leaf_cast(o)->wide_slots);
    return fan_node_traverse(o, visit, arg);
}

static int leaf_clear(PyObject *o)
{
    Py_XSETREF(leaf_cast(o)->array, Py_NewRef(Py_None));
    Py_CLEAR(leaf_cast(o)->grad);
    Py_CLEAR(leaf_cast(o)->accumulate);
    Py_CLEAR(leaf_cast(o)->divert);
    Py_CLEAR(leaf_cast(o)->wide);
    Py_CLEAR(leaf_cast(o)->wide_slots);
    leaf_cast(o)->outside = false;
    leaf_cast(o)->stale = false;
    return fan_node_clear(o);
}

typedef struct leaf_args {
    PyObject *array, *like, *accumulate, *grad_dtype, *name, *stream;
} leaf_args;

/* declared: the declaration of the leaf's slot; new reference. */
static PyObject *declared(const leaf_args *a)
{
    if (a->like)
        return fan_call("fanin._engine", "slot_like", "(O)", a->like);
    if (!PyArray_CheckExact(a->array)) {
        fan_value v;
        if (fan_import(a->array, false, false, &v) < 0)
            return NULL;                         /* it cannot be summed */
        bool object = v.form == FAN_FORM_OBJECT; /* it sums by its own + (A8) */
        fan_value_release(&v);
        if (object)
            return fan_call("fanin.slots", "Slot", "()");
    }
    if (is_number(a->array))
        return fan_call("fanin.slots", "Slot", "(())");
    return Py_NewRef(a->array);
}

/* declare_slot: the leaf's only slot, and its stream. */
static int declare_slot(leaf_object *self, const leaf_args *a)
{
    PyObject *slot = declared(a);
    PyObject *list = NULL;
    uint32_t inputs = 1;
    if (slot)
        list = Py_BuildValue("[N]", slot);
    if (!list)
        return -1;
    int bad = fan_node_declare(&self->base, list, &inputs);
    if (!bad)
        bad = fan_node_place(&self->base, a->stream, NULL, list);
    Py_DECREF(list);
    return bad;
}

/* make_wide: an InputBuffer that sums in the dtype of accumulate=. */
static int make_wide(leaf_object *self, PyObject *accumulate)
{
    const fan_slot_spec *spec = spec_of(self);
    if (spec->dtype == FAN_DT_NONE) {
        return fan_set_error(PyExc_TypeError,
                             "accumulate: only an array's gradients are summed in another dtype");
    }
    fan_device *where = spec->device ? spec->device : fan_cpu();
    char device[32];
    PyObject *pair =
        fan_call("fanin._engine", "wide", "(NssON)", fan_ints(spec->ndim, spec->shape),
                 fan_dtype_name(spec->dtype), fan_device_text(where, device, sizeof device),
                 accumulate, fan_node_get_stream((PyObject *)self, NULL));
    if (!pair)
        return -1;
    self->wide = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
    self->wide_slots = Py_NewRef(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    return 0;
}

/* requires_grad: whether the gradient belongs to the array: a torch tensor that requires one. */
static bool requires_grad(PyObject *array)
{
    if (array == Py_None || PyArray_Check(array) || is_number(array))
        return false;
    PyObject *answer = PyObject_GetAttr(array, fan_state_get()->str_requires_grad);
    if (!answer)
        PyErr_Clear();
    bool required = answer == Py_True;
    Py_XDECREF(answer);
    return required;
}

/* is_function: whether accumulate= is a function, not a dtype. */
static bool is_function(PyObject *accumulate)
{
    return accumulate && PyCallable_Check(accumulate) && !PyType_Check(accumulate);
}

static int fill_in(leaf_object *self, const leaf_args *a)
{
    fan_dtype dtype = FAN_DT_NONE;
    self->array = Py_NewRef(fan_or_none(a->array));
    if (a->name && fan_node_set_name(&self->base, a->name) < 0)
        return -1;
    if (declare_slot(self, a) < 0)
        return -1;
    if (a->grad_dtype && fan_dtype_parse(a->grad_dtype, &dtype) < 0)
        return -1;

    /* the gradient's dtype */
    fan_slot_spec *spec = &self->base.more->slots.specs[0];
    bool has_dtype = spec->dtype != FAN_DT_NONE;
    char kind = 'f';
    if (dtype != FAN_DT_NONE)
        spec->dtype = dtype;
    if (spec->dtype != FAN_DT_NONE)
        kind = fan_dtype_kind(spec->dtype);
    if (kind != 'f' && kind != 'c') {
        return fan_set_error(PyExc_ValueError,
                             "Leaf(): expected a gradient of real or complex floats, got %s: "
                             "convert it, x.astype(float), or give grad_dtype=",
                             fan_dtype_name(spec->dtype));
    }

    /* where the sums go */
    bool calls = is_function(a->accumulate);
    if (calls)
        self->accumulate = Py_NewRef(a->accumulate);
    else if (a->accumulate && make_wide(self, a->accumulate) < 0)
        return -1;
    self->outside = requires_grad(self->array);
    if (self->outside && self->wide) {
        return fan_set_error(PyExc_ValueError, "accumulate: the gradient of a tensor that requires "
                                               "one is its own .grad, in its dtype: give "
                                               "x.detach(), and read leaf.grad");
    }
    self->arrays = has_dtype && !calls && !self->outside;
    return 0;
}

static PyObject *leaf_new(PyTypeObject *type, PyObject *const *values)
{
    const leaf_args a = {fan_given(values[0]), fan_given(values[1]), fan_given(values[2]),
                         fan_given(values[3]), fan_given(values[4]), fan_given(values[5])};
    if (!a.array == !a.like) {
        return PyErr_Format(
            PyExc_TypeError,
            "Leaf() takes an array, or like=(shape, dtype, device) and accumulate=");
    }
    if (a.array && (PyList_Check(a.array) || PyTuple_Check(a.array))) {
        return PyErr_Format(PyExc_TypeError,
                            "Leaf(): array: expected an array, got a %s: pass np.asarray(x)",
                            Py_TYPE(a.array)->tp_name);
    }
    if (a.like && !is_function(a.accumulate)) {
        return PyErr_Format(
            PyExc_TypeError,
            "Leaf(like=..) needs accumulate=, a function that takes each pass's sum");
    }
    leaf_object *self = PyObject_GC_New(leaf_object, type);
    if (!self)
        return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    fan_node_init(&self->base.node, &leaf_ops, 1);
    if (FAN_CHECK(fan_leaf_claim_init(&self->claim, &err)) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->claim.leaf = &self->base.node;
    if (fill_in(self, &a) < 0)
        Py_CLEAR(self);
    else
        PyObject_GC_Track((PyObject *)self); /* or gc.get_objects() would return it half made */
    return (PyObject *)self;
}

/* ---- Leaf ---- */

static PyObject *leaf_register_post_accumulate_grad_hook(PyObject *o, PyObject *hook)
{
    return fan_hooks_add(&leaf_cast(o)->base, hook, FAN_HOOK_POST, 0);
}

static PyObject *leaf_repr(PyObject *o)
{
    const fan_slot_spec *spec = spec_of(leaf_cast(o));
    const fan_node_label name = fan_node_name(&leaf_cast(o)->base.node);
    char shape[160];
    if (!spec || !spec->has_shape || spec->dtype == FAN_DT_NONE)
        return PyUnicode_FromFormat("<fanin.Leaf %s>", name.text);
    return PyUnicode_FromFormat("<fanin.Leaf %s, %s %s>", name.text,
                                fan_shape_text(spec->ndim, spec->shape, shape, sizeof shape),
                                fan_dtype_name(spec->dtype));
}

static PyObject *leaf_remove_hook(PyObject *o, PyObject *hook)
{
    return fan_hooks_remove(&leaf_cast(o)->base, hook);
}

static PyObject *leaf_register_hook(PyObject *o, PyObject *const *a)
{
    return fan_node_register_hook(o, a);
}
static PyObject *leaf_get_stream(PyObject *o, void *closure)
{
    return fan_node_get_stream(o, closure);
}
static PyObject *leaf_get_name(PyObject *o, void *closure)
{
    return fan_node_get_name(o, closure);
}
static PyObject *leaf_get_sequence_nr(PyObject *o, void *closure)
{
    return fan_node_get_number(o, closure);
}

#include "py/declared/Leaf.h"

PyObject *fan_leaf_call(PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    return leaf_new_vector_step(type, args, nargsf, kwnames);
}

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(leaf_object, base.weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)leaf_doc},
    {Py_tp_dealloc, fan_node_dealloc},
    {Py_tp_traverse, leaf_traverse},
    {Py_tp_clear, leaf_clear},
    {Py_tp_repr, leaf_repr},
    {Py_tp_methods, leaf_methods},
    {Py_tp_members, members},
    {Py_tp_getset, leaf_getset},
    {0, NULL},
};

PyType_Spec fan_leaf_spec = {
    .name = "fanin.Leaf",
    .basicsize = sizeof(leaf_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
