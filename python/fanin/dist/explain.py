"""How a bucket is summed over ranks, in sentences with the numbers of rules (`Reducer.explain`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

from fanin._words import counted, size

from . import sparse
from .group import Group, Header
from .layout import BLOCK, Layout, Segment, accumulation, is_inexact
from .options import Options
from .sums import chain_of, levels_for, order_of
from .wire import returned_codec, sent_codec, shard_sizes

__tracebackhide__ = True  # no frames of ours in reports of pytest

SHOWN = 8  #: names, keys or ranks in a list


def listed(words: Iterable[str]) -> str:
    """The first words, and how many more there are."""
    every = list(words)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def explain(
    where: str, layout: Layout, options: Options, headers: Sequence[Header] | None, group: Group, only: int | None
) -> str:
    """Sentences about a bucket, or about leaf `only` of it; `headers`: of its last sum."""
    names = listed(leaf.name for leaf in layout.leaves)
    total = sum(s.size * s.itemsize for s in layout.segments)
    lines = [f"{where}: {names}: {counted(sum(s.size for s in layout.segments), 'element')}, {size(total)}."]
    for i in sparse.chosen(group, layout, headers, options) if headers else ():
        leaf = layout.leaves[i]
        if only in (None, i):
            lines.append(
                f"Rows of {leaf.name} travel instead of the whole: at most {sparse.at_most(leaf, headers or (), i)} of"
                f" {leaf.shape[0]}, and their numbers; the bytes below are those of the whole (N13)."
            )
    for i, segment in enumerate(layout.segments):
        places = [p for p in segment.places if only in (None, p.leaf)]
        if places:
            low, high = (places[0].start, places[0].stop) if only is not None else (0, segment.size)
            begin = segment.dtype if only is None else f"{layout.leaves[only].name}, {segment.dtype}"
            parts = []
            for r, (a, b) in enumerate(itertools.pairwise(segment.bounds)):
                a, b = max(a, low) - low, min(b, high) - low
                if a < b:
                    parts.append(f"rank {r} owns elements {a} to {b - 1}")
            lines.append(f"{begin}: {listed(parts) or 'no elements'} (N1).")
            lines += terms(i, segment, options, headers, group)
    if headers and only is not None:
        without = [str(r) for r, h in enumerate(headers) if not int(h["has"], 16) >> only & 1]
        if without:
            lines.append(f"No term of {layout.leaves[only].name} on rank {listed(without)} (N7).")
    if headers is None:
        lines.append("No sum of it was made yet: which ranks have terms is not known.")
    lines += weights(options, headers)
    if options.scale is not None:
        lines.append(f"The owner multiplies the sum by {options.scale} before it rounds (N5).")
    rank = group.rank
    own = size(sum(shard_sizes(s, returned_codec(s))[rank] for s in layout.segments))
    dtypes = listed(s.wire_out or s.dtype for s in layout.segments)
    if options.into == "shard":
        lines.append(f'into="shard": each owner keeps its part; this rank {own} (N6).')
    elif options.into == "all":
        way = "all ranks"
        if any(len(levels_for(group, s, options, headers)) > 1 for s in layout.segments):
            way = "a rank of every node, and these to all ranks of their nodes"
        lines.append(f"Each owner sends its part of the sum to {way}, as {dtypes}; this rank {own} to each (N6).")
    else:
        lines.append(f"Each owner sends its part of the sum to rank {options.into}, as {dtypes} (N6).")
    return "\n".join(lines)


def of_owners(owners: Iterable[int], sizes: Sequence[int]) -> int:
    """The sum of some owners' sizes."""
    return sum(sizes[owner] for owner in owners)


