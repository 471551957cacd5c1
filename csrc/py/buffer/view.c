/* buffer_view: InputBuffer.explain and repr. */
#include "py/buffer/buffer_object.h"

#include "base/mem.h"
#include "base/pool.h"

#include <stdio.h>
#include <string.h>

/* put: d[name] = value, which is taken; value NULL: the exception is there already. */
static int put(PyObject *d, const char *name, PyObject *value)
{
    int result = value ? PyDict_SetItemString(d, name, value) : -1;
    Py_XDECREF(value);
    return result;
}

static const char *form_word(fan_form f)
{
    static const char *const words[] = {"undefined", "zero", "dense", "sparse", "object"};
    return words[f];
}

static PyObject *view_of_item(const fan_item_view *v)
{
    return Py_BuildValue("{s:L,s:s,s:s,s:K,s:N,s:N,s:N}", "key", (long long)v->key, "form", form_word(v->form), "dtype",
                         fan_dtype_name(v->dtype), "producer", (unsigned long long)v->producer, "event",
                         PyBool_FromLong(v->event), "donated", PyBool_FromLong(v->donated), "ready",
                         PyBool_FromLong(v->ready));
}

fan_status fan_slot_look(fan_buffer *core, size_t slot, fan_slot_view *v, fan_item_view **items, fan_error *err)
{
    size_t cap = 0;
    *items = NULL;
    for (;;) { /* others may add meanwhile: until the room suffices */
        memset(v, 0, sizeof *v);
        fan_status status = fan_buffer_look(core, slot, v, *items, cap, err);
        if (status == FAN_OK && v->items <= cap)
            return FAN_OK;
        fan_free(*items);
        *items = NULL;
        FAN_TRY(status);
        cap = v->items + 8;
        *items = fan_calloc(cap * sizeof **items);
        if (!*items)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    }
}

