/* add_n: the sum of arrays, without a buffer of the caller's.
 *
 * A few small arrays of one kind are summed here (add_n_plain); all others by a buffer of one slot
 * (add_n_any). */
#include "array/extents.h"
#include "py/buffer/buffer_object.h"
#include "py/base/args.h"

/* ---- add_n ---- */

/* note_index: adds to the live exception which array it is about. */
static void note_index(Py_ssize_t i)
{
    PyObject *e = fan_exception_take();
    fan_exception_note(e, PyUnicode_FromFormat("it was arrays[%zd] of add_n", i));
    fan_exception_put(e);
}

/* add_one: adds an array, None or a symbolic zero. 0, or -1 with an exception. */
static int add_one(fan_buffer *core, PyObject *array, int64_t key, const fan_weight *weight)
{
    if (fan_is_no_gradient(array))
        array = Py_None;
    int added = 0;
    if (!weight->on)
        added = fan_plain_add_only(core, array, key);
    if (added > 0)
        return 0;
    if (added < 0)
        return -1;
    fan_contribution c = {.key = key, .weight = *weight};
    int bad = fan_import(array, false, false, &c.value);
    if (!bad)
        bad = fan_add_on_library_stream(core, 0, &c);
    if (c.value.form != FAN_FORM_UNDEFINED)
        fan_value_drop(&fan_python, &c.value);
    return bad;
}

/* The contributions to sum, as tuples of our own; NULL: not given. */
typedef struct operands {
    PyObject *items;
    PyObject *keys;
    PyObject *weights;
} operands;

static int add_all(fan_buffer *core, const operands *all)
{
    Py_ssize_t n = PyTuple_GET_SIZE(all->items);
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t key = -1;
        int bad = 0;
        fan_weight weight = {.on = false};
        if (all->keys)
            bad = fan_index(PyTuple_GET_ITEM(all->keys, i), "key", PyExc_ValueError, &key);
        if (!bad && all->weights)
            bad = fan_weight_arg(PyTuple_GET_ITEM(all->weights, i), "weights", &weight);
        if (!bad)
            bad = add_one(core, PyTuple_GET_ITEM(all->items, i), key, &weight);
        if (bad) {
            note_index(i);
            return -1;
        }
    }
    return 0;
}

/* all_readable: of arrays that are checked at use. Calls their library first, and then reads the
 * arrays again. */
static bool all_readable(PyObject *const *arrays, size_t n, const fan_plain_kind *kind,
                         const char *const *data)
{
    for (size_t i = 0; i < n; i++) {
        if (!fan_plain_has_own_value(arrays[i]))
            return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (!fan_plain_is_unchanged(arrays[i], kind, data[i]))
            return false;
    }
    return true;
}

/* first_fits: imports the first of n arrays; true if such arrays can be summed here. */
static bool first_fits(PyObject *first, size_t n, bool has_out, fan_plain_kind *kind, char **data)
{
    if (!fan_plain_import(first, kind, data))
        return false;
    if (kind->scalar || (kind->check_at_use && has_out))
        return false;
    uint64_t bytes = fan_plain_bytes(kind);
    if (!fan_plain_fits(kind->dtype, fan_dtype_accumulate(kind->dtype), bytes))
        return false;
    return fan_plain_is_flat(bytes, n) && fan_plain_allowed();
}

/* out_fits: true if `out` can be written and shares memory with no array but in the same place. */
static bool out_fits(PyObject *out, const char *const *src, size_t n, const fan_plain_kind *kind,
                     char **to)
{
    FAN_UNINITIALIZED fan_plain_kind other;
    if (!fan_plain_writable_now(out, &other, to))
        return false;
    if (!fan_plain_same(kind, &other))
        return false;
    uint64_t bytes = fan_plain_bytes(kind);
    for (size_t i = 0; i < n; i++) {
        if (src[i] != *to && fan_flats_meet(src[i], bytes, *to, bytes))
            return false;
    }
    return true;
}

/* scale_fits: reads a scale; NULL: there is none. False: sums of the kind are not scaled here. */
static bool scale_fits(PyObject *scale, const fan_plain_kind *kind, fan_take *options)
{
    if (!scale)
        return true;
    if (!fan_plain_scale_arg(scale, options))
        return false;
    return fan_plain_scales(options, kind->dtype, fan_dtype_accumulate(kind->dtype));
}

