/* take: InputBuffer.take: of plain contributions (buffer/plain.h) in one call of the core;
 * else by values.
 *
 * First the general path: out=, the export of the sums, the method; then the path of plain
 * contributions; last the statistics of a slot. */
#include "py/buffer/buffer_object.h"

#include "array/sum.h"
#include "base/mem.h"

/* import_out: an entry of out=, an array or None; the value is the caller's to drop. */
static int import_out(const fan_buffer *core, PyObject *item, PyObject *slot_names, size_t slot,
                      fan_stream *ready, fan_value *value)
{
    fan_error_context w = {
        .buffer = fan_buffer_name(core),
        .slot_name = fan_name_at(slot_names, slot),
        .slot = (Py_ssize_t)fan_buffer_shown_slot(core, slot),
        .key = -1,
        .stream = ready,
    };
    int bad = 0;
    Py_INCREF(item);
    fan_error_context_push(&w);
    if (item != Py_None)
        bad = fan_import_out(item, value);
    fan_error_context_pop(&w);
    Py_DECREF(item);
    return bad;
}

/* parse_out: a list as long as the buffer, of arrays and None. */
static int parse_out(const fan_buffer *core, PyObject *out, PyObject *slot_names, fan_stream *ready,
                     fan_value *values)
{
    size_t n = fan_buffer_slots(core);
    int bare = fan_is_bare(out);
    if (bare < 0)
        return -1;
    const char *advice = bare ? ": give [array]" : "";
    const char *ending = n == 1 ? "y" : "ies";
    if (!PyList_Check(out) && !PyTuple_Check(out)) {
        return fan_refuse(PyExc_TypeError, "out: expected a list of %zu arrays or Nones, got %s%s",
                          n, FAN_TYPE_TEXT(out), advice);
    }
    if ((size_t)PySequence_Fast_GET_SIZE(out) != n) {
        return fan_refuse(PyExc_ValueError, "out: expected %zu entr%s, one for each slot, got %zd",
                          n, ending, PySequence_Fast_GET_SIZE(out));
    }
    for (size_t i = 0; i < n; i++) {
        if ((size_t)PySequence_Fast_GET_SIZE(out) != n)
            return fan_refuse(PyExc_RuntimeError, "out: the list changed its length meanwhile");
        if (import_out(core, PySequence_Fast_GET_ITEM(out, (Py_ssize_t)i), slot_names, i, ready,
                       &values[i]) < 0)
            return -1;
    }
    return 0;
}

static fan_value *new_values(size_t n)
{
    fan_value *v = fan_calloc(n * sizeof *v);
    for (size_t i = 0; v && i < n; i++)
        v[i].dtype = FAN_DT_NONE;
    if (!v)
        PyErr_NoMemory();
    return v;
}

static void free_values(fan_value *v, size_t n)
{
    PyObject *live = fan_exception_take();
    for (size_t i = 0; v && i < n; i++)
        fan_value_drop(&fan_python, &v[i]);
    fan_free(v);
    fan_exception_put(live);
}

/* The context of `show`: the sums are exported while the core still holds them, before the slots
 * are emptied, so that an exception loses none. */
typedef struct shown {
    PyObject *list;
    const fan_value *outs; /* the arrays of out=; NULL: none */
} shown;

/* report_write: reports our write into out= to libraries that count writes. */
static fan_status report_write(const fan_value *out, fan_error *err)
{
    if (out->origin < FAN_FROM_FOREIGN)
        return FAN_OK;
    PyObject *arrays = fan_arrays();
    PyObject *wrote = NULL;
    if (arrays)
        wrote = PyObject_CallMethod(arrays, "wrote", "O", (PyObject *)out->object);
    if (fan_drop_result(wrote) < 0)
        return fan_from_python(err);
    return FAN_OK;
}

static fan_status show(void *ctx, size_t slot, const fan_value *sum, fan_error *err)
{
    const shown *to = ctx;
    if (!sum)
        return report_write(&to->outs[slot], err);
    fan_value copy;
    FAN_TRY(fan_value_copy(&fan_python, sum, &copy, err));
    PyObject *item = fan_export(&copy);
    if (!item)
        return fan_from_python(err);
    PyList_SET_ITEM(to->list, (Py_ssize_t)slot, item);
    return FAN_OK;
}

