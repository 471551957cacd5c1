/* machine_threads: host threads of a simulated machine, and who chooses among them. */
#include "py/machine_part.h"

static int choose(void *ctx, uint32_t enabled)
{
    chooser *c = ctx;
    return c->mode == FOLLOW ? fan_explore_choose(c->x, enabled) : -1;
}

static int pick(void *ctx, int n)
{
    chooser *c = ctx;
    return c->mode == FOLLOW ? fan_explore_pick(c->x, n) : 0;
}

static void touched(void *ctx, uint64_t object, fan_sched_mode how)
{
    chooser *c = ctx;
    if (c->mode == FOLLOW)
        (void)fan_explore_access(c->x, object, how); /* the search keeps its failure */
}

void fan_machine_set_chooser(machine_object *self, chooser c)
{
    PyObject *search = self->chooser.search;
    self->chooser = c;
    if (c.mode == BY_SEED)
        fan_sim_set_chooser(self->m, NULL);
    else
        fan_sim_set_chooser(
            self->m, &(fan_sim_chooser){.choose = choose, .access = touched, .pick = pick, .ctx = &self->chooser});
    Py_XDECREF(search);
}

PyObject *fan_machine_spawn(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    int actor = -1;
    fan_status status = fan_sim_spawn(fan_machine_self(o)->m, &actor, &err);
    return status == FAN_OK ? PyLong_FromLong(actor) : fan_raise(status, &err);
}

PyObject *fan_machine_thread_begin(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    bool go;
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        go = fan_sim_thread_begin(fan_machine_self(o)->m, actor);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(go);
}

PyObject *fan_machine_thread_end(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        fan_sim_thread_end(fan_machine_self(o)->m, actor);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *fan_machine_join(PyObject *o, PyObject *Py_UNUSED(none))
{
    machine_object *self = fan_machine_self(o);
    fan_error err = {0};
    fan_status status;
    Py_BEGIN_ALLOW_THREADS
        status = fan_sim_join(self->m, &err);
    Py_END_ALLOW_THREADS
    return fan_sim_done(status, &err);
}

PyObject *fan_machine_stuck(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(fan_sim_stuck(fan_machine_self(o)->m, actor));
}

PyObject *fan_machine_limit(PyObject *o, PyObject *arg)
{
    size_t steps = PyLong_AsSize_t(arg);
    if (steps == (size_t)-1 && PyErr_Occurred())
        return NULL;
    fan_sim_limit(fan_machine_self(o)->m, steps);
    Py_RETURN_NONE;
}

PyObject *fan_machine_break(PyObject *o, PyObject *text)
{
    const char *words = PyUnicode_AsUTF8(text);
    return words ? PyLong_FromLong(fan_sim_break(fan_machine_self(o)->m, words)) : NULL;
}

PyObject *fan_machine_saw_thread(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    fan_sim_read_thread(fan_machine_self(o)->m, actor);
    Py_RETURN_NONE;
}

PyObject *fan_machine_after_thread(PyObject *o, PyObject *arg)
{
    fan_error err = {0};
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    return fan_sim_done(fan_sim_after_thread(fan_machine_self(o)->m, actor, &err), &err);
}

PyObject *fan_machine_follow(PyObject *o, PyObject *capsule)
{
    fan_explore *x = fan_search_of(capsule);
    if (!x)
        return NULL;
    fan_machine_set_chooser(fan_machine_self(o), (chooser){.mode = FOLLOW, .x = x, .search = Py_NewRef(capsule)});
    Py_RETURN_NONE;
}

PyObject *fan_machine_give_up(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_machine_set_chooser(fan_machine_self(o), (chooser){.mode = GIVE_UP});
    Py_RETURN_NONE;
}
