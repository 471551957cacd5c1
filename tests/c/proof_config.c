#include "proof_config.h"

#include <stdio.h>
#include <string.h>

static int streams(const config *c)
{
    return c->D * c->S;
}

static int ways(int D, int S)
{
    return S + (D - 1) * S * S;
}

uint64_t config_raw(int K, int D, int S)
{
    uint64_t n = (uint64_t)D * (uint64_t)(D * S) * (uint64_t)S * 2u * (uint64_t)(1 + 2 * S + D * S);
    while (K-- > 0)
        n *= (uint64_t)ways(D, S);
    return n;
}

static int draw(uint64_t *index, int n)
{
    int digit = (int)(*index % (uint64_t)n);
    *index /= (uint64_t)n;
    return digit;
}

bool config_part(uint64_t index, uint64_t from, uint64_t step)
{
    return step < 2 || (index * UINT64_C(0x9E3779B97F4A7C15) >> 32) % step == from;
}

void config_shape(config *c, uint64_t index)
{
    c->d = draw(&index, c->D);
    for (int i = 0; i < MAX_K; i++) {
        c->p[i] = c->q[i] = -1;
        if (i >= c->K)
            continue;
        int way = draw(&index, ways(c->D, c->S));
        if (way < c->S) {
            c->p[i] = c->q[i] = c->d * c->S + way;
            continue;
        }
        way -= c->S;
        int other = way / c->S; /* among the streams that are not on d */
        c->p[i] = other < c->d * c->S ? other : other + c->S;
        c->q[i] = c->d * c->S + way % c->S;
    }
    c->c = draw(&index, streams(c));
    c->e = draw(&index, c->S);
    c->donate = draw(&index, 2) == 1;
    int kind = draw(&index, 1 + 2 * c->S + streams(c));
    if (kind == 0) {
        c->kin = KIN_NONE;
        c->x = -1;
    } else if (kind <= 2 * c->S) {
        kind--;
        c->kin = kind < c->S ? KIN_IMPORT : KIN_IMPORT_READ;
        c->x = c->d * c->S + kind % c->S;
    } else {
        c->kin = KIN_ALIAS;
        c->x = kind - 1 - 2 * c->S;
    }
}

void config_plain(config *c, int K, int D, int S)
{
    memset(c, 0, sizeof *c);
    c->K = K;
    c->D = D;
    c->S = S;
    c->x = c->taker = c->out = c->snapshot = -1;
    config_shape(c, 0);
}

/* ---- names ---- */

/* All ways to rename the streams of a D x S machine. */
typedef struct renaming {
    int device[MAX_D], stream[MAX_STREAMS];
} renaming;

#define MAX_RENAMINGS 1296