/* import_outs: out=, of one slot the array itself, of all a list: 0, or -1 with an exception. */
static int import_outs(const fan_buffer *core, const fan_take_args *args, fan_value *values)
{
    if (!args->only)
        return parse_out(core, args->out, args->slot_names, args->stream, values);
    return import_out(core, args->out, args->slot_names, *args->only, args->stream, values);
}

/* over_of: the parts of a divisor. */
static int over_of(PyObject *over, double *parts, fan_take *options)
{
    if (PyTuple_GET_SIZE(over) > FAN_DIVISOR_PARTS) {
        return fan_refuse(PyExc_ValueError, "the divisor has more than %d parts",
                          FAN_DIVISOR_PARTS);
    }
    options->over = parts;
    options->nover = (size_t)PyTuple_GET_SIZE(over);
    for (size_t i = 0; i < options->nover; i++) {
        parts[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(over, (Py_ssize_t)i));
        if (parts[i] == -1.0 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

PyObject *fan_take_list(fan_buffer *core, const fan_take_args *args)
{
    double parts[FAN_DIVISOR_PARTS];
    const size_t *only = args->only;
    PyObject *out = fan_or_none(args->out);
    PyObject *weights = fan_or_none(args->weights);
    size_t n = fan_buffer_slots(core);
    shown to = {.list = NULL};
    fan_take options = {
        .one = only != NULL,
        .stream = args->stream,
        .writable = args->writable,
        .mean = args->mean,
        .show = show,
        .ctx = &to,
    };
    if (args->over && over_of(args->over, parts, &options) < 0)
        return NULL;
    if (only) {
        n = 1;
        options.slot = *only;
    }
    fan_value *outs = NULL;
    fan_value *results = new_values(n);
    bool done = false;
    if (results)
        to.list = PyList_New((Py_ssize_t)n);
    fan_memory_leave_begin();
    if (!to.list || fan_scale_arg(fan_or_none(args->scale), &options) < 0)
        goto done;
    options.late_places = !PyDict_Check(weights);
    if (fan_late_arg(weights, &options.late, &options.nlate) < 0)
        goto done;
    bool is_list = PyList_Check(out) || PyTuple_Check(out);
    if (only && is_list) {
        fan_refuse(PyExc_TypeError,
                   "out: expected the array for slot %zu, got %s: with slot= give the array itself",
                   *only, FAN_TYPE_TEXT(out));
        goto done;
    }
    if (out != Py_None) {
        outs = new_values(n);
        if (!outs || import_outs(core, args, outs) < 0)
            goto done;
        to.outs = outs;
        options.out = outs;
    }
    if (FAN_CHECK(fan_buffer_take(core, &options, results, &err)) < 0)
        goto done;
    /* what is missing was not shown: the caller's own array, or None */
    for (size_t i = 0; i < n; i++) {
        if (!PyList_GET_ITEM(to.list, (Py_ssize_t)i))
            PyList_SET_ITEM(to.list, (Py_ssize_t)i, fan_export(&results[i]));
    }
    done = true;
done:
    fan_free(options.late);
    free_values(outs, n);
    free_values(results, n);
    fan_memory_leave_end();
    if (!done)
        Py_CLEAR(to.list);
    return to.list;
}

/* refuse_stream: names the parameter that a number or a sequence was meant for; other errors
 * stay. */
static void refuse_stream(PyObject *o)
{
    bool is_slot = PyLong_Check(o) || PyArray_IsScalar(o, Integer);
    bool is_out = PyList_Check(o) || PyTuple_Check(o) || fan_is_array(o);
    if (!is_slot && !is_out)
        return;
    PyErr_Clear();
    if (is_slot) {
        fan_refuse(PyExc_TypeError,
                   "stream: expected a stream or None, got the number %R: pass "
                   "fanin.Stream(device, %R), or, for the sum "
                   "of one slot, take(slot=%R)",
                   o, o, o);
    } else {
        fan_refuse(
            PyExc_TypeError,
            "stream: expected a stream or None, got %s: for arrays to sum into, take(out=..)",
            FAN_TYPE_TEXT(o));
    }
}

PyObject *fan_buffer_take_sums(PyObject *o, PyObject *const *a)
{
    enum {
        STREAM,
        SLOT,
        OUT,
        SCALE,
        WRITABLE,
        MEAN,
        WEIGHTS
    };
    const buffer_object *self = fan_buffer_self(o);
    fan_error_context w = fan_buffer_context(self);
    size_t slot = 0;
    const size_t *only = NULL;
    if (fan_given(a[SLOT])) {
        if (fan_slot_arg(self, a[SLOT], &slot) < 0)
            return NULL;
        only = &slot;
    }
    fan_stream *stream = NULL;
    PyObject *list = NULL;
    fan_error_context_push(&w);
    if (fan_given(a[STREAM]) && fan_stream_arg(a[STREAM], &stream) < 0) {
        refuse_stream(a[STREAM]);
    } else {
        const fan_take_args args = {
            .only = only,
            .slot_names = self->names,
            .stream = stream,
            .out = a[OUT],
            .scale = a[SCALE],
            .weights = a[WEIGHTS],
            .writable = a[WRITABLE] == Py_True,
            .mean = a[MEAN] == Py_True,
        };
        list = fan_take_list(self->core, &args);
    }
    fan_error_context_pop(&w);
    fan_stream_drop(stream);
    if (only && list)
        Py_SETREF(list, Py_NewRef(PyList_GET_ITEM(list, 0)));
    return list;
}

/* ---- slots of plain contributions (buffer/plain.h) ---- */

bool fan_plain_writable_now(PyObject *o, fan_plain_kind *kind, char **data)
{
    if (!fan_plain_import(o, kind, data))
        return false;
    if (!kind->check_at_use)
        return PyArray_CheckExact(o) && PyArray_ISWRITEABLE((PyArrayObject *)o);
    Py_INCREF(o); /* this calls its library, which may run any code */
    /* it is checked again before it is written */
    bool good = fan_plain_is_detached(o) && fan_plain_has_own_value(o);
    Py_DECREF(o);
    return good;
}

/* out=: of a take of one slot the array itself. */
typedef struct out_args {
    PyObject *out;
    bool one;
} out_args;

static fan_plain_where outs_at(void *ctx, size_t slot, const fan_plain_kind *kind, void **object,
                               char **data, uint64_t *bytes)
{
    const out_args *to = ctx;
    FAN_UNINITIALIZED fan_plain_kind is;
    /* it became shorter meanwhile */
    if (!to->one && (Py_ssize_t)slot >= PySequence_Fast_GET_SIZE(to->out))
        return FAN_PLAIN_REFUSED;
    PyObject *o = to->out;
    if (!to->one)
        o = PySequence_Fast_GET_ITEM(o, (Py_ssize_t)slot);
    if (o == Py_None)
        return FAN_PLAIN_NOWHERE;
    Py_INCREF(o); /* this calls its library, which may remove it from the list */
    bool fits = fan_plain_writable_now(o, &is, data) && (!kind || fan_plain_same(&is, kind));
    if (!fits) {
        Py_DECREF(o);
        return FAN_PLAIN_REFUSED;
    }
    *object = o;
    *bytes = fan_plain_bytes(&is);
    return FAN_PLAIN_THERE;
}

bool fan_plain_scale_arg(PyObject *value, fan_take *options)
{
    if (value == Py_None)
        return true;
    if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value) && !PyComplex_CheckExact(value))
        return false;
    if (fan_scale_arg(value, options) == 0)
        return true;
    PyErr_Clear();
    return false;
}

/* take_flag_of: false: it is no bool. */
static bool take_flag_of(PyObject *value, bool *flag)
{
    *flag = value == Py_True;
    return *flag || value == Py_False;
}

/* take_option_of: false: another option than plain contributions need, or a wrong one. */
static bool take_option_of(PyObject *name, PyObject *value, PyObject **out, fan_take *options)
{
    const fan_state *st = fan_state_get();
    if (name == st->str_out) {
        *out = fan_given(value);
        return true;
    }
    if (name == st->str_scale)
        return fan_plain_scale_arg(value, options);
    if (name == st->str_writable)
        return take_flag_of(value, &options->writable);
    if (name == st->str_mean)
        return take_flag_of(value, &options->mean);
    if (name != st->str_slot)
        return name == st->str_stream && value == Py_None;
    if (value == Py_None)
        return true;
    Py_ssize_t slot = fan_small_index(value);
    options->one = slot >= 0;
    options->slot = (size_t)slot;
    return slot >= 0;
}

/* take_options_of: false: the general path takes them. */
static bool take_options_of(PyObject *const *values, PyObject *kwnames, PyObject **out,
                            fan_take *options)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        if (!take_option_of(PyTuple_GET_ITEM(kwnames, i), values[i], out, options))
            return false;
    }
    if (options->one || !*out)
        return true;
    return PyList_CheckExact(*out) || PyTuple_CheckExact(*out);
}

