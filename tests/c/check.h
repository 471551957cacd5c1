/* check: a test program in C is a main() full of CHECKs.
 *
 * A check that fails prints its file and line and the program goes on; `return check_done();`
 * prints the last line, "ok N checks", and gives the exit status. tests/c/test_c.py runs every
 * tests/c/test_*.c and expects that line. A program of long loops has two sizes
 * (check_is_full): tests/c/test_c.py runs its sample and, marked `full`, the whole. Several threads
 * may check at once. */
#ifndef FAN_TESTS_CHECK_H
#define FAN_TESTS_CHECK_H

#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static _Atomic long check_count;
static _Atomic long check_failed;

__attribute__((unused)) static bool check_at(bool holds, const char *file, int line,
                                             const char *what)
{
    check_count++;
    if (holds)
        return true;
    if (check_failed++ < 50)
        fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, what);
    return false;
}

/* CHECK: true when the expression holds. */
#define CHECK(expr) check_at((expr) ? true : false, __FILE__, __LINE__, #expr)

/* CHECK_OK: the expression is a fan_status and is FAN_OK. */
#define CHECK_OK(expr) check_at((int)(expr) == 0, __FILE__, __LINE__, #expr)

/* CHECK_INT: two integers are equal; prints both. */
#define CHECK_INT(got, expected)                                                      \
    do {                                                                              \
        long long check_a = (long long)(got), check_b = (long long)(expected);        \
        if (!check_at(check_a == check_b, __FILE__, __LINE__, #got " == " #expected)) \
            fprintf(stderr, "    got %lld, expected %lld\n", check_a, check_b);       \
    } while (0)

/* CHECK_STR: two strings are equal; prints both. */
#define CHECK_STR(got, expected)                                                                 \
    do {                                                                                         \
        const char *check_a = (got), *check_b = (expected);                                      \
        if (!check_at(strcmp(check_a, check_b) == 0, __FILE__, __LINE__, #got " == " #expected)) \
            fprintf(stderr, "    got \"%s\", expected \"%s\"\n", check_a, check_b);              \
    } while (0)

/* CHECK_HAS: a string contains another; prints both. */
#define CHECK_HAS(got, part)                                                                     \
    do {                                                                                         \
        const char *check_a = (got), *check_b = (part);                                          \
        if (!check_at(strstr(check_a, check_b) != NULL, __FILE__, __LINE__, #got " has " #part)) \
            fprintf(stderr, "    got \"%s\", looked for \"%s\"\n", check_a, check_b);            \
    } while (0)

/* check_is_full: returns whether the program's arguments have the word "full"; without it, long
 * loops take a sample. */
__attribute__((unused)) static bool check_is_full(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "full") == 0)
            return true;
    }
    return false;
}

/* check_done: the last line of main. */
static int check_done(void)
{
    fflush(stderr);
    if (check_failed != 0) {
        printf("FAILED %ld of %ld checks\n", (long)check_failed, (long)check_count);
        return 1;
    }
    printf("ok %ld checks\n", (long)check_count);
    return 0;
}

#endif