static const renaming *renamings(int D, int S, int *n)
{
    static renaming kept[MAX_D + 1][MAX_S + 1][MAX_RENAMINGS];
    static int counts[MAX_D + 1][MAX_S + 1];
    if (!counts[D][S]) {
        static const int perm[6][3] = {{0, 1, 2}, {1, 0, 2}, {0, 2, 1},
                                       {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
        static const int many[4] = {1, 1, 2, 6};
        int total = many[D];
        for (int i = 0; i < D; i++)
            total *= many[S];
        for (int i = 0; i < total; i++) {
            renaming *r = &kept[D][S][i];
            int left = i;
            const int *devices = perm[left % many[D]];
            left /= many[D];
            for (int d = 0; d < D; d++) {
                const int *within = perm[left % many[S]];
                left /= many[S];
                r->device[d] = devices[d];
                for (int s = 0; s < S; s++)
                    r->stream[d * S + s] = devices[d] * S + within[s];
            }
        }
        counts[D][S] = total;
    }
    *n = counts[D][S];
    return kept[D][S];
}

static uint64_t push(uint64_t code, int digit, int base)
{
    return code * (uint64_t)base + (uint64_t)digit;
}

/* code: the configuration's shape and the streams among its options as a number, after a renaming
 * and with its producers in another order. */
static uint64_t code(const config *c, const renaming *r, const int *order)
{
    int n = streams(c) + 1;
    uint64_t k = (uint64_t)r->device[c->d];
    for (int i = 0; i < c->K; i++) {
        k = push(k, r->stream[c->p[order[i]]], n);
        k = push(k, r->stream[c->q[order[i]]], n);
    }
    k = push(k, r->stream[c->c], n);
    k = push(k, r->stream[config_caller(c)], n);
    const int maybe[] = {c->x, c->taker, c->out, c->snapshot}; /* -1: there is none */
    for (int i = 0; i < 4; i++)
        k = push(k, maybe[i] < 0 ? n - 1 : r->stream[maybe[i]], n);
    return k * 8 + (uint64_t)c->kin * 2 + c->donate;
}

static bool next_order(int *order, int from, int n)
{
    /* The next permutation of order[from..n) by size. */
    int i = n - 2;
    while (i >= from && order[i] > order[i + 1])
        i--;
    if (i < from)
        return false;
    int j = n - 1;
    while (order[j] < order[i])
        j--;
    int t = order[i];
    order[i] = order[j];
    order[j] = t;
    for (int a = i + 1, b = n - 1; a < b; a++, b--) {
        t = order[a];
        order[a] = order[b];
        order[b] = t;
    }
    return true;
}

static uint64_t least(const config *c, bool stop_below, uint64_t own)
{
    int n;
    const renaming *all = renamings(c->D, c->S, &n);
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < n; i++) {
        int order[MAX_K] = {0, 1, 2, 3};
        /* the first producer is like the others unless its gradient has kin */
        int from = c->keyed ? c->K : c->kin != KIN_NONE;
        do {
            uint64_t k = code(c, &all[i], order);
            if (k < best)
                best = k;
            if (stop_below && best < own)
                return best;
        } while (next_order(order, from, c->K));
    }
    return best;
}

bool config_first(const config *c)
{
    int n;
    static const int as_is[MAX_K] = {0, 1, 2, 3};
    uint64_t own = code(c, &renamings(c->D, c->S, &n)[0], as_is);
    return least(c, true, own) == own;
}

uint64_t config_least(const config *c)
{
    return least(c, false, 0);
}

/* ---- text ---- */

static const char *const kin_words[] = {"none", "import", "import-read", "alias"};
static const char *const mode_words[] = {"plain", "copy", "scale", "out", "clear", "unread"};

char *config_text(const config *c, char *buf, size_t size)
{
    size_t n = (size_t)snprintf(buf, size, "K%d D%d S%d d%d", c->K, c->D, c->S, c->d);
    for (int i = 0; i < c->K && n < size; i++)
        n += (size_t)snprintf(buf + n, size - n, " p%d/%d", c->p[i], c->q[i]);
    if (n < size) {
        snprintf(
            buf + n, size - n,
            " c%d e%d %s x%d donate%d budget%d keyed%d let%d %s undeclared%d sum%d t%d o%d n%d",
            c->c, c->e, kin_words[c->kin], c->x, c->donate, c->budget, c->keyed, c->let_go,
            mode_words[c->mode], c->undeclared, c->sum_to_caller, c->taker, c->out, c->snapshot);
    }
    return buf;
}

bool config_parse(config *c, const char *text)
{
    int donate, keyed, let, undeclared, sum;
    int at = 0;
    int more = 0;
    char kin_word[16], mode_word[16];
    memset(c, 0, sizeof *c);
    if (sscanf(text, "K%d D%d S%d d%d%n", &c->K, &c->D, &c->S, &c->d, &at) != 4)
        return false;
    if (c->K > MAX_K || c->D > MAX_D || c->S > MAX_S)
        return false;
    for (int i = 0; i < c->K; i++, at += more) {
        if (sscanf(text + at, " p%d/%d%n", &c->p[i], &c->q[i], &more) != 2)
            return false;
    }
    if (sscanf(
            text + at,
            " c%d e%d %15s x%d donate%d budget%d keyed%d let%d %15s undeclared%d sum%d t%d o%d n%d",
            &c->c, &c->e, kin_word, &c->x, &donate, &c->budget, &keyed, &let, mode_word,
            &undeclared, &sum, &c->taker, &c->out, &c->snapshot) != 14)
        return false;
    c->donate = donate;
    c->keyed = keyed;
    c->let_go = (let_go)let;
    c->undeclared = undeclared;
    c->sum_to_caller = sum;
    for (int i = 0; i < 4; i++) {
        if (strcmp(kin_words[i], kin_word) == 0)
            c->kin = (kin)i;
    }
    for (int i = 0; i < MODES; i++) {
        if (strcmp(mode_words[i], mode_word) == 0)
            c->mode = (mode)i;
    }
    return true;
}

/* ---- options ---- */

/* budget_and_keys: the n-th combination of both, with nothing else; what is left of n counts the
 * rest. */
static unsigned budget_and_keys(config *c, richness how, unsigned n)
{
    static const int budgets[3][3] = {{BUDGET_NONE, BUDGET_ALL},
                                      {BUDGET_NONE, BUDGET_ALL},
                                      {BUDGET_NONE, BUDGET_ONE, BUDGET_ALL}};
    unsigned nb = how == OPTIONS_ALL ? 3 : 2;
    c->let_go = LET_GO_ADDED;
    c->mode = MODE_PLAIN;
    c->undeclared = c->sum_to_caller = false;
    c->taker = c->out = c->snapshot = -1;
    c->budget = budgets[how][n % nb];
    n /= nb;
    c->keyed = n % 2 == 1;
    return n / 2;
}

/* Budgets and keys in every combination; of the rest one thing at a time, or, for OPTIONS_FEW,
 * nothing. */
bool config_options(config *c, richness how, unsigned n)
{
    unsigned ns = (unsigned)streams(c);
    n = budget_and_keys(c, how, n);
    if (n == 0)
        return true;
    n--;
    if (how == OPTIONS_FEW)
        return false;
    if (n < 2) {
        c->let_go = (let_go)(LET_GO_LATER + n);
        return true;
    }
    n -= 2;
    if (n == 0)
        return c->sum_to_caller = true;
    n--;
    if (c->kin != KIN_NONE && how != OPTIONS_ALL) {
        if (n > 0)
            return false;
        c->mode = MODE_COPY;
        return true;
    }
    if (n == 0)
        return c->undeclared = true;
    n--;
    if (n < MODE_UNREAD - 1) {
        c->mode = (mode)(MODE_COPY + n);
        return true;
    }
    n -= MODE_UNREAD - 1;
    if (n < ns) { /* another one takes; its memory for the sum, if any, may be another's */
        c->taker = (int)n;
        return true;
    }
    n -= ns;
    if (n < ns) {
        c->taker = (int)n;
        c->mode = MODE_SCALE;
        return true;
    }
    n -= ns;
    if (n < 2 * ns) {
        c->out = (int)(n % ns);
        c->mode = n < ns ? MODE_OUT : MODE_UNREAD;
        return true;
    }
    n -= 2 * ns;
    if (n < ns) {
        c->snapshot = (int)n;
        return true;
    }
    return false;
}
