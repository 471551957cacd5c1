/* status: the return type of every call that can fail, and the struct that describes a failure.
 *
 * A function that can fail returns `fan_status`; `fan_error *` is its last parameter and may be
 * NULL. FAN_TRY passes a failure up. FAN_ERR_EXTERN means that the frontend keeps the cause (in
 * Python: an exception is set on this thread). */
#ifndef FAN_BASE_STATUS_H
#define FAN_BASE_STATUS_H

#include <stddef.h>
#include <stdint.h>

/* X(name, word): the statuses, listed once. */
#define FAN_STATUS_LIST(X)                  \
    X(INDEX, "no such slot")                \
    X(TYPE, "wrong type")                   \
    X(VALUE, "wrong value")                 \
    X(OVERFLOW, "does not fit")             \
    X(ZERO_DIVISION, "division by zero")    \
    X(BUFFER, "cannot be imported")         \
    X(STATE, "wrong state")                 \
    X(RACE, "race")                         \
    X(DEADLOCK, "deadlock")                 \
    X(DEVICE, "device call failed")         \
    X(DEVICE_NOMEM, "device out of memory") \
    X(CAPTURE, "not legal under capture")   \
    X(NOMEM, "out of memory")               \
    X(EXTERN, "raised by a callback")

typedef enum fan_status {
    FAN_OK,
#define X(name, word) FAN_ERR_##name,
    FAN_STATUS_LIST(X)
#undef X
} fan_status;

#define FAN_ERROR_TEXT 1024
#define FAN_ERROR_NAME 128

/* fan_place: what an error is about. Text begins with it: "grads: slot 2 (w1), key 3: ". */
typedef struct fan_place {
    const char *object;    /* the name of the buffer or node; borrowed */
    int64_t slot;          /* -1: the whole object */
    const char *slot_name; /* borrowed; NULL: none */
    int64_t key;           /* -1: none */
} fan_place;

/* fan_error: the whole message, and its parts as fields, so that no caller reads them out of the
 * message. */
typedef struct fan_error {
    fan_status status; /* FAN_OK: empty */
    /* the driver's code for FAN_ERR_DEVICE; else 0 */
    int code;
    /* where in `text` the place ends and the reason begins */
    uint16_t reason;
    /* of the place, if `object` is not "" */
    int64_t slot, key;
    char object[FAN_ERROR_NAME], slot_name[FAN_ERROR_NAME]; /* "": none */
    char expected[FAN_ERROR_NAME], got[FAN_ERROR_NAME];     /* of fan_fail_expected; "": none */
    char text[FAN_ERROR_TEXT];
} fan_error;

/* fan_place_append: appends "grads: slot 2 (w1), key 3: " to the string in `buf`, as fan_append
 * does. No other code writes a place. */
void fan_place_append(const fan_place *at, char *buf, size_t size);

/* fan_status_word: returns the fixed word for a status. */
const char *fan_status_word(fan_status s);

/* fan_fail: fills `err` (may be NULL) with printf-style text, truncated to fit, and returns `s`. */
fan_status fan_fail(fan_error *err, fan_status s, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* fan_fail_code: as fan_fail, with a driver's code. */
fan_status fan_fail_code(fan_error *err, fan_status s, int code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* fan_fail_memory: FAN_ERR_NOMEM, without a place. */
static inline fan_status fan_fail_memory(fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
}
/* fan_fail_at: as fan_fail_code, for an error about a place: fills the fields and puts the place
 * before the text. */
fan_status fan_fail_at(fan_error *err, fan_status s, int code, fan_place at, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* fan_fail_value: the same of a wrong value, FAN_ERR_VALUE. */
fan_status fan_fail_value(fan_error *err, fan_place at, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* fan_fail_expected: as fan_fail_at: "<place>: expected <expected>, got <got>", and the text after
 * it. */
fan_status fan_fail_expected(fan_error *err, fan_status s, fan_place at, const char *expected,
                             const char *got, const char *fmt, ...)
    __attribute__((format(printf, 6, 7)));

/* fan_append: appends printf-style text to the NUL-terminated string in `buf` (of `size` bytes);
 * truncates. */
void fan_append(char *buf, size_t size, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* FAN_UNINITIALIZED: a local that is written before it is read and is too large to be zeroed at
 * each call, as hardened builds do. */
#if defined __has_attribute
#if __has_attribute(uninitialized)
#define FAN_UNINITIALIZED __attribute__((uninitialized))
#endif
#endif
#ifndef FAN_UNINITIALIZED
#define FAN_UNINITIALIZED
#endif

/* FAN_PLURAL: the ending of a noun after the number n. */
#define FAN_PLURAL(n) ((n) == 1 ? "" : "s")

#define FAN_TRY(expr)                       \
    do {                                    \
        fan_status fan_try_status = (expr); \
        if (fan_try_status != FAN_OK)       \
            return fan_try_status;          \
    } while (0)

/* FAN_GO: as FAN_TRY, but leaves through the function's `done` label with `status` set. */
#define FAN_GO(expr)          \
    do {                      \
        status = (expr);      \
        if (status != FAN_OK) \
            goto done;        \
    } while (0)

#endif
