/* table: the function table of include/fanin.h, in a capsule. */
#include "py/api/api.h"

#define X(NAME, ...) _Static_assert((int)FANIN_##NAME == (int)FAN_DT_##NAME, "fanin.h numbers dtypes as the core does");
FAN_DTYPE_LIST(X)
#undef X

static const fanin_api table = {.version = FANIN_API_VERSION,
                                .size = sizeof(fanin_api),
#define X(name) .name = fan_api_##name,
                                FAN_API_LIST(X)
#undef X
};

int fan_c_api_add(PyObject *m)
{
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)&table, FANIN_CAPSULE, NULL);
    int bad = capsule ? PyModule_AddObjectRef(m, "_C_API", capsule) : -1;
    Py_XDECREF(capsule);
    return bad;
}
