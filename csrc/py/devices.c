/* devices: their names. */
#include "py/driver.h"
#include "py/entered.h"

#include <stdlib.h>
#include <string.h>

int fan_device_arg(PyObject *o, fan_device **out)
{
    const char *name;
    char *end;
    long index;
    *out = NULL;
    if (!o || o == Py_None)
        return 0;
    if (!PyUnicode_Check(o)) {
        PyErr_Format(PyExc_TypeError, "expected a device's name, as in \"cpu\" or \"sim:0\", got %.80s",
                     Py_TYPE(o)->tp_name);
        return -1;
    }
    if (!(name = fan_word_of(o)))
        return -1;
    if (strcmp(name, "cpu") == 0) {
        *out = fan_cpu();
        return 0;
    }
    if (strncmp(name, "cuda", 4) == 0)
        return fan_cuda_device_arg(name, out);
    if (strncmp(name, "sim:", 4) == 0 && name[4] >= '0' && name[4] <= '9') {
        index = strtol(name + 4, &end, 10);
        if (*end == '\0' && end - name < 8) {
            *out = fan_machine_device(index);
            return *out ? 0 : -1;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "unknown device %R: devices are \"cpu\", \"cuda:0\" .. where there is a driver, and, inside `with "
                 "fanin.sim.Machine():`, \"sim:0\", \"sim:1\" ..",
                 o);
    return -1;
}
