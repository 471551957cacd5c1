/* api_release: calls the functions of callers of the C API that end memory, at once or at the end
 * of the call (Releases, api_lock.h). */
#include "py/base/api_lock.h"
#include "py/base/py.h"

#include "base/fault.h"

/* release_all: calls all from `r` on without a buffer's lock, and, if `unlock`, without the GIL. */
static void release_all(fan_api_release *r, bool unlock)
{
    bool left = fan_api_leave();
    bool held = fan_gil_held();
    /* The caller of the API may have an exception, which code of Python's in a release must not
     * find. */
    PyObject *live = NULL;
    PyThreadState *thread = NULL;
    if (held)
        live = fan_exception_take();
    if (held && unlock)
        thread = PyEval_SaveThread();
    while (r) {
        fan_api_release *next = r->next;
        r->run(r);
        r = next;
    }
    if (thread)
        PyEval_RestoreThread(thread);
    if (held && PyErr_Occurred())
        PyErr_WriteUnraisable(NULL);
    if (live)
        fan_exception_put(live);
    fan_api_return(left);
}

void fan_api_releases_run(void)
{
    fan_api_release *first = fan_api_here.first;
    fan_api_here.first = fan_api_here.last = NULL;
    release_all(first, !FAN_FAULT(API_RELEASE_LOCKED));
}

void fan_api_release_call(fan_api_release *r)
{
    fan_api_thread *here = fan_api_this_thread();
    r->next = NULL;
    if (!here->place.in_call || !fan_gil_held()) {
        release_all(r, false);
        return;
    }
    if (here->first)
        here->last->next = r;
    else
        here->first = r;
    here->last = r;
}
