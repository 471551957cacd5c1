/* call_site: the line of the user's code that made a call: the innermost frame that is not plumbing, as
 * fanin._words.site_name decides. Races, traces and warnings name it. */
#include "py/base/py.h"

#include <stdio.h>
#include <string.h>

/* call_site_find: the name of this place, "" for plumbing and unknown places; of the module's state. Reading
 * a line number means to go through the table of its function, so that a place is only read once. */
static const char *call_site_find(PyFrameObject *frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    int at = PyFrame_GetLasti(frame);
    fan_call_site_known *place = &fan_state_get()->call_sites[((uintptr_t)code >> 5 ^ (unsigned)at) % FAN_CALL_SITES];
    if (place->code == (PyObject *)code && place->at == at) {
        Py_DECREF(code);
        return place->text;
    }
    PyObject *live = fan_exception_take();
    PyObject *site_name = fan_lazy(&fan_state_get()->site_name, "fanin._words", "site_name");
    PyObject *name = site_name ? PyObject_CallOneArg(site_name, code->co_filename) : NULL;
    const char *text = name ? PyUnicode_AsUTF8(name) : "?";
    place->text[0] = '\0';
    place->at = at;
    if (!text || text[0])
        snprintf(place->text, sizeof place->text, "%s:%d", text ? text : "?", PyFrame_GetLineNumber(frame));
    PyErr_Clear();
    if (!name)
        Py_CLEAR(code);
    Py_XDECREF(name);
    Py_XSETREF(place->code, (PyObject *)code); /* kept: another code object never lies where this one does */
    fan_exception_put(live);
    return place->text;
}

void fan_call_site_forget(fan_state *st)
{
    for (size_t i = 0; i < FAN_CALL_SITES; i++)
        Py_CLEAR(st->call_sites[i].code);
}

void fan_call_site(char *buf, size_t size)
{
    PyFrameObject *frame = PyEval_GetFrame();
    if (size == 0)
        return;
    buf[0] = '\0';
    Py_XINCREF(frame);
    while (frame && !buf[0]) {
        const char *text = call_site_find(frame);
        size_t n = strnlen(text, size - 1);
        memcpy(buf, text, n);
        buf[n] = '\0';
        PyFrameObject *back = n ? NULL : PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
}
