/* Errors: the words of the codes; the one writer of a place; filling an error with its place, what
 * was expected, and a formatted text. */
#include "base/status.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

const char *fan_status_word(fan_status s)
{
    static const char *const words[] = {"ok",
#define X(name, word) word,
                                        FAN_STATUS_LIST(X)
#undef X
    };
    size_t i = (size_t)s;
    if (i >= sizeof words / sizeof words[0])
        return "unknown status";
    return words[i];
}

void fan_place_append(const fan_place *at, char *buf, size_t size)
{
    fan_append(buf, size, "%s", at->object);
    if (at->slot >= 0)
        fan_append(buf, size, ": slot %" PRId64, at->slot);
    if (at->slot >= 0 && at->slot_name)
        fan_append(buf, size, " (%s)", at->slot_name);
    if (at->key >= 0)
        fan_append(buf, size, ", key %" PRId64, at->key);
    fan_append(buf, size, ": ");
}

/* error_fill: `err` may be NULL; at: NULL: no place; expected: NULL: none. Returns s. */
__attribute__((format(printf, 7, 0))) static fan_status error_fill(fan_error *err, fan_status s,
                                                                   int code, const fan_place *at,
                                                                   const char *expected,
                                                                   const char *got, const char *fmt,
                                                                   va_list args)
{
    if (!err)
        return s;
    err->status = s;
    err->code = code;
    err->slot = -1;
    err->key = -1;
    err->object[0] = '\0';
    err->slot_name[0] = '\0';
    err->expected[0] = '\0';
    err->got[0] = '\0';
    err->text[0] = '\0';
    if (at) {
        err->slot = at->slot;
        err->key = at->key;
        fan_append(err->object, sizeof err->object, "%s", at->object);
        if (at->slot >= 0 && at->slot_name)
            fan_append(err->slot_name, sizeof err->slot_name, "%s", at->slot_name);
        fan_place_append(at, err->text, sizeof err->text);
    }
    err->reason = (uint16_t)strlen(err->text);
    if (expected) {
        fan_append(err->expected, sizeof err->expected, "%s", expected);
        fan_append(err->got, sizeof err->got, "%s", got);
        fan_append(err->text, sizeof err->text, "expected %s, got %s", expected, got);
    }
    size_t n = strlen(err->text);
    if (vsnprintf(err->text + n, sizeof err->text - n, fmt, args) < 0)
        err->text[n] = '\0';
    return s;
}

#define FAIL(code, at, expected, got)                               \
    va_list args;                                                   \
    va_start(args, fmt);                                            \
    error_fill(err, s, (code), (at), (expected), (got), fmt, args); \
    va_end(args);                                                   \
    return s

fan_status fan_fail(fan_error *err, fan_status s, const char *fmt, ...)
{
    FAIL(0, NULL, NULL, NULL);
}

fan_status fan_fail_code(fan_error *err, fan_status s, int code, const char *fmt, ...)
{
    FAIL(code, NULL, NULL, NULL);
}

fan_status fan_fail_at(fan_error *err, fan_status s, int code, fan_place at, const char *fmt, ...)
{
    FAIL(code, &at, NULL, NULL);
}

fan_status fan_fail_value(fan_error *err, fan_place at, const char *fmt, ...)
{
    const fan_status s = FAN_ERR_VALUE;
    FAIL(0, &at, NULL, NULL);
}

fan_status fan_fail_expected(fan_error *err, fan_status s, fan_place at, const char *expected,
                             const char *got, const char *fmt, ...)
{
    FAIL(0, &at, expected, got);
}

void fan_append(char *buf, size_t size, const char *fmt, ...)
{
    const char *end = size ? memchr(buf, '\0', size) : NULL;
    if (!end)
        return; /* no room, or not NUL-terminated: do not write */
    size_t used = (size_t)(end - buf);
    va_list args;
    va_start(args, fmt);
    if (vsnprintf(buf + used, size - used, fmt, args) < 0)
        buf[used] = '\0';
    va_end(args);
}
