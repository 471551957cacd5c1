/* state: the module's state. */
#include "py/base/py.h"

/* The newest state. A module that is deleted from sys.modules and imported again makes a second state; types of the
 * first go on with theirs. */
static fan_state *newest;

fan_state *fan_state_get(void) { return newest; }

void fan_state_link(fan_state *st)
{
    st->older = newest;
    newest = st;
}

void fan_state_unlink(fan_state *st)
{
    for (fan_state **at = &newest; *at; at = &(*at)->older)
        if (*at == st) {
            *at = st->older;
            return;
        }
}

PyObject *fan_lazy(PyObject **cache, const char *module, const char *name)
{
    if (!*cache) {
        PyObject *m = PyImport_ImportModule(module);
        PyObject *o = m && name ? PyObject_GetAttrString(m, name) : Py_XNewRef(m);
        Py_XDECREF(m);
        /* The import may have run other threads, and they this function. */
        if (*cache)
            Py_XDECREF(o);
        else
            *cache = o;
    }
    return *cache;
}

PyObject *fan_arrays(void) { return fan_lazy(&fan_state_get()->arrays, "fanin._interop.arrays", NULL); }
