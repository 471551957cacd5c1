/* canary: planted bugs, one for each sanitizer.
 *
 * .ci/run builds this file into a copy of the library before it trusts a sanitizer: a job that does
 * not find the bug named by FANIN_CANARY would find none of ours either. It is no test program and
 * no part of the
 * library. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long canary_raced; /* written by two threads without a lock */

static void *canary_race(void *ignored)
{
    (void)ignored;
    for (int i = 0; i < 100000; i++)
        canary_raced++;
    return NULL;
}

__attribute__((constructor)) static void canary_sings(void)
{
    const char *which = getenv("FANIN_CANARY");
    if (which == NULL)
        return;
    volatile int one = 1;
    if (strcmp(which, "heap") == 0) {
        volatile char *volatile p = malloc(8);
        if (p != NULL)
            p[7 + one] = 1; /* one byte too far */
        free((void *)p);
    } else if (strcmp(which, "free") == 0) {
        volatile char *volatile p = calloc(8, 1);
        free((void *)p);
        one = p[one]; /* read after free */
    } else if (strcmp(which, "overflow") == 0) {
        volatile int big = INT_MAX;
        big = big + one; /* signed overflow */
    } else if (strcmp(which, "race") == 0) {
        pthread_t a, b;
        if (pthread_create(&a, NULL, canary_race, NULL) == 0) {
            if (pthread_create(&b, NULL, canary_race, NULL) == 0)
                pthread_join(b, NULL);
            pthread_join(a, NULL);
        }
    }
    fprintf(stderr, "canary %s: not found\n", which);
}