/* add_n_plain: the sum of a few small arrays of one kind, times `scale`, in `out`, where these are
 * not NULL; NULL without an exception: not plain ones. */
static PyObject *add_n_plain(PyObject *arrays, PyObject *out, PyObject *scale)
{
    FAN_UNINITIALIZED const char *src[FAN_PLAIN_TERMS];
    /* their list may change while they are summed */
    FAN_UNINITIALIZED PyObject *held[FAN_PLAIN_TERMS];
    FAN_UNINITIALIZED fan_plain_kind kind;
    FAN_UNINITIALIZED fan_plain_kind other;
    fan_take options = {.one = true};
    const fan_scale *factor = NULL;
    char *data;
    char *to;
    if (!PyList_CheckExact(arrays) && !PyTuple_CheckExact(arrays))
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(arrays);
    if (n < 2 || n > FAN_PLAIN_TERMS)
        return NULL;
    PyObject **items = PySequence_Fast_ITEMS(arrays);
    if (!first_fits(items[0], (size_t)n, out != NULL, &kind, &data))
        return NULL;
    if (!scale_fits(scale, &kind, &options))
        return NULL;
    if (scale)
        factor = &options.scale;
    src[0] = data;
    for (Py_ssize_t i = 1; i < n; i++) {
        if (!fan_plain_import(items[i], &other, &data))
            return NULL;
        if (!fan_plain_same(&kind, &other))
            return NULL;
        src[i] = data;
    }
    if (out && !out_fits(out, src, (size_t)n, &kind, &to))
        return NULL;
    for (Py_ssize_t i = 0; i < n; i++)
        held[i] = Py_NewRef(items[i]);
    PyObject *sum = Py_XNewRef(out);
    if (!out)
        sum = fan_plain_fresh(held[0], &kind, &to);
    if (sum && kind.check_at_use && !all_readable(held, (size_t)n, &kind, src))
        Py_CLEAR(sum);
    if (sum)
        fan_plain_sum(&fan_python, &kind, src, (size_t)n, factor, to);
    for (Py_ssize_t i = 0; i < n; i++)
        Py_DECREF(held[i]);
    return sum;
}

/* The arguments of add_n as they come; NULL: not given. */
typedef struct add_n_args {
    PyObject *arrays;
    PyObject *out;
    PyObject *keys;
    PyObject *accumulate;
    PyObject *scale;
    PyObject *stats;
    PyObject *weights;
    PyObject *mean;
    PyObject *over; /* of add_n_over: the divisor */
} add_n_args;

/* read_of_each: reads one value for each array, as a tuple; NULL: none are given. */
static int read_of_each(PyObject *given, const char *what, Py_ssize_t n, PyObject **out)
{
    if (!fan_given(given))
        return 0;
    if (fan_sequence_arg(given, what, out) < 0)
        return -1;
    Py_ssize_t got = PyTuple_GET_SIZE(*out);
    if (got == n)
        return 0;
    return fan_refuse(PyExc_ValueError, "expected as many %s as arrays, %zd, got %zd", what, n,
                      got);
}

/* read_operands: new references, errors too. */
static int read_operands(const add_n_args *a, operands *all)
{
    int bare = fan_is_bare(a->arrays);
    if (bare < 0)
        return -1;
    const char *advice = "";
    if (bare)
        advice = ": give list(x) or [x, ..]";
    bool is_text = PyUnicode_Check(a->arrays) || PyBytes_Check(a->arrays);
    bool is_list = Py_TYPE(a->arrays)->tp_iter && !PyDict_Check(a->arrays);
    if (bare || is_text || !is_list) {
        return fan_refuse(PyExc_TypeError, "expected a sequence of arrays, got one %.200s%s",
                          Py_TYPE(a->arrays)->tp_name, advice);
    }
    all->items = PySequence_Tuple(a->arrays);
    if (!all->items)
        return -1;
    Py_ssize_t n = PyTuple_GET_SIZE(all->items);
    if (n == 0) {
        return fan_refuse(PyExc_ValueError,
                          "expected at least one array: the sum of none has no shape and no dtype");
    }
    if (read_of_each(a->keys, "keys", n, &all->keys) < 0)
        return -1;
    return read_of_each(a->weights, "weights", n, &all->weights);
}

