/* Who has a leaf: one thread at a time, and, after a fork, whoever is still there; who would wait
 * in a circle. */
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

/* in_child: what holds in a forked child. */
static void in_child(bool (*holds)(void))
{
    int status = 1;
    pid_t child = fork();
    if (child == 0) {
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

/* ---- circles ---- */

static pthread_mutex_t interpreter = PTHREAD_MUTEX_INITIALIZER;

static void *leave_interpreter(void)
{
    pthread_mutex_unlock(&interpreter);
    return NULL;
}

static void enter_interpreter(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&interpreter);
}

static const fan_frontend one_at_a_time = {.allow_threads_begin = leave_interpreter,
                                           .allow_threads_end = enter_interpreter};

#define RING 5
static fan_leaf_claim ring[RING];
static unsigned refused;

/* of_ring: has one leaf and then wants the next; whoever is refused lets go of his. */
static void *of_ring(void *number)
{
    size_t i = (size_t)(uintptr_t)number;
    fan_error err;
    fan_leaf_claim *next = &ring[(i + 1) % RING];
    enter_interpreter(NULL);
    CHECK_OK(fan_leaf_claim_begin(&ring[i], &one_at_a_time, &err));
    leave_interpreter();
    pthread_barrier_wait(&there);
    enter_interpreter(NULL);
    if (fan_leaf_claim_begin(next, &one_at_a_time, &err) == FAN_OK) {
        fan_leaf_claim_end(next);
    } else {
        CHECK_HAS(
            err.text,
            "from within the accumulation of another leaf, for which that of another leaf waits");
        CHECK_HAS(err.text, "none of them would end");
        refused++;
    }
    fan_leaf_claim_end(&ring[i]);
    leave_interpreter();
    return NULL;
}

static void of_a_ring_one_is_refused_and_the_others_go_on(void)
{
    pthread_t all[RING];
    pthread_barrier_destroy(&there);
    pthread_barrier_init(&there, NULL, RING);
    for (size_t i = 0; i < RING; i++)
        CHECK_OK(fan_leaf_claim_init(&ring[i], NULL));
    for (size_t i = 0; i < RING; i++)
        CHECK(pthread_create(&all[i], NULL, of_ring, (void *)(uintptr_t)i) == 0);
    for (size_t i = 0; i < RING; i++)
        pthread_join(all[i], NULL);
    CHECK_INT(refused, 1);
    for (size_t i = 0; i < RING; i++)
        fan_leaf_claim_fini(&ring[i]);
}

/* helps: a thread that runs nodes for the main one, whose claim is older than the pass, or
 * newer. */
static void *helps(void *caller)
{
    fan_error err;
    fan_status status;
    fan_leaf_work_for(caller);
    pthread_barrier_wait(&there);
    enter_interpreter(NULL);
    status = fan_leaf_claim_begin(&claim, &one_at_a_time, &err);
    if (status == FAN_OK) {
        fan_leaf_claim_end(&claim);
    } else {
        CHECK_HAS(err.text, "from within its own accumulation, on another worker");
    }
    leave_interpreter();
    fan_leaf_work_for(NULL);
    return (void *)(uintptr_t)(status == FAN_OK);
}

static void a_helper_is_refused_what_its_caller_had_before_the_pass(bool before)
{
    pthread_t other;
    fan_leaf_caller caller = fan_leaf_caller_here();
    void *went;
    pthread_barrier_destroy(&there);
    pthread_barrier_init(&there, NULL, 2);
    CHECK_OK(fan_leaf_claim_init(&claim, NULL));
    enter_interpreter(NULL);
    CHECK_OK(fan_leaf_claim_begin(&claim, &one_at_a_time, NULL));
    if (before)
        caller = fan_leaf_caller_here();
    leave_interpreter();
    CHECK(pthread_create(&other, NULL, helps, &caller) == 0);
    pthread_barrier_wait(&there);
    if (before) {
        pthread_join(other, &went);
        CHECK(!went);
    }
    enter_interpreter(NULL);
    fan_leaf_claim_end(&claim);
    leave_interpreter();
    if (!before) {
        pthread_join(other, &went);
        CHECK(went != NULL);
    }
    fan_leaf_claim_fini(&claim);
}

int main(void)
{
    fan_leaf_claim none = {.owner_generation = 0};
    pthread_barrier_init(&there, NULL, 2);
    pthread_barrier_init(&over, NULL, 2);
    fan_leaf_claim_fini(&none);  /* a zeroed one is none */
    (void)fan_fork_generation(); /* forks are counted from now on */
    a_thread_that_has_it_is_refused();
    a_child_has_what_its_own_thread_had();
    beside(has_it, goes_and_comes);
    beside(has_its_lock, goes_and_comes);
    a_child_knows_nothing_of_those_who_waited();
    of_a_ring_one_is_refused_and_the_others_go_on();
    a_helper_is_refused_what_its_caller_had_before_the_pass(true);
    a_helper_is_refused_what_its_caller_had_before_the_pass(false);
    return check_done();
}