static PyObject *take_one(fan_buffer *core, const fan_take *options, const fan_plain_outs *places)
{
    void *sum = NULL;
    if (!fan_plain_take(core, (fan_span){options->slot, options->slot + 1}, options, places, &sum))
        return NULL;
    return fan_take_or_none(sum);
}

static PyObject *take_each(buffer_object *self, const fan_take *options,
                           const fan_plain_outs *places)
{
    /* Before a slot is claimed: this may collect garbage, whose finalizers may call add. */
    PyObject *list = PyList_New((Py_ssize_t)self->n);
    if (!list)
        return NULL;
    PyObject **items = PySequence_Fast_ITEMS(list);
    if (!fan_plain_take(self->core, (fan_span){0, self->n}, options, places, (void **)items)) {
        Py_DECREF(list);
        return NULL;
    }
    for (size_t i = 0; i < self->n; i++) {
        if (!items[i])
            items[i] = Py_NewRef(Py_None);
    }
    return list;
}

/* The sums of all slots, or of one, into `out` (NULL: none). NULL: the general path takes them. */
static PyObject *take_plain_sums(buffer_object *self, const fan_take *options, PyObject *out)
{
    out_args to = {out, options->one};
    fan_plain_outs all = {outs_at, &to};
    const fan_plain_outs *places = NULL;
    PyObject *sums;
    if (options->one && options->slot >= self->n)
        return NULL;
    if (out && !options->one && (size_t)PySequence_Fast_GET_SIZE(out) != self->n)
        return NULL;
    if (out)
        places = &all;
    if (options->one)
        sums = take_one(self->core, options, places);
    else
        sums = take_each(self, options, places);
    if (!sums && PyErr_Occurred())
        PyErr_Clear(); /* the general path raises the error again, if it is one */
    return sums;
}

