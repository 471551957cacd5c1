#include "base/status.h"

#include <stdarg.h>
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
    return i < sizeof words / sizeof words[0] ? words[i] : "unknown status";
}

__attribute__((format(printf, 4, 0))) static fan_status fill(fan_error *err, fan_status s, int code, const char *fmt,
                                                             va_list args)
{
    if (err) {
        err->status = s;
        err->code = code;
        if (vsnprintf(err->text, sizeof err->text, fmt, args) < 0)
            err->text[0] = '\0';
    }
    return s;
}

fan_status fan_fail(fan_error *err, fan_status s, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fill(err, s, 0, fmt, args);
    va_end(args);
    return s;
}

fan_status fan_fail_code(fan_error *err, fan_status s, int code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fill(err, s, code, fmt, args);
    va_end(args);
    return s;
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
