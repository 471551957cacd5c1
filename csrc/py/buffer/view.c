/* buffer_view: InputBuffer.explain and repr. */
#include "py/buffer/buffer_object.h"

#include "base/mem.h"
#include "base/pool.h"

#include <stdio.h>
#include <string.h>

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
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < n; i++)
        fan_list_add(&list, view_of_item(&items[i]));
    return list;
}

/* view_of: the state of a slot, as a dict for fanin._trace.explain. */
static PyObject *view_of(const char *buffer, size_t slot, PyObject *name, const fan_slot_view *v,
                         const fan_item_view *items)
{
    return Py_BuildValue(
        "{s:s,s:K,s:O,s:K,s:K,s:K,s:K,s:N,s:N,s:N,s:z,s:N,s:(KK),s:K,s:K,s:s#,s:s,s:s,s:s,s:L,s:L,s:L,s:s,s:K,s:s,s:N}",
        "buffer", buffer, "slot", (unsigned long long)slot, "name", name ? name : Py_None, "rules",
        (unsigned long long)v->rules, "consumer", (unsigned long long)v->consumer, "accum",
        (unsigned long long)v->accum, "ready", (unsigned long long)v->ready, "event", PyBool_FromLong(v->event),
        "has_value", PyBool_FromLong(v->has_value), "value_ours", PyBool_FromLong(v->value_owned), "poisoned",
        v->poisoned, "budget", fan_budget_wrap(v->budget), "limits", (unsigned long long)v->limits.alone,
        (unsigned long long)v->limits.held, "parked_bytes", (unsigned long long)v->parked, "alone_bytes",
        (unsigned long long)v->alone, "how", &v->how, (Py_ssize_t)(v->how != 0), "value_form", form_word(v->value_form),
        "dtype", fan_dtype_name(v->dtype), "accumulate", fan_dtype_name(v->accumulate), "count", (long long)v->count,
        "expected", (long long)v->expected, "next_key", (long long)v->next_key, "next_action",
        fan_action_word(v->next.action), "next_rules", (unsigned long long)v->next.rules, "reuse",
        fan_reuse_words(v->next.reuse), "items", list_of_items(items, v->items));
}

PyObject *fan_slot_text(const char *buffer, size_t slot, PyObject *name, const fan_slot_view *v,
                        const fan_item_view *items)
{
    PyObject *view = view_of(buffer, slot, name, v, items);
    return view ? fan_call("fanin._trace.explain", "explain", "(N)", view) : NULL;
}

PyObject *fan_buffer_explain(PyObject *o, PyObject *which)
{
    const buffer_object *self = fan_buffer_self(o);
    PyObject *text;
    fan_slot_view v;
    fan_item_view *items;
    size_t slot;
    if (fan_slot_arg(self, which, &slot) < 0)
        return NULL;
    fan_buffer_seen_parked(self->core);
    if (FAN_CHECK(fan_slot_look(self->core, slot, &v, &items, &err)) < 0)
        return NULL;
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

/* counters_of: an object of a class of fanin.options, whose fields are these numbers. */
static PyObject *counters_of(PyObject **cache, const char *name, const void *numbers, size_t size)
{
    PyObject *type = fan_lazy(cache, "fanin.options", name);
    PyObject *fields = type ? fan_ints((int)(size / sizeof(int64_t)), numbers) : NULL;
    PyObject *made = fields ? PyObject_CallObject(type, fields) : NULL;
    Py_XDECREF(fields);
    return made;
}

PyObject *fan_counters_wrap(const fan_counters *n)
{
    return counters_of(&fan_state_get()->counters_type, "Counters", n, sizeof *n);
}

PyObject *fan_process_counters(void)
{
    fan_pool_counts pool = fan_pool_get();
    struct {
        fan_counters own;
        uint64_t pool[4];
    } all = {.pool = {pool.held, pool.peak, pool.hits, pool.misses}};
    fan_counters_total(&all.own);
    return counters_of(&fan_state_get()->process_counters_type, "ProcessCounters", &all, sizeof all);
}
