/* The hooks of mutexes and conditions, watched from a scheduler of one page: threads take turns,
 * and only the one whose turn it is acts. */
#include "base/thread.h"

#include "check.h"

static char story[256];

static void note(char what)
{
    size_t n = strlen(story);
    if (n + 1 < sizeof story) {
        story[n] = what;
        story[n + 1] = '\0';
    }
}

static void on_yield(void *ctx)
{
    (void)ctx;
    note('y');
}

static bool on_wait(void *ctx, uint64_t id)
{
    note('w');
    fan_mutex *m = *(fan_mutex **)ctx;
    CHECK(id > 0);
    if (m) { /* "another thread" lets the mutex go */
        *(fan_mutex **)ctx = NULL;
        pthread_mutex_unlock(&m->m);
    }
    return true;
}

static void on_locked(void *ctx, uint64_t id)
{
    (void)ctx;
    (void)id;
    note('L');
}

static void on_unlocking(void *ctx, uint64_t id)
{
    (void)ctx;
    (void)id;
    note('U');
}

static void hooks_see_each_step_in_order(void)
{
    fan_mutex m, other;
    fan_cond c;
    fan_mutex *held_elsewhere = NULL;
    const fan_thread_hooks hooks = {.yield = on_yield,
                                    .wait = on_wait,
                                    .locked = on_locked,
                                    .unlocking = on_unlocking,
                                    .ctx = &held_elsewhere};
    CHECK_INT(fan_mutex_init(&m), 0);
    CHECK_INT(fan_mutex_init(&other), 0);
    CHECK(m.id != other.id);
    CHECK_INT(fan_cond_init(&c), 0);
    fan_mutex_lock(&m);
    fan_mutex_unlock(&m);
    fan_yield();
    CHECK_STR(story, "");
    CHECK(fan_thread_get_hooks() == NULL);
    fan_thread_set_hooks(&hooks);
    CHECK(fan_thread_get_hooks() == &hooks);

    fan_mutex_lock(&m);
    CHECK_STR(story, "yL");
    fan_mutex_unlock(&m);
    CHECK_STR(story, "yLUy");
    fan_yield();
    CHECK_STR(story, "yLUyy");

    /* a mutex held by another is waited for through the scheduler, never inside the system */
    story[0] = '\0';
    pthread_mutex_lock(&m.m);
    held_elsewhere = &m;
    fan_mutex_lock(&m);
    CHECK_STR(story, "ywL");

    /* a cooperative wait lets the mutex go, asks, and takes it again */
    story[0] = '\0';
    fan_cond_wait(&c, &m);
    CHECK_STR(story, "UwL");
    fan_mutex_unlock(&m);

    /* any hook may be missing */
    const fan_thread_hooks none = {NULL};
    fan_thread_set_hooks(&none);
    fan_mutex_lock(&m);
    fan_mutex_unlock(&m);
    fan_yield();
    fan_thread_set_hooks(NULL);
    fan_cond_fini(&c);
    fan_mutex_fini(&m);
    fan_mutex_fini(&other);
}

/* Two threads hand a ball to and fro. `declines`: with hooks whose wait sends them to sleep as
 * usual. */
typedef struct game {
    fan_mutex m;
    fan_cond c;
    int ball, rounds;
    bool declines;
    uint64_t ids[2];
} game;

typedef struct player {
    game *g;
    int me;
} player;

static bool sleep_instead(void *ctx, uint64_t id)
{
    (void)ctx;
    (void)id;
    return false;
}

static void *play(void *arg)
{
    player *p = arg;
    game *g = p->g;
    const fan_thread_hooks hooks = {.wait = sleep_instead};
    if (g->declines)
        fan_thread_set_hooks(&hooks);
    g->ids[p->me] = fan_thread_id();
    for (int i = 0; i < g->rounds; i++) {
        fan_mutex_lock(&g->m);
        while (g->ball % 2 != p->me)
            fan_cond_wait(&g->c, &g->m);
        g->ball++;
        fan_cond_broadcast(&g->c);
        fan_mutex_unlock(&g->m);
    }
    fan_thread_set_hooks(NULL);
    return NULL;
}

static void no_call_is_lost(bool declines)
{
    game g = {.rounds = 3000, .declines = declines};
    player p[2] = {{&g, 0}, {&g, 1}};
    pthread_t t[2];
    CHECK_INT(fan_mutex_init(&g.m), 0);
    CHECK_INT(fan_cond_init(&g.c), 0);
    for (int i = 0; i < 2; i++)
        CHECK_INT(pthread_create(&t[i], NULL, play, &p[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    CHECK_INT(g.ball, 2 * g.rounds);
    CHECK(g.ids[0] >= 1 && g.ids[1] >= 1 && g.ids[0] != g.ids[1]);
    CHECK(fan_thread_id() == fan_thread_id() && fan_thread_id() != g.ids[0] &&
          fan_thread_id() != g.ids[1]);
    fan_cond_fini(&g.c);
    fan_mutex_fini(&g.m);
}

/* A broadcast that falls between letting the mutex go and going to sleep is not lost. */
typedef struct gap {
    fan_mutex m;
    fan_cond c;
    bool open;
} gap;

static bool broadcast_in_the_gap(void *ctx, uint64_t id)
{
    gap *g = ctx;
    CHECK(id == g->m.id);
    pthread_mutex_lock(&g->m.m);
    g->open = true;
    fan_cond_broadcast(&g->c);
    pthread_mutex_unlock(&g->m.m);
    return false;
}

static void a_call_in_the_gap_is_seen(void)
{
    gap g = {.open = false};
    const fan_thread_hooks hooks = {.wait = broadcast_in_the_gap, .ctx = &g};
    CHECK_INT(fan_mutex_init(&g.m), 0);
    CHECK_INT(fan_cond_init(&g.c), 0);
    fan_thread_set_hooks(&hooks);
    fan_mutex_lock(&g.m);
    while (!g.open)
        fan_cond_wait(&g.c, &g.m); /* would sleep for ever */
    fan_mutex_unlock(&g.m);
    fan_thread_set_hooks(NULL);
    fan_cond_fini(&g.c);
    fan_mutex_fini(&g.m);
}

int main(void)
{
    hooks_see_each_step_in_order();
    a_call_in_the_gap_is_seen();
    no_call_is_lost(false);
    no_call_is_lost(true);
    return check_done();
}
