/* state: the module's state, NumPy's C API, and whether a thread may call Python.
 *
 * In order: the states; functions of Python that C calls by name; the interpreter's lock, with the
 * lock of a buffer of the C API that replaces it. */
#define FAN_PY_IMPORTS_NUMPY
#include "py/base/api_lock.h"
#include "py/base/py.h"

int fan_numpy_import(void)
{
    return PyArray_ImportNumPyAPI();
}

/* ---- state ---- */

/* The newest state. A module that is deleted from sys.modules and imported again makes a second
 * state; types of the first keep theirs. */
static fan_state *newest;

fan_state *fan_state_get(void)
{
    return newest;
}

void fan_state_link(fan_state *state)
{
    state->older = newest;
    newest = state;
}

void fan_state_unlink(fan_state *state)
{
    for (fan_state **at = &newest; *at; at = &(*at)->older) {
        if (*at == state) {
            *at = state->older;
            return;
        }
    }
}

PyObject *fan_module_loaded(const char *name)
{
    PyObject *modules = PyImport_GetModuleDict();
    if (!modules)
        return NULL;
    return PyDict_GetItemString(modules, name);
}

PyObject *fan_imported(const char *module, const char *name)
{
    PyObject *m = PyImport_ImportModule(module);
    if (!m || !name)
        return m;
    PyObject *o = PyObject_GetAttrString(m, name);
    Py_DECREF(m);
    return o;
}

PyObject *fan_lazy(PyObject **cache, const char *module, const char *name)
{
    if (!*cache) {
        PyObject *o = fan_imported(module, name);
        /* The import may have run other threads, and they this function. */
        if (*cache)
            Py_XDECREF(o);
        else
            *cache = o;
    }
    return *cache;
}

PyObject *fan_call(const char *module, const char *name, const char *format, ...)
{
    va_list given;
    va_start(given, format);
    PyObject *args = Py_VaBuildValue(format, given);
    va_end(given);
    PyObject *made = NULL;
    PyObject *f = args ? fan_imported(module, name) : NULL;
    if (f)
        made = PyObject_CallObject(f, args);
    Py_XDECREF(f);
    Py_XDECREF(args);
    return made;
}

PyObject *fan_arrays(void)
{
    return fan_lazy(&fan_state_get()->arrays, "fanin._interop.arrays", NULL);
}

/* ---- the GIL, and the lock of a buffer of the C API (api_lock.h) ---- */

#if PY_VERSION_HEX >= 0x030D0000
#define CURRENT_THREAD_STATE() PyThreadState_GetUnchecked()
#define FINALIZING() Py_IsFinalizing()
#else
#define CURRENT_THREAD_STATE() _PyThreadState_UncheckedGet()
#define FINALIZING() _Py_IsFinalizing()
#endif

bool fan_gil_held(void)
{
    /* PyGILState_Check returns 1 where it cannot check, after finalization for one. */
    PyThreadState *mine = PyGILState_GetThisThreadState();
    return mine && mine == CURRENT_THREAD_STATE();
}

bool fan_finalizing(void)
{
    return !Py_IsInitialized() || FINALIZING();
}

bool fan_gil_enter(fan_gil *g)
{
    bool held = fan_gil_held();
    g->taken = g->left = false;
    if (!held && fan_finalizing())
        return false;
    /* a thread that has the GIL, or gets it meanwhile, may wait for this lock */
    g->left = fan_api_leave();
    if (held)
        return true;
    g->state = PyGILState_Ensure();
    g->taken = true;
    return true;
}

void fan_gil_leave(fan_gil *g)
{
    if (g->taken)
        PyGILState_Release(g->state);
    fan_api_return(g->left);
}

void *fan_allow_threads_begin(void)
{
    /* A thread that has no lock to give, a device's for one, gives none. */
    uintptr_t left = fan_api_leave();
    uintptr_t thread = 0;
    if (fan_gil_held())
        thread = (uintptr_t)PyEval_SaveThread();
    return (void *)(thread | left);
}

void fan_allow_threads_end(void *left)
{
    uintptr_t in_api = (uintptr_t)left & 1;
    if ((uintptr_t)left != in_api)
        PyEval_RestoreThread((PyThreadState *)((uintptr_t)left - in_api));
    fan_api_return(in_api);
}

_Thread_local fan_api_thread fan_api_here;

static pthread_mutex_t adopting = PTHREAD_MUTEX_INITIALIZER; /* threads of a forked child */

static void adopting_lock(void)
{
    (void)pthread_mutex_lock(&adopting);
}
static void adopting_unlock(void)
{
    (void)pthread_mutex_unlock(&adopting);
}
static fan_fork adopting_fork = {.lock = adopting_lock, .unlock = adopting_unlock};

int fan_api_lock_init(fan_api_lock *l)
{
    l->generation = fan_fork_generation();
    if (fan_fork_add(&adopting_fork) != 0)
        return -1;
    return fan_mutex_init(&l->mutex);
}

void fan_api_lock_fini(fan_api_lock *l)
{
    fan_mutex_fini(&l->mutex);
}

void fan_api_lock_adopt(fan_api_lock *l)
{
    adopting_lock();
    if (l->generation != fan_fork_generation()) {
        (void)fan_mutex_adopt(&l->mutex);
        l->generation = fan_fork_generation();
    }
    adopting_unlock();
}
