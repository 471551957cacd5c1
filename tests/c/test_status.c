#include "base/status.h"

#include "check.h"

static fan_status pass_on(fan_status s, int *reached)
{
    FAN_TRY(s);
    *reached = 1;
    return FAN_OK;
}

static fan_status leave(fan_status s, int *released)
{
    fan_status status;
    FAN_GO(s);
done:
    *released = 1;
    return status;
}

int main(void)
{
    fan_error err;
    char buf[16];
    int reached = 0;
    int released = 0;

    CHECK_STR(fan_status_word(FAN_OK), "ok");
    CHECK_STR(fan_status_word(FAN_ERR_NOMEM), "out of memory");
    CHECK_STR(fan_status_word(FAN_ERR_EXTERN), "raised by a callback");
    CHECK_STR(fan_status_word((fan_status)99), "unknown status");

    /* the box is filled and the status handed back; without a box too */
    CHECK_INT(fan_fail(&err, FAN_ERR_VALUE, "slot %d has shape %s", 3, "(2,)"), FAN_ERR_VALUE);
    CHECK_INT(err.status, FAN_ERR_VALUE);
    CHECK_INT(err.code, 0);
    CHECK_STR(err.text, "slot 3 has shape (2,)");
    CHECK_INT(fan_fail_code(&err, FAN_ERR_DEVICE, 700, "launch"), FAN_ERR_DEVICE);
    CHECK_INT(err.code, 700);
    CHECK_INT(fan_fail(NULL, FAN_ERR_STATE, "nobody listens %d", 1), FAN_ERR_STATE);
    CHECK_INT(fan_fail_code(NULL, FAN_ERR_DEVICE, 1, "x"), FAN_ERR_DEVICE);

    /* long text is cut and ends */
    CHECK_INT(fan_fail(&err, FAN_ERR_TYPE, "%0*d", 3 * FAN_ERROR_TEXT, 7), FAN_ERR_TYPE);
    CHECK_INT(strlen(err.text), FAN_ERROR_TEXT - 1);

    buf[0] = '\0';
    fan_append(buf, sizeof buf, "%s", "one");
    fan_append(buf, sizeof buf, ", %d", 2);
    CHECK_STR(buf, "one, 2");
    fan_append(buf, sizeof buf, "%s", "0123456789abcdef");
    CHECK_STR(buf, "one, 2012345678");
    fan_append(buf, sizeof buf, "more");
    CHECK_STR(buf, "one, 2012345678");
    memset(buf, 'x', sizeof buf); /* not a string: left alone */
    fan_append(buf, sizeof buf, "more");
    CHECK(memchr(buf, '\0', sizeof buf) == NULL);
    fan_append(NULL, 0, "more");

    CHECK_INT(pass_on(FAN_ERR_RACE, &reached), FAN_ERR_RACE);
    CHECK_INT(reached, 0);
    CHECK_INT(pass_on(FAN_OK, &reached), FAN_OK);
    CHECK_INT(reached, 1);
    CHECK_INT(leave(FAN_ERR_INDEX, &released), FAN_ERR_INDEX);
    CHECK_INT(released, 1);
    return check_done();
}
