#include "array/stretch.h"

#include <string.h>

size_t fan__stretch_run_end(const fan_stretch *s, size_t n, size_t at)
{
    do
        at++;
    while (at < n && s[at - 1].from <= s[at].from);
    return at < n ? at : n;
}

void fan__stretch_merge(fan_stretch *s, size_t n, fan_stretch *scratch)
{
    while (fan__stretch_run_end(s, n, 0) < n) {
        for (size_t at = 0, end; at < n; at = end) {
            size_t a = at, mid = fan__stretch_run_end(s, n, at), b = mid;
            end = mid < n ? fan__stretch_run_end(s, n, mid) : n;
            for (size_t to = at; to < end; to++)
                scratch[to] = b == end || (a < mid && s[a].from <= s[b].from) ? s[a++] : s[b++];
        }
        memcpy(s, scratch, n * sizeof *s);
    }
}

/* The stretches that overlap s[i] follow it, so the search for their end starts there. */
uint64_t fan__stretch_meetings(const fan_stretch *s, size_t n)
{
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        size_t low = i + 1, high = low, step = 1;
        while (high < n && s[high].from <= s[i].to) {
            low = high + 1;
            high += step;
            step *= 2;
        }
        high = high < n ? high : n;
        while (low < high) {
            size_t mid = low + (high - low) / 2;
            if (s[mid].from <= s[i].to)
                low = mid + 1;
            else
                high = mid;
        }
        count += low - i - 1;
    }
    return count;
}