static PyObject *list_of_items(const fan_item_view *items, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *item = view_of_item(&items[i]);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

/* put_numbers: what of a view is no more than a number or a word. */
static int put_numbers(PyObject *d, const fan_slot_view *v)
{
    return put(d, "budget", fan_budget_wrap(v->budget)) < 0 ||
                   put(d, "limits",
                       Py_BuildValue("(KK)", (unsigned long long)v->limits.alone, (unsigned long long)v->limits.held)) <
                       0 ||
                   put(d, "parked_bytes", PyLong_FromUnsignedLongLong(v->parked)) < 0 ||
                   put(d, "alone_bytes", PyLong_FromUnsignedLongLong(v->alone)) < 0 ||
                   put(d, "how", v->how ? PyUnicode_FromStringAndSize(&v->how, 1) : PyUnicode_FromString("")) < 0 ||
                   put(d, "value_form", PyUnicode_FromString(form_word(v->value_form))) < 0 ||
                   put(d, "dtype", PyUnicode_FromString(fan_dtype_name(v->dtype))) < 0 ||
                   put(d, "accumulate", PyUnicode_FromString(fan_dtype_name(v->accumulate))) < 0 ||
                   put(d, "count", PyLong_FromLongLong(v->count)) < 0 ||
                   put(d, "expected", PyLong_FromLongLong(v->expected)) < 0 ||
                   put(d, "next_key", PyLong_FromLongLong(v->next_key)) < 0 ||
                   put(d, "next_action", PyUnicode_FromString(fan_action_word(v->next.action))) < 0 ||
                   put(d, "next_rules", PyLong_FromUnsignedLongLong(v->next.rules)) < 0 ||
                   put(d, "reuse", PyUnicode_FromString(fan_reuse_words(v->next.reuse))) < 0
               ? -1
               : 0;
}

/* view_of: the state of a slot, as a dict for fanin._trace.explain. */
static PyObject *view_of(const char *buffer, size_t slot, PyObject *name, const fan_slot_view *v,
                         const fan_item_view *items)
{
    PyObject *d = NULL, *list = list_of_items(items, v->items);
    if (list)
        d = Py_BuildValue("{s:s,s:K,s:O,s:K,s:K,s:K,s:K,s:N,s:N,s:N,s:z}", "buffer", buffer, "slot",
                          (unsigned long long)slot, "name", name ? name : Py_None, "rules",
                          (unsigned long long)v->rules, "consumer", (unsigned long long)v->consumer, "accum",
                          (unsigned long long)v->accum, "ready", (unsigned long long)v->ready, "event",
                          PyBool_FromLong(v->event), "has_value", PyBool_FromLong(v->has_value), "value_ours",
                          PyBool_FromLong(v->value_owned), "poisoned", v->poisoned);
    if (d && (put_numbers(d, v) < 0 || put(d, "items", Py_NewRef(list)) < 0))
        Py_CLEAR(d);
    Py_XDECREF(list);
    return d;
}

PyObject *fan_slot_text(const char *buffer, size_t slot, PyObject *name, const fan_slot_view *v,
                        const fan_item_view *items)
{
    PyObject *view = view_of(buffer, slot, name, v, items),
             *module = view ? PyImport_ImportModule("fanin._trace.explain") : NULL,
             *text = module ? PyObject_CallMethod(module, "explain", "O", view) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(view);
    return text;
}

PyObject *fan_buffer_explain(PyObject *o, PyObject *which)
{
    const buffer_object *self = fan_buffer_self(o);
    FAN_UNINITIALIZED fan_error err;
    PyObject *text;
    fan_slot_view v;
    fan_item_view *items;
    size_t slot;
    if (fan_slot_arg(self, which, &slot) < 0)
        return NULL;
    fan_buffer_seen_parked(self->core);
    fan_error_clear(&err);
    fan_status status = fan_slot_look(self->core, slot, &v, &items, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    text = fan_slot_text(fan_buffer_name(self->core), slot, fan_slot_name(self, slot), &v, items);
    fan_free(items);
    return text;
}

PyObject *fan_buffer_repr(PyObject *o)
{
    const buffer_object *self = fan_buffer_self(o);
    const char *name = fan_buffer_name(self->core);
    fan_sketch s;
    char said[64] = "", sums[40] = "", lost[40] = "";
    fan_buffer_sketch(self->core, &s);
    if (strcmp(name, "InputBuffer") != 0)
        snprintf(said, sizeof said, " '%.58s'", name);
    if (s.sums)
        snprintf(sums, sizeof sums, ", %zu sum%s begun", s.sums, FAN_PLURAL(s.sums));
    if (s.poisoned)
        snprintf(lost, sizeof lost, ", %zu poisoned", s.poisoned);
    if (!s.parked)
        return PyUnicode_FromFormat("<fanin.InputBuffer%s: %zu slot%s%s%s%s>", said, self->n, FAN_PLURAL(self->n),
                                    s.sums || s.poisoned ? "" : ", empty", sums, lost);
    return PyUnicode_FromFormat("<fanin.InputBuffer%s: %zu slot%s, %zu parked, %llu B%s%s>", said, self->n,
                                FAN_PLURAL(self->n), s.parked, (unsigned long long)s.bytes, sums, lost);
}

/* ---- counters ---- */

/* slot_offset: where objects of a class keep the slot of this name; -1 with an exception. */
static Py_ssize_t slot_offset(PyObject *type, const char *name)
{
    PyObject *member = PyObject_GetAttrString(type, name);
    Py_ssize_t at = -1;
    if (member && Py_IS_TYPE(member, &PyMemberDescr_Type))
        at = ((PyMemberDescrObject *)member)->d_member->offset;
    else if (member)
        PyErr_Format(PyExc_SystemError, "%R has no slot %s", type, name);
    Py_XDECREF(member);
    return at;
}

/* object_filled: an object of a class of slots, of which the first n become these numbers. */
static PyObject *object_filled(PyObject *type, const Py_ssize_t *offsets, const uint64_t *numbers, size_t n)
{
    PyObject *made = ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    for (size_t i = 0; made && i < n; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (!number) {
            Py_CLEAR(made);
            break;
        }
        *(PyObject **)(void *)((char *)made + offsets[i]) = number;
    }
    return made;
}

/* learn_offsets: of fanin.Counters and fanin.options.ProcessCounters, which has those of the former and four more. */
static int learn_offsets(fan_state *st)
{
    static const char *const names[] = {
#define X(field) #field,
        FAN_COUNTER_LIST(X)
#undef X
            "pool_bytes",
        "pool_peak_bytes", "pool_hits", "pool_misses"};
    _Static_assert(sizeof names / sizeof *names == FAN_COUNTERS_ALL, "as many as there are");
    PyObject *all = fan_lazy(&st->process_counters_type, "fanin.options", "ProcessCounters");
    if (!all || !fan_lazy(&st->counters_type, "fanin.options", "Counters"))
        return -1;
    for (size_t i = 0; i < FAN_COUNTERS_ALL; i++)
        if ((st->counter_offsets[i] = slot_offset(all, names[i])) < 0)
            return -1;
    st->counters_known = true;
    return 0;
}

#define FAN_COUNTERS_OWN (sizeof(fan_counters) / sizeof(uint64_t))

PyObject *fan_counters_wrap(const fan_counters *n)
{
    fan_state *st = fan_state_get();
    uint64_t numbers[FAN_COUNTERS_OWN];
    if (!st->counters_known && learn_offsets(st) < 0)
        return NULL;
    memcpy(numbers, n, sizeof numbers);
    return object_filled(st->counters_type, st->counter_offsets, numbers, FAN_COUNTERS_OWN);
}

PyObject *fan_process_counters(void)
{
    fan_state *st = fan_state_get();
    uint64_t numbers[FAN_COUNTERS_ALL];
    fan_counters n;
    fan_pool_counts pool = fan_pool_get();
    if (!st->counters_known && learn_offsets(st) < 0)
        return NULL;
    fan_counters_total(&n);
    memcpy(numbers, &n, sizeof n);
    numbers[FAN_COUNTERS_OWN] = pool.held;
    numbers[FAN_COUNTERS_OWN + 1] = pool.peak;
    numbers[FAN_COUNTERS_OWN + 2] = pool.hits;
    numbers[FAN_COUNTERS_OWN + 3] = pool.misses;
    return object_filled(st->process_counters_type, st->counter_offsets, numbers, FAN_COUNTERS_ALL);
}
