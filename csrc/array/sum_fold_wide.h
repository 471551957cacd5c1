/* sum_fold_wide: the additions of sum_fold.h, which includes it once for each WIDTH of vectors. No
 * guard. FOLDS is defined: with the fold itself. */
#define SUMS AT(number)

ALWAYS SUMS AT(term)(const char *p, const WAY *way, size_t k)
{
    SUMS x = AT(in)(p);
    if (way->weights)
        x = AT(weigh)(x, SUM_ONE(in)(way->weights + k * sizeof(SUM_MEMORY)));
    return x;
}

/* sums: sums some vectors of numbers from number i on. */
ALWAYS void AT(sums)(SUMS *sum, size_t vectors, fan_sources from, size_t i, const WAY *way)
{
    const size_t lanes = sizeof *sum / sizeof(NUMBER);
    const size_t bytes = lanes * sizeof(MEMORY);
    const size_t first = !way->start;
    const char *p = way->start;
    for (size_t v = 0; v < vectors; v++) {
        if (first)
            sum[v] = AT(term)(from.at[0] + (i + v * lanes) * sizeof(MEMORY), way, 0);
        else
            sum[v] = SUM_AT(in)(p + (i + v * lanes) * sizeof(SUM_MEMORY));
    }
    if (way->ahead && first)
        fetch_ahead(from.at[0] + i * sizeof(MEMORY), vectors * bytes);
    for (size_t k = first; k < from.n; k++) {
        p = from.at[k] + i * sizeof(MEMORY);
        if (way->ahead)
            fetch_ahead(p, vectors * bytes);
        for (size_t v = 0; v < vectors; v++)
            sum[v] = AT(plus)(sum[v], AT(term)(p + v * bytes, way, k));
    }
    for (size_t v = 0; v < vectors; v++) {
        if (way->divided)
            sum[v] = AT(over)(sum[v], way->divisor);
        if (way->scaled)
            sum[v] = AT(times)(sum[v], way->factor);
    }
}

ALWAYS void AT(store)(char *dst, size_t i, SUMS sum, bool raw, bool stream)
{
    if (raw) {
        SUM_AT(memory) wide = SUM_AT(down)(sum);
        memcpy(dst + i * sizeof(SUM_MEMORY), &wide, sizeof wide);
        return;
    }
    AT(memory) y = AT(down)(sum);
    if (stream)
        flow(dst + i * sizeof(MEMORY), &y, sizeof y);
    else
        memcpy(dst + i * sizeof(MEMORY), &y, sizeof y);
}

#ifdef FOLDS
/* fold: of at least a vector of numbers. */
ALWAYS void AT(fold)(char *dst, fan_sources from, size_t count, WAY way)
{
    const size_t lanes = sizeof(SUMS) / sizeof(NUMBER);
    const size_t step = STEPS * lanes;
    size_t i = 0;
    bool rest = way.stream || count % lanes;
    WAY near = way;
    SUMS last = {0};
    near.ahead = false;
    if (rest)
        AT(sums)(&last, 1, from, count - lanes, &near);
    if (way.stream) { /* whole lines at a time */
        size_t head = (64 - (uintptr_t)dst % 64) % 64 / sizeof(MEMORY);
        WAY each = near;
        i = OF(each)(dst, from, 0, head, &each);
    }
    for (; STEPS == 4 && i + step <= count; i += step) {
        SUMS sum[STEPS];
        AT(sums)(sum, STEPS, from, i, &way);
        for (size_t v = 0; v < STEPS; v++)
            AT(store)(dst, i + v * lanes, sum[v], way.raw, way.stream);
    }
    for (; i + lanes <= count; i += lanes) {
        SUMS sum;
        near.ahead = STEPS == 1 && way.ahead && i % 64 == 0;
        AT(sums)(&sum, 1, from, i, &near);
        AT(store)(dst, i, sum, way.raw, STEPS == 1 && way.stream);
    }
    if (rest)
        AT(store)(dst, count - lanes, last, way.raw, false);
}
#undef FOLDS
#endif
#undef SUMS
#undef WIDTH
