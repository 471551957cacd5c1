/* counters: what buffers and the process have counted, as Python's objects. */
#include "py/base/py.h"

#include "base/pool.h"

#include <string.h>

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
