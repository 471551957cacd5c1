"""What graph trees say of themselves: outcomes of calls, figures, a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import GraphTree


@dataclass(frozen=True)
class Outcome:
    """What a call of a tree's function did, and why.

    `did` is "warmed", "recorded", "replayed" or "raw" (run as it is); `reason` a sentence, None for a replay; `node`
    the number of the recording, if there is one; `rules` those of docs/graph-trees.md that decided.
    """

    did: str
    reason: str | None
    node: int | None
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphStats:
    """Figures of a tree: its recordings, the bytes of its memory (in all, in use, the most ever used), its calls, and
    the bytes that the device's driver took for the recordings, beside the tree's memory."""

    nodes: int
    bytes: int
    in_use: int
    high_water: int
    warmed: int
    recorded: int
    replayed: int
    raw: int
    restored: int
    driver_bytes: int = 0


def plot(tree: GraphTree, path: str | os.PathLike[str] | None = None) -> object:
    """A picture of a tree: a box for each recording, below the one behind which it was made, with the bytes of its
    outputs and how far in the tree's memory it reaches; those on the path are filled."""
    from matplotlib.figure import Figure

    recordings = tree._recordings()
    depth = {-1: 0}
    for node, parent, *_ in recordings:
        depth[node] = depth[parent] + 1
    most = max(1, max((reaches for *_, reaches, _, _ in recordings), default=1))
    rows: dict[int, float] = {}
    figure = Figure(figsize=(8, 1 + 0.6 * len(recordings)), layout="constrained")
    axes = figure.add_subplot()
    for row, (node, parent, function, owns, reaches, replays, current) in enumerate(recordings):
        rows[node] = -row
        axes.barh(-row, reaches / most, left=depth[node], height=0.6, color="C0" if current else "0.85")
        text = f"{node}: {function}, owns {owns} B of {reaches} B, replayed {replays} times"
        axes.text(depth[node] + 0.02, -row, text, va="center", fontsize=8)
        if parent >= 0:
            axes.plot([depth[parent], depth[parent], depth[node]], [rows[parent], -row, -row], color="0.5", zorder=0)
    stats: GraphStats = tree.stats
    axes.set_title(f"{stats.nodes} recordings, {stats.replayed} replays, {stats.high_water} of {stats.bytes} B", size=9)
    axes.set_xlabel(f"depth of the path; a bar of length 1 is {most} B of the tree's memory")
    axes.set_yticks([])
    if path is not None:
        figure.savefig(os.fspath(path))
    return figure
