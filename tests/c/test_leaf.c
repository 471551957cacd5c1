/* Who has a leaf: one thread at a time, and, after a fork, whoever is still there. */
#define _POSIX_C_SOURCE 200809L
#include "engine/leaf.h"

#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static const fan_frontend nobody; /* no interpreter to leave, no signals */

static fan_leaf_claim claim;
static pthread_barrier_t there, over;

static void *has_it(void *unused)
{
    (void)unused;
    CHECK_OK(fan_leaf_claim_begin(&claim, &nobody, NULL));
    pthread_barrier_wait(&there);
    pthread_barrier_wait(&over);
    fan_leaf_claim_end(&claim);
    return NULL;
}

static void *has_its_lock(void *unused)
{
    (void)unused;
    fan_mutex_lock(&claim.lock);
    pthread_barrier_wait(&there);
    pthread_barrier_wait(&over);
    fan_mutex_unlock(&claim.lock);
    return NULL;
}

static void *wants_it(void *unused)
{
    (void)unused;
    CHECK_OK(fan_leaf_claim_begin(&claim, &nobody, NULL));
    fan_leaf_claim_end(&claim);
    return NULL;
}

static bool free_for_this_thread(void)
{
    bool is = fan_leaf_claim_begin(&claim, &nobody, NULL) == FAN_OK;
    if (is)
        fan_leaf_claim_end(&claim);
    return is;
}

static bool goes_and_comes(void)
{
    bool is = free_for_this_thread();
    fan_leaf_claim_fini(&claim); /* waits for whoever the condition knows of */
    return is;
}

static bool refuses_its_own(void)
{
    fan_error err;
    bool refused = fan_leaf_claim_begin(&claim, &nobody, &err) == FAN_ERR_STATE;
    fan_leaf_claim_end(&claim);
    return refused && goes_and_comes();
}

/* in_child: what holds in a forked child; one that hangs is ended by a signal. */
static void in_child(bool (*holds)(void))
{
    int status = 1;
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(holds() ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* beside: forks while another thread is at `work`. */
static void beside(void *(*work)(void *unused), bool (*holds)(void))
{
    pthread_t other;
    CHECK_OK(fan_leaf_claim_init(&claim, NULL));
    CHECK(pthread_create(&other, NULL, work, NULL) == 0);
    pthread_barrier_wait(&there);
    in_child(holds);
    pthread_barrier_wait(&over);
    pthread_join(other, NULL);
    CHECK(free_for_this_thread()); /* here, too, once he has let it go */
    fan_leaf_claim_fini(&claim);
}

static void a_thread_that_has_it_is_refused(void)
{
    fan_error err;
    CHECK_OK(fan_leaf_claim_init(&claim, NULL));
    CHECK_OK(fan_leaf_claim_begin(&claim, &nobody, &err));
    CHECK_INT(fan_leaf_claim_begin(&claim, &nobody, &err), FAN_ERR_STATE);
    CHECK_HAS(err.text, "from within its own accumulation");
    fan_leaf_claim_end(&claim);
    CHECK(free_for_this_thread());
    fan_leaf_claim_fini(&claim);
}

static void a_child_has_what_its_own_thread_had(void)
{
    CHECK_OK(fan_leaf_claim_init(&claim, NULL));
    CHECK_OK(fan_leaf_claim_begin(&claim, &nobody, NULL));
    in_child(refuses_its_own);
    fan_leaf_claim_end(&claim);
    CHECK(free_for_this_thread());
    fan_leaf_claim_fini(&claim);
}

static void a_child_knows_nothing_of_those_who_waited(void)
{
    pthread_t other;
    CHECK_OK(fan_leaf_claim_init(&claim, NULL));
    CHECK_OK(fan_leaf_claim_begin(&claim, &nobody, NULL));
    CHECK(pthread_create(&other, NULL, wants_it, NULL) == 0);
    for (int i = 0; i < 20; i++)
        in_child(refuses_its_own); /* he waits by then, or will */
    fan_leaf_claim_end(&claim);
    pthread_join(other, NULL);
    CHECK(free_for_this_thread());
    fan_leaf_claim_fini(&claim);
}

int main(void)
{
    fan_leaf_claim none = {.process = 0};
    pthread_barrier_init(&there, NULL, 2);
    pthread_barrier_init(&over, NULL, 2);
    fan_leaf_claim_fini(&none); /* a zeroed one is none */
    (void)fan_process();        /* forks are counted from now on */
    a_thread_that_has_it_is_refused();
    a_child_has_what_its_own_thread_had();
    beside(has_it, goes_and_comes);
    beside(has_its_lock, goes_and_comes);
    a_child_knows_nothing_of_those_who_waited();
    return check_done();
}
