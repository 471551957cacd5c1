/* The list of what is done around fork(): newest first before it, oldest first behind it, each
 * once. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include "base/thread.h"

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char seen[32];

static void put_char(char c)
{
    seen[strlen(seen)] = c;
}

static void low_lock(void)
{
    put_char('l');
}
static void low_unlock(void)
{
    put_char('u');
}
static void low_child(void)
{
    put_char('c');
}
static void high_lock(void)
{
    put_char('L');
}
static void high_unlock(void)
{
    put_char('U');
}
static void last_child(void)
{
    put_char('C');
}

int main(void)
{
    static fan_fork low = {.lock = low_lock, .unlock = low_unlock, .child = low_child};
    static fan_fork high = {.lock = high_lock, .unlock = high_unlock};
    static fan_fork last = {.child = last_child};
    CHECK(fan_fork_add(&low) == 0);
    CHECK(fan_fork_add(&high) == 0);
    CHECK(fan_fork_add(&low) == 0); /* it is there */
    CHECK(fan_fork_add(&last) == 0);
    unsigned before = fan_fork_generation();
    pid_t child = fork();
    if (child == 0)
        _exit(strcmp(seen, "LluUcC") == 0 && fan_fork_generation() == before + 1 ? 0 : 1);
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(strcmp(seen, "LluU") == 0);
    CHECK(fan_fork_generation() == before);
    return check_done();
}
