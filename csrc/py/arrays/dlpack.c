#include "py/arrays/dlpack.h"

fan_dtype fan_dl_dtype_of(fan_dl_dtype d)
{
    switch (d.code << 8 | d.bits) {
#define X(NAME, name, bytes, kind, SUM, LIBRARY, DLPACK) \
    case FAN_DL_##DLPACK << 8 | 8 * (bytes):             \
        return FAN_DT_##NAME;
        FAN_DTYPE_LIST(X)
#undef X
    default:
        return FAN_DT_NONE;
    }
}

fan_dl_dtype fan_dl_dtype_for(fan_dtype d)
{
    static const uint8_t codes[FAN_DT_COUNT] = {
#define X(NAME, name, bytes, kind, SUM, LIBRARY, DLPACK) FAN_DL_##DLPACK,
        FAN_DTYPE_LIST(X)
#undef X
    };
    return (fan_dl_dtype){codes[d], (uint8_t)(8 * fan_dtype_size(d)), 1};
}

const fan_dl_api *fan_dl_api_of(PyObject *capsule)
{
    const fan_dl_api *api = PyCapsule_CheckExact(capsule) ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    while (api && api->header.major != FAN_DL_MAJOR)
        api = api->header.older;
    return api && api->look && api->allocate && api->give && api->take && api->current_stream ? api : NULL;
}
