/* call_site: the line of the user's code that made a call. Races, traces and warnings name it.
 *
 * It is the line of the innermost frame that is not plumbing. Plumbing is fanin itself, but for
 * what runs as a program of its own (the demo, the command line, scenarios of the test suite), and
 * the frozen part of the standard library.
 *
 * In order: whether a file is plumbing, decided once per file; the name of a place, kept in the
 * module's state; the walk over the frames. */
#include "py/base/py.h"

#include <stdio.h>
#include <string.h>

static const char *const programs[] = {"cli", "demo", "testing", "conformance", "__main__", NULL};

/* inside: is `path` a file of the package in `home` (its folder, with the slash) that is
 * plumbing? */
static bool inside(const char *path, const char *home)
{
    size_t n = strlen(home);
    if (n == 0)
        return false;
    if (strncmp(path, home, n) != 0)
        return false;
    for (const char *const *p = programs; *p; p++) {
        if (strncmp(path + n, *p, strlen(*p)) == 0)
            return false;
    }
    return true;
}

/* package_home: the package's folder, with the slash; "" if it is not known. New reference. */
static PyObject *package_home(void)
{
    PyObject *package = fan_module_loaded("fanin");
    PyObject *file = NULL;
    PyObject *home = NULL;
    if (package)
        file = PyObject_GetAttrString(package, "__file__");
    if (file && PyUnicode_Check(file)) {
        Py_ssize_t slash = PyUnicode_FindChar(file, '/', 0, PyUnicode_GET_LENGTH(file), -1);
        home = PyUnicode_Substring(file, 0, slash + 1);
    }
    Py_XDECREF(file);
    PyErr_Clear();
    if (!home)
        home = PyUnicode_FromString("");
    return home;
}

/* name_of: the short name by which a file is cited, None where it is plumbing; borrowed from the
 * cache. NULL with an exception. */
static PyObject *name_of(PyObject *filename)
{
    fan_state *st = fan_state_get();
    if (!st->site_cache)
        st->site_cache = PyDict_New();
    if (!st->site_cache)
        return NULL;
    PyObject *name = PyDict_GetItemWithError(st->site_cache, filename);
    if (name || PyErr_Occurred())
        return name;
    const char *path = PyUnicode_AsUTF8(filename);
    PyObject *home = NULL;
    const char *folder = NULL;
    if (path)
        home = package_home();
    if (home)
        folder = PyUnicode_AsUTF8(home);
    if (!folder)
        goto done;
    if (inside(path, folder) || strncmp(path, "<frozen ", 8) == 0) {
        name = Py_NewRef(Py_None);
    } else {
        const char *slash = strrchr(path, '/');
        if (slash && slash[1])
            path = slash + 1;
        name = PyUnicode_FromString(path);
    }
    if (name && PyDict_SetItem(st->site_cache, filename, name) < 0)
        Py_CLEAR(name);
    Py_XDECREF(name); /* the cache holds it */
done:
    Py_XDECREF(home);
    return name;
}

/* call_site_find: the name of this place, "" for plumbing and unknown places; of the module's
 * state. Reading a line number means to go through the table of its function, so that a place is
 * only read once. */
static const char *call_site_find(PyFrameObject *frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    int at = PyFrame_GetLasti(frame);
    fan_call_site_known *place =
        &fan_state_get()->call_sites[((uintptr_t)code >> 5 ^ (unsigned)at) % FAN_CALL_SITES];
    if (place->code == (PyObject *)code && place->at == at) {
        Py_DECREF(code);
        return place->text;
    }
    PyObject *live = fan_exception_take();
    PyObject *name = name_of(code->co_filename);
    place->text[0] = '\0';
    place->at = at;
    if (name && name != Py_None) {
        const char *text = PyUnicode_AsUTF8(name);
        if (!text)
            text = "?";
        if (text[0])
            snprintf(place->text, sizeof place->text, "%s:%d", text, PyFrame_GetLineNumber(frame));
    }
    PyErr_Clear();
    if (!name)
        Py_CLEAR(code);
    /* kept: another code object never lies where this one does */
    Py_XSETREF(place->code, (PyObject *)code);
    fan_exception_put(live);
    return place->text;
}

static _Thread_local int64_t site_level = 1;

int64_t fan_call_site_level(int64_t level)
{
    int64_t before = site_level;
    site_level = level;
    return before;
}

void fan_call_site(char *buf, size_t size)
{
    PyFrameObject *frame = PyEval_GetFrame();
    int64_t wanted = site_level;
    if (size == 0)
        return;
    buf[0] = '\0';
    Py_XINCREF(frame);
    while (frame && wanted > 0) {
        const char *text = call_site_find(frame);
        size_t n = strnlen(text, size - 1);
        if (n) {
            memcpy(buf, text, n);
            buf[n] = '\0';
            wanted--;
        }
        PyFrameObject *inner = frame;
        frame = NULL;
        if (wanted)
            frame = PyFrame_GetBack(inner);
        Py_DECREF(inner);
    }
    Py_XDECREF(frame);
}
