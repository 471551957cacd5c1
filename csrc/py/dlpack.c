#include "py/dlpack.h"

fan_dtype fan_dl_dtype_of(fan_dl_dtype d)
{
    switch (d.code) {
    case FAN_DL_BOOL:
        return d.bits == 8 ? FAN_DT_BOOL : FAN_DT_NONE;
    case FAN_DL_INT:
        return d.bits == 8    ? FAN_DT_INT8
               : d.bits == 16 ? FAN_DT_INT16
               : d.bits == 32 ? FAN_DT_INT32
               : d.bits == 64 ? FAN_DT_INT64
                              : FAN_DT_NONE;
    case FAN_DL_UINT:
        return d.bits == 8    ? FAN_DT_UINT8
               : d.bits == 16 ? FAN_DT_UINT16
               : d.bits == 32 ? FAN_DT_UINT32
               : d.bits == 64 ? FAN_DT_UINT64
                              : FAN_DT_NONE;
    case FAN_DL_FLOAT:
        return d.bits == 16   ? FAN_DT_FLOAT16
               : d.bits == 32 ? FAN_DT_FLOAT32
               : d.bits == 64 ? FAN_DT_FLOAT64
                              : FAN_DT_NONE;
    case FAN_DL_BFLOAT:
        return d.bits == 16 ? FAN_DT_BFLOAT16 : FAN_DT_NONE;
    case FAN_DL_COMPLEX:
        return d.bits == 64 ? FAN_DT_COMPLEX64 : d.bits == 128 ? FAN_DT_COMPLEX128 : FAN_DT_NONE;
    case FAN_DL_F8_E4M3FN:
        return d.bits == 8 ? FAN_DT_FLOAT8_E4M3FN : FAN_DT_NONE;
    case FAN_DL_F8_E5M2:
        return d.bits == 8 ? FAN_DT_FLOAT8_E5M2 : FAN_DT_NONE;
    default:
        return FAN_DT_NONE;
    }
}

fan_dl_dtype fan_dl_dtype_for(fan_dtype d)
{
    uint8_t code = FAN_DL_FLOAT;
    switch (d) {
    case FAN_DT_BOOL:
        code = FAN_DL_BOOL;
        break;
    case FAN_DT_BFLOAT16:
        code = FAN_DL_BFLOAT;
        break;
    case FAN_DT_FLOAT8_E4M3FN:
        code = FAN_DL_F8_E4M3FN;
        break;
    case FAN_DT_FLOAT8_E5M2:
        code = FAN_DL_F8_E5M2;
        break;
    default:
        code = fan_dtype_kind(d) == 'i'   ? FAN_DL_INT
               : fan_dtype_kind(d) == 'u' ? FAN_DL_UINT
               : fan_dtype_kind(d) == 'c' ? FAN_DL_COMPLEX
                                          : FAN_DL_FLOAT;
    }
    return (fan_dl_dtype){code, (uint8_t)(8 * fan_dtype_size(d)), 1};
}

const fan_dl_api *fan_dl_api_of(PyObject *capsule)
{
    const fan_dl_api *api = PyCapsule_CheckExact(capsule) ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    while (api && api->header.major != FAN_DL_MAJOR)
        api = api->header.older;
    return api && api->look && api->allocate && api->give && api->take && api->current_stream ? api : NULL;
}