/* take_sum: the sum of the buffer's one slot. */
static PyObject *take_sum(fan_buffer *core, const add_n_args *a)
{
    PyObject *out = fan_or_none(a->out);
    PyObject *scale = fan_or_none(a->scale);
    bool mean = a->mean == Py_True || fan_given(a->over);
    PyObject *sum = NULL;
    if (!mean)
        sum = fan_plain_take_only(core, out, scale);
    if (sum)
        return sum;
    PyObject *outs = Py_NewRef(Py_None);
    PyObject *list = NULL;
    if (out != Py_None)
        Py_SETREF(outs, PyTuple_Pack(1, out));
    const fan_take_args args = {
        .out = outs,
        .scale = scale,
        .over = fan_given(a->over),
        .writable = true,
        .mean = mean,
    };
    if (outs)
        list = fan_take_list(core, &args);
    if (list)
        sum = Py_NewRef(PyList_GET_ITEM(list, 0));
    Py_XDECREF(outs);
    Py_XDECREF(list);
    return sum;
}

static PyObject *add_n_any(const add_n_args *a)
{
    operands all = {.items = NULL};
    PyObject *sum = NULL;
    PyObject *accumulate = fan_or_none(a->accumulate);
    fan_buffer_config config = {
        .slots = 1,
        .budget = UINT64_MAX,
        .accumulate = FAN_DT_NONE,
        .frontend = &fan_python,
        .name = "add_n",
        .hides_slots = true,
    };
    fan_error_context w = {
        .buffer = "add_n",
        .slot = -1,
        .key = -1,
    };
    fan_buffer *core = NULL;
    config.stats = a->stats == Py_True;
    fan_error_context_push(&w);
    int bad = read_operands(a, &all);
    if (!bad)
        bad = fan_accumulate_arg(accumulate, &config.accumulate, &config.exact);
    if (!bad)
        bad = FAN_CHECK(fan_buffer_new(&config, &core, &err));
    if (!bad)
        bad = add_all(core, &all);
    if (!bad)
        sum = take_sum(core, a);
    if (sum && config.stats)
        sum = Py_BuildValue("(NN)", sum, fan_stats_wrap(core, 0));
    fan_error_context_pop(&w);
    if (core) {
        PyObject *live = fan_exception_take();
        fan_buffer_free(core);
        fan_exception_put(live);
    }
    Py_XDECREF(all.items);
    Py_XDECREF(all.keys);
    Py_XDECREF(all.weights);
    return sum;
}

/* add_n_fast: add_n(arrays). */
static int add_n_fast(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames, PyObject **result)
{
    if (nargs != 1 || kwnames)
        return 0;
    *result = add_n_plain(args[0], NULL, NULL);
    return *result || PyErr_Occurred();
}

static PyObject *add_n(PyObject *Py_UNUSED(module), PyObject *const *values)
{
    const add_n_args a = {
        .arrays = values[0],
        .out = values[1],
        .keys = values[2],
        .accumulate = values[3],
        .scale = values[4],
        .stats = values[5],
        .weights = values[6],
        .mean = values[7],
    };
    bool of_operands = fan_given(a.keys) || fan_given(a.weights);
    bool of_result = fan_given(a.accumulate) || a.stats || a.mean;
    if (!of_operands && !of_result) {
        PyObject *sum = add_n_plain(a.arrays, fan_given(a.out), fan_given(a.scale));
        if (sum || PyErr_Occurred())
            return sum;
    }
    return add_n_any(&a);
}

/* add_n_over: a mean with a divisor of the caller's. */
static PyObject *add_n_over(PyObject *Py_UNUSED(module), PyObject *const *values)
{
    const add_n_args a = {
        .arrays = values[0],
        .out = values[1],
        .accumulate = values[2],
        .scale = values[3],
        .weights = values[4],
        .over = values[5],
    };
    return add_n_any(&a);
}

PyObject *fan_add_two(PyObject *a, PyObject *b)
{
    PyObject *both = PyTuple_Pack(2, a, b);
    if (!both)
        return NULL;
    PyObject *const values[8] = {both};
    PyObject *sum = add_n(NULL, values);
    Py_DECREF(both);
    return sum;
}

#include "py/declared/add_n.h"
