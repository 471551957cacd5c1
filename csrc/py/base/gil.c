/* gil: whether a thread may call Python, and when other threads may. */
#include "py/base/py.h"

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

bool fan_finalizing(void) { return !Py_IsInitialized() || FINALIZING(); }

bool fan_gil_enter(fan_gil *g)
{
    g->taken = false;
    if (fan_gil_held())
        return true;
    if (fan_finalizing())
        return false;
    g->state = PyGILState_Ensure();
    g->taken = true;
    return true;
}

void fan_gil_leave(fan_gil *g)
{
    if (g->taken)
        PyGILState_Release(g->state);
}

void *fan_allow_threads_begin(void)
{
    /* A thread that has no GIL to give, a device's for one, gives none. */
    return fan_gil_held() ? PyEval_SaveThread() : NULL;
}

void fan_allow_threads_end(void *left)
{
    if (left)
        PyEval_RestoreThread(left);
}