def weights(options: Options, headers: Sequence[Header] | None) -> list[str]:
    """What multiplies terms, and divides their sum."""
    found = [(r, h["weigh"]) for r, h in enumerate(headers or ()) if "weigh" in h]
    lines = []
    given = [f"{w} of rank {r}" for r, one in found for w in one["terms"] or () if w is not None]
    if given:
        lines.append(f"Terms are multiplied by their weights: {listed(given)} (N10).")
    if options.mean:
        total = sum((Fraction(one["sum"]) for _, one in found), Fraction(0))
        known = f", {float(total):.12g}" if headers else ""
        lines.append(f"The owner divides the sum by that of the weights of all ranks{known}, before it rounds (N10).")
    return lines


def terms(i: int, segment: Segment, options: Options, headers: Sequence[Header] | None, group: Group) -> list[str]:
    """Whose terms are summed in which order, and what this rank sends."""
    counts = [h["terms"] for h in headers] if headers else []
    order = order_of(options, counts) if headers or options.order else None
    if order is None:
        return ['order=None: "key" (N2) if no rank has more than one contribution, else "rank" (N4).']
    lines = []
    if counts:
        lines.append(f"Terms: {listed(f'{n} of rank {r}' for r, n in enumerate(counts))}.")
    rank, levels = group.rank, levels_for(group, segment, options, headers)
    codec = sent_codec(segment)
    if codec is not None:
        rounded = "A rank's fold is" if order == "rank" else "Contributions are"
        scaled = "" if codec.blocks is None else f", with a power of two for each {BLOCK} elements of a leaf"
        lines.append(f"{rounded} rounded to {codec.dtype}{scaled} (N11).")
    near = zip(levels[0].team, levels[0].shards, strict=True)
    away = [owner for r, owners in near if r != rank for owner in owners]
    mine = counts[rank] if counts else 0
    if order == "exact" and is_inexact(segment.dtype):
        to = "owners"
        if len(levels) > 1:
            to = "the ranks of its node"
            lines.append(
                "Each rank adds its terms exactly, then the ranks of a node add these sums; the owner adds the sums of"
                f" {counted(len(levels[1].team), 'node')}, and rounds once (N3)."
            )
        else:
            lines.append("Each rank adds its terms exactly; the owner adds these sums, and rounds once (N3).")
        if headers and str(i) in headers[rank]["sizes"]:
            n = sum(headers[rank]["sizes"][str(i)])
            elements = of_owners(away, segment.counts("uint8"))
            each = f", {n / elements:.3g} bytes an element" if elements else ""
            lines.append(f"This rank sent exact sums to {to}, packed: {size(n)}{each}.")
        elif headers:
            wire = segment.wire or segment.dtype
            lines.append(f"This rank sent {wire} to {to}: {size(mine * of_owners(away, shard_sizes(segment, codec)))}.")
        if len(levels) > 1 and any(counts[r] for r in levels[0].team if headers):
            others = [str(r) for r in levels[1].team if r != rank]
            lines.append(f"It sent sums of its node to rank {listed(others)}, packed.")
        return lines
    wide = accumulation(segment.dtype)
    if order == "key":
        if headers:
            every = [(k, r) for r, h in enumerate(headers) for k in h["keys"]]
            if any(k is None for k, _ in every):
                every = [(n, r) for n, (_, r) in enumerate(every)]
            keys = listed(f"key {k} of rank {r}" for k, r in sorted(every))
            lines.append(f"The owner folds from the left, in {wide}: {keys} (N2).")
        wire = segment.dtype
    else:
        lines.append(f"Each rank folds its terms in {wide}; the owner folds the ranks' sums in their order (N4).")
        wire = wide if not counts or max(counts) > 1 else segment.dtype  # terms that need no fold travel as they are
        mine = min(mine, 1)
    chain = chain_of(group, options, headers) if headers and len(levels) > 1 and is_inexact(segment.dtype) else None
    if chain is not None:
        nodes = listed(map(str, chain))
        lines.append(f"The fold runs through the nodes {nodes}, in {wide}; the last one sends owners their sums (N12).")
    if headers:
        n = mine * of_owners(away, shard_sizes(segment, codec, wire))
        to = "owners" if len(levels) == 1 else "the ranks of its node"
        lines.append(f"This rank sent {segment.wire or wire} to {to}: {size(n)}.")
    return lines
