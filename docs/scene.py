"""Draws docs/scene.svg, README's picture, from a trace: two producers, one sum, one consumer, a wait left out.

python docs/scene.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import fanin
from fanin._trace.recording import Trace

LANES = ("stream 1, a producer", "stream 2, a producer", "stream 3, the consumer")
LEFT, SCALE, LANE, BAR, HEAD = (
    10,
    13,
    96,
    30,
    24,
)  # pixels: where lanes begin, of a microsecond, of a lane, of a bar, of its name

# A blue that colour-blind readers see; the wait that was left out is dashed, too. A dark page has its own colours.
STYLE = """
text{font:16px sans-serif;fill:#222}
.page{fill:#fff} .lane{fill:#f3f3f3} .work{fill:#d5d5d5} .sum{fill:#0072b2} .bar{fill:#fff;text-anchor:middle}
.dark{text-anchor:middle} .wait,.out{fill:none;stroke-width:2} .wait{stroke:#0072b2}
.out{stroke:#888;stroke-dasharray:5 4} .head{fill:#0072b2} .faint{fill:#888} text.faint{fill:#666}
@media (prefers-color-scheme:dark){
text,.dark{fill:#eee} .page{fill:#16181d} .lane{fill:#22252c} .work{fill:#4b5059} .sum,.head{fill:#56b4e9}
.bar{fill:#111} .wait{stroke:#56b4e9} .out{stroke:#999} .faint{fill:#999} text.faint{fill:#aaa}}
"""


def record() -> Trace:
    """A node with two inputs on a stream of its own: its first input is a sum, its second one has one producer."""
    with fanin.sim.Machine(devices=1) as machine:
        first, second, consumer = (machine.stream() for _ in range(3))
        a, b, c = (machine.empty((1 << 20,), np.float32) for _ in range(3))
        with fanin.trace() as trace:
            node = fanin.InputBuffer(2, stream=consumer)
            machine.launch(first, lambda out: out.fill(1), writes=[a], name="mul")
            node.add(1, a, stream=first)
            machine.launch(first, lambda out: out.fill(1), writes=[b], name="exp")
            node.add(0, b, stream=first)
            machine.launch(second, lambda out: out.fill(1), writes=[c], name="sin")
            node.add(0, c, stream=second)
            inputs = node.take()
            machine.launch(consumer, lambda x, y: None, reads=list(inputs), name="step")
    return trace


def draw(trace: Trace) -> str:
    """The trace as an SVG: a lane for each stream, work as bars, waits as arrows."""
    lines = trace.lines
    lane = {stream: i for i, stream in enumerate(sorted({line.stream for line in lines if line.kind == "kernel"}))}
    out: list[str] = []
    waits: list[tuple[str, int, str, float, int]] = []  # (class, lane, its work, its end, lane that waits)
    end: dict[int, tuple[str, float]] = {}  # the newest work of a stream
    event: dict[int, tuple[int, str, float]] = {}

    def x(us: float) -> float:
        return LEFT + SCALE * us

    def y(i: int) -> float:
        return 12 + LANE * i

    for line in lines:
        i = lane[line.stream]
        if line.kind == "record":
            event[line.event] = (i, *end[line.stream])
        elif line.kind in ("wait", "elided"):
            waits.append(("wait" if line.kind == "wait" else "out", *event[line.event], i))
        elif line.kind == "kernel":
            name, top = line.label.split()[0], middle_of(y(i)) - BAR / 2
            middle = (x(line.start_us) + x(line.end_us)) / 2
            for n, (how, source, work, at, target) in enumerate([w for w in waits if w[-1] == i]):
                out += arrow(how, x(at), y(source), x(line.start_us) + 8 + 14 * n, y(target), work)
            waits = [w for w in waits if w[-1] != i]
            box = f'x="{x(line.start_us):.0f}" y="{top:.0f}" width="{SCALE * (line.end_us - line.start_us):.0f}"'
            out.append(f'<rect class="{"sum" if name == "sum" else "work"}" {box} height="{BAR}" rx="4"/>')
            out.append(
                f'<text class="{"bar" if name == "sum" else "dark"}" x="{middle:.0f}" y="{top + 21:.0f}">{name}</text>'
            )
            end[line.stream] = name, line.end_us
    width, height = int(x(max(at for _, at in end.values())) + 70), int(y(len(lane)) + 8)
    lanes = [
        f'<rect class="lane" x="0" y="{y(i) + 2:.0f}" width="{width}" height="{LANE - 4}"/>'
        f'<text x="{LEFT}" y="{y(i) + HEAD - 3:.0f}">{name}</text>'
        for i, name in enumerate(LANES)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    title = "<title>Two producers, one sum, one consumer, and the waits between their streams</title>"
    return "\n".join(
        [
            head,
            title,
            f"<style>{STYLE}</style>",
            '<rect class="page" width="100%" height="100%"/>',
            *lanes,
            *out,
            "</svg>\n",
        ]
    )


def middle_of(lane: float) -> float:
    """The middle of the bars of a lane, below its name."""
    return lane + HEAD + (LANE - HEAD) / 2


def arrow(how: str, x: float, y: float, to_x: float, to_y: float, work: str) -> list[str]:
    """A wait, from the end of some work down to what waits for it, and its name; one left out runs below the bars."""
    middle, bottom = middle_of(y), middle_of(to_y) - BAR / 2
    if how == "wait":
        path, words = f"M{x:.0f} {middle:.0f}H{to_x:.0f}V{bottom - 7:.0f}", f"waits for {work}"
        place, faint = f'class="name" x="{to_x + 9:.0f}" y="{middle + 5:.0f}"', ""
    else:
        low = middle + BAR / 2 + 8
        path = f"M{x - 6:.0f} {middle + BAR / 2:.0f}V{low:.0f}H{to_x:.0f}V{bottom - 7:.0f}"
        words, place, faint = f"wait for {work}, left out", f'class="faint" x="{to_x + 9:.0f}" y="{low:.0f}"', " faint"
    return [
        f'<path class="{how}" d="{path}"/>',
        f'<path class="head{faint}" d="M{to_x - 5:.0f} {bottom - 8:.0f}h10l-5 8z"/>',
        f"<text {place}>{words}</text>",
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("scene.svg"))
    target.write_text(draw(record()), encoding="utf-8")
