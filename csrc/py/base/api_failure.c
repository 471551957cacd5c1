/* api_failure: statuses, failures and structs with a size, between the core and fanin.h. */
#include "py/base/api_failure.h"

#include <stdio.h>
#include <string.h>

/* X(name): the statuses that both sides have. */
#define STATUSES(X) \
    X(INDEX)        \
    X(TYPE)         \
    X(VALUE)        \
    X(OVERFLOW)     \
    X(BUFFER)       \
    X(STATE)        \
    X(RACE)         \
    X(DEADLOCK)     \
    X(DEVICE)       \
    X(DEVICE_NOMEM) \
    X(CAPTURE)      \
    X(NOMEM)        \
    X(ZERO_DIVISION)

fanin_status fan_api_status(fan_status s)
{
    switch (s) {
    case FAN_OK:
        return FANIN_OK;
#define X(name)          \
    case FAN_ERR_##name: \
        return FANIN_ERR_##name;
        STATUSES(X)
#undef X
    default:
        return FANIN_ERR_PYTHON;
    }
}

fan_status fan_api_core_status(fanin_status s)
{
    switch (s) {
    case FANIN_OK:
        return FAN_OK;
#define X(name)            \
    case FANIN_ERR_##name: \
        return FAN_ERR_##name;
        STATUSES(X)
#undef X
    default:
        return FAN_ERR_EXTERN;
    }
}

fanin_status fan_api_fail(fanin_failure *why, fan_status s, const fan_error *err)
{
    fanin_failure f = {
        .status = fan_api_status(s),
        .slot = -1,
        .key = -1,
    };
    size_t size = 0;
    if (why)
        size = why->struct_size;
    if (s == FAN_OK || size < sizeof f.struct_size)
        return f.status;
    if (size > sizeof f)
        size = sizeof f;
    f.struct_size = why->struct_size;
    const char *text = err->text;
    if (!text[0])
        text = fan_status_word(s);
    snprintf(f.text, sizeof f.text, "%s", text);
    if (err->status == s) {
        f.code = err->code;
        memcpy(f.expected, err->expected, sizeof f.expected);
        memcpy(f.got, err->got, sizeof f.got);
    }
    if (err->status == s && err->object[0]) {
        f.slot = err->slot;
        f.key = err->key;
        memcpy(f.object, err->object, sizeof f.object);
        memcpy(f.slot_name, err->slot_name, sizeof f.slot_name);
    }
    _Static_assert(sizeof f.object == FAN_ERROR_NAME && sizeof f.text == FAN_ERROR_TEXT,
                   "both errors' texts are as long");
    memcpy(why, &f, size);
    return f.status;
}

fan_status fan_api_options(const void *given, size_t least, size_t size, const char *what,
                           void *out, fan_error *err)
{
    size_t has = least;
    memset(out, 0, size);
    if (!given)
        return FAN_OK;
    memcpy(&has, given, sizeof has);
    if (has < least || has > size) {
        return fan_fail(err, FAN_ERR_VALUE, "%s: struct_size: expected sizeof(%s), %zu, got %zu",
                        what, what, size, has);
    }
    memcpy(out, given, has);
    return FAN_OK;
}

fan_status fan_api_flags(uint32_t flags, uint32_t known, const char *what, fan_error *err)
{
    uint32_t unknown = flags & ~known;
    if (!unknown)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_VALUE, "%s: flags: unknown bits 0x%x", what, unknown);
}

fan_status fan_api_reserved(uint32_t reserved, const char *what, fan_error *err)
{
    if (!reserved)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_VALUE, "%s: reserved: expected 0, got %u", what, reserved);
}