static PyObject *take_plain(buffer_object *self, PyObject *const *args, PyObject *kwnames)
{
    PyObject *out = NULL;
    fan_take options = {.stream = NULL};
    if (kwnames && !take_options_of(args, kwnames, &out, &options))
        return NULL;
    return take_plain_sums(self, &options, out);
}

PyObject *fan_plain_take_over(buffer_object *self, const size_t *only, PyObject *out,
                              const fan_divisor *divisor)
{
    fan_take options = {
        .one = only != NULL,
        .mean = true,
        .scale = {.divisor = divisor},
    };
    PyObject *into = fan_given(out);
    if (only)
        options.slot = *only;
    if (into && !only && !PyList_CheckExact(into))
        return NULL;
    return take_plain_sums(self, &options, into);
}

PyObject *fan_plain_take_only(fan_buffer *core, PyObject *out, PyObject *scale)
{
    fan_take options = {.one = true, .writable = true};
    out_args to = {out, true};
    fan_plain_outs all = {outs_at, &to};
    const fan_plain_outs *places = NULL;
    PyObject *sum = NULL;
    if (out != Py_None)
        places = &all;
    if (fan_plain_scale_arg(scale, &options))
        sum = take_one(core, &options, places);
    if (!sum && PyErr_Occurred())
        PyErr_Clear(); /* as above */
    return sum;
}

int fan_buffer_take_fast(PyObject *o, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                         PyObject **result)
{
    *result = nargs == 0 ? take_plain(fan_buffer_self(o), args, kwnames) : NULL;
    return *result != NULL;
}

PyObject *fan_stats_wrap(fan_buffer *core, size_t slot)
{
    PyObject *type = fan_lazy(&fan_state_get()->stats_type, "fanin.slots", "Stats");
    bool some;
    bool bad;
    fan_stats stats;
    int64_t bad_key;
    if (!type)
        return NULL;
    if (FAN_CHECK(fan_buffer_stats(core, slot, &some, &stats, &bad, &bad_key, &err)) < 0)
        return NULL;
    if (!some)
        Py_RETURN_NONE;
    PyObject *key = NULL;
    if (bad && bad_key >= 0) {
        key = PyLong_FromLongLong(bad_key);
        if (!key)
            return NULL;
    }
    return PyObject_CallFunction(
        type, "KddKNd", (unsigned long long)stats.count, fan_stats_sumsq(&stats), stats.absmax,
        (unsigned long long)stats.nonfinite, fan_take_or_none(key), fan_stats_norm(&stats));
}
