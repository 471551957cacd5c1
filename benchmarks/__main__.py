"""`python -m benchmarks`: rows, each beside its peers, as tables, JSON and a picture."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fanin import _files
from fanin._files import write_whole
from fanin.cli.screen import Screen

from . import timing

HELP = """Time sums beside those of NumPy, torch, JAX and others that are installed, in one run.

Variants take turns on a pinned core, so that whatever slows the machine down slows all of them; each is reported by its
minimum and its median, absent peers are marked. Compare ratios within one run, not times between runs.

examples:
  python -m benchmarks --quick
  python -m benchmarks --only small_add --only life
  python -m benchmarks --json bench.json --plot bench.svg"""

#: The files, in the order of the table of targets.
ROWS = (
    "small_add",
    "life",
    "torch_add",
    "torch_accumulate",
    "torch_passes",
    "small_sums",
    "fast_path",
    "engines",
    "large_sum",
    "in_cache",
    "low_precision",
    "keys_and_exact",
    "partial",
    "many_slots",
    "statistics_cost",
    "two_threads",
    "recycling",
    "fresh",
    "passes",
    "c_api",
    "tape",
    "recorded_steps",
    "graph_trees",
    "overlap",
    "analysis",
    "ranks",
    "gpu",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="small arrays and few rounds: seconds instead of a quarter of an hour"
    )
    parser.add_argument(
        "--only",
        metavar="ROW",
        action="append",
        choices=ROWS,
        help=f"this row alone; may be repeated: {', '.join(ROWS)}",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the figures, with machine, versions, date and command"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw bytes per second against the size of the working set (needs matplotlib)",
    )


def run(options: argparse.Namespace) -> int:
    screen = Screen()
    if options.plot and timing.peer("matplotlib") is None:
        print(
            "benchmarks: --plot draws with matplotlib, which is not installed: pip install matplotlib", file=sys.stderr
        )
        return 2
    if options.plot and picture_format(options.plot) not in picture_formats():
        print(
            f"benchmarks: --plot {options.plot}: no picture of this kind: its name ends in one of"
            f" {', '.join(picture_formats())}",
            file=sys.stderr,
        )
        return 2
    for file in filter(None, (options.json, options.plot)):
        _files.claim(file)
    results = []
    for name in ROWS:
        if not options.only or name in options.only:
            for one in row(name, options.quick):
                timing.show(screen, one)
                results.append(one)
            if options.json:
                timing.write(options.json, results)
    summary(screen, results)
    if options.json:
        screen.say(f"written: {options.json}")
    if options.plot:
        draw(options.plot, results)
        screen.say(f"drawn: {options.plot}")
    return 0


def row(name: str, quick: bool) -> Iterator[timing.Result]:
    """The results of benchmarks/NAME.py."""
    for one in importlib.import_module(f"{__package__}.{name}").results(quick):
        yield {"row": name, **one}


def summary(screen: Screen, results: Iterable[timing.Result]) -> None:
    """All targets, and whether they were met."""
    rows = []
    for one in results:
        for t in one["targets"]:
            seen, by_min = (timing.ratio_text(t[k]) if t[k] is not None else "" for k in ("seen", "seen_by_min"))
            word = "absent" if t["met"] is None else "met" if t["met"] else "missed"
            rows.append((f"{one['row']}: {one['title']}: {t['row']}", f"{t['must']} {t['ratio']}", seen, by_min, word))
    if rows:
        screen.table(rows, ("targets", "", "seen", "by min", ""))


# The picture

#: What is drawn, for sums of so many arrays.
TERMS = 8
CURVES = {
    "fanin.add_n(out=)": "fanin",
    "np.add(out=) chain": "NumPy",
    "torch add_ chain": "torch",
    "jax.jit": "jax.jit",
    "read floor": "reading alone",
}


def picture_format(file: Path) -> str:
    return file.suffix.lstrip(".").lower() or "svg"


def picture_formats() -> list[str]:
    """What matplotlib draws."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return sorted(FigureCanvasAgg.get_supported_filetypes())


def points(results: Iterable[timing.Result]) -> dict[str, list[tuple[float, float]]]:
    """For each curve (bytes of the working set, bytes per second), the best of the results that have a number of bytes
    moved.
    """
    best: dict[str, dict[float, float]] = {curve: {} for curve in CURVES.values()}
    for one in results:
        if "bytes" not in one or one["bytes_read"] != TERMS * (one["bytes"] - one["bytes_read"]):
            continue
        for name, curve in CURVES.items():
            if name in one["rows"]:
                moved = one["bytes_read"] if name == "read floor" else one["bytes"]
                rate = moved / (one["rows"][name]["min"] * timing.UNITS[one["unit"]] / 1e9)
                best[curve][one["bytes"]] = max(rate, best[curve].get(one["bytes"], 0.0))
    return {name: sorted(some.items()) for name, some in best.items() if some}


def draw(file: Path, results: Iterable[timing.Result]) -> None:
    """Useful bytes per second (each input read once, the result written once) against the size of the working set."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, some in points(results).items():
        style = "--" if name == "reading alone" else "-"
        axes.plot([x for x, _ in some], [y / 1e9 for _, y in some], style, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 2**20:g} MB" if x >= 2**20 else f"{x / 2**10:g} KB")
    axes.set_xlabel("working set: all inputs and the result")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if str(y)[0] in "25" else "")
    axes.set_ylabel("useful GB/s, the best of all offsets")
    axes.set_title(f"sums of {TERMS} float32 arrays", loc="left", fontsize=11)
    axes.grid(True, which="both", alpha=0.25)
    if axes.get_lines():
        axes.legend(frameon=False)
    write_whole(str(file), lambda out: figure.savefig(out, format=picture_format(file)))


def main(words: Sequence[str] | None = None) -> int:
    """Run the rows; returns the exit status: 0 they ran, 2 a file cannot be written or drawn."""
    description, _, examples = HELP.partition("\n\nexamples:\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments(parser)
    try:
        return run(parser.parse_args(words))
    except OSError as e:
        print(f"benchmarks: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
