"""`fanin demo`: a small network learns handwritten digits on two simulated devices, and each of its gradients is
checked.

1. The network and its streams.
2. One step: forward, backward, update.
3. The comparison with plain NumPy.
4. The run: progress, table, trace and picture.
5. A wait left out.
6. The network on several ranks.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

import fanin
from fanin import _files, dist, tape
from fanin._interop.protocols import NDArray

from . import plain
from .screen import Screen, natural, positive

#: Of every 5 digits one is held out; of the others each step takes so many, in so many micro-batches.
BATCH, MICRO_BATCHES = 128, 4
#: On several ranks: the micro-batches of a step, which are dealt out to them; epochs; points of the loss curve.
PARTS, RANKS_EPOCHS, POINTS = 8, 4, 8
#: How often the one residual block is applied: its weights are tied.
BLOCKS = 2
#: The largest deviation of a float32 gradient from the float64 one, relative to that gradient's largest entry.
TOLERANCE = 1e-4
NEEDED = 0.95
#: The accuracy is required after so many epochs.
EPOCHS = 8
#: On so many steps each gradient is compared.
CHECKS = 8
#: What is written, in the folder that --out names.
TRACE, PICTURE = "fanin-demo.json", "fanin-demo.svg"
#: The machine's clock: slow memory, so that the picture shows work and not the host's queueing.
LAUNCH_US, GBYTES_PER_S = 0.5, 8.0

Batch = tuple[NDArray, NDArray]  # digits and their labels

# ---------------------------------------------------------------- 1. The network and how it is spread


def initial(rng: np.random.Generator) -> dict[str, NDArray]:
    """The parameters at the start. Digits are 8x8 pixels of 17 intensities."""
    shapes = {
        "intensity": (17, 4),  # an embedding: one row for each intensity, with sparse gradients
        "position": (8, 8, 4),
        "conv": (3, 3, 4, 8),
        "block": (3, 3, 8, 8),
        "side": (256, 128),
        "out": (128, 10),
        "bias": (10,),
    }
    scale = {"intensity": 0.1, "position": 0.1, "bias": 0.0}
    start = {
        name: rng.normal(0, scale.get(name, math.prod(shape[:-1]) ** -0.5), shape).astype("f4")
        for name, shape in shapes.items()
    }
    start["intensity"] += np.linspace(-1, 1, 17, dtype="f4")[:, None]  # from black to white
    return start


def on(stream: tape.Stream) -> AbstractContextManager[object]:
    """A stream made current; on the CPU there is none."""
    return nullcontext() if stream is None else fanin.stream(stream)


class Spread:
    """The streams of the work: on each device one for the parameters, one for each of its two micro-batches, one for
    side branches. Without a machine everything runs on the CPU.
    """

    def __init__(self, machine: Machine | None) -> None:
        self.devices = [tape.cpu, tape.cpu] if machine is None else tape.devices(machine)

        def streams() -> list[tape.Stream]:
            return [None, None] if machine is None else [machine.stream(device=i) for i in (0, 1)]

        self.home, self.first, self.second, self.side = (streams() for _ in range(4))
        self.trunks = [self.first, self.second]
        self.caller = [device.current() for device in self.devices]

    def home_of(self, name: str) -> tape.Stream:
        """The stream on which a parameter's gradient is summed: the bias lies on device 1, the others on device 0."""
        if name == "bias":
            return self.home[1]
        return self.caller[0] if name == "position" else self.home[0]

    def names(self) -> dict[tuple[int, int], str]:
        """(device, stream): what it is for."""
        words: dict[str, list[tape.Stream]] = {
            "micro-batch a": self.first,
            "micro-batch b": self.second,
            "side": self.side,
            "parameters": self.home,
            "the caller": self.caller,
        }
        return {(i, s.handle): word for word, streams in words.items() for i, s in enumerate(streams) if s is not None}


class Net:
    """The parameters, and what a step needs of the machine."""

    def __init__(self, start: dict[str, NDArray], spread: Spread, sparse: bool = True) -> None:
        self.spread = spread
        self.embedding = tape.embedding if sparse else tape.gathered
        self.parameters: dict[str, tape.Var] = {}
        self.speed: dict[str, tape.Array] = {}
        for name, value in start.items():
            where = int(name == "bias")
            with on(spread.home_of(name)):
                self.parameters[name] = tape.parameter(value, spread.devices[where], name)
            self.speed[name] = spread.devices[where].put(np.zeros_like(value))
        # Memory on device 1 that the sums for device 0 share, one after the other.
        self.stage = spread.devices[1].put(np.zeros(self.parameters["side"].data.size, "f4"))

    def copies(self) -> list[dict[str, tape.Var]]:
        """The parameters as each device reads them: device 0 pushes copies to device 1."""
        there = dict(self.parameters)
        with on(self.spread.home[0]):
            for name, p in self.parameters.items():
                stage = self.stage[: p.data.size].reshape(p.shape) if name in ("block", "side") else None
                there[name] = p if name in ("bias", "position") else p.to(self.spread.devices[1], stage=stage)
        return [self.parameters, there]

    def forward(self, p: dict[str, tape.Var], digits: NDArray, where: int, turn: int) -> tuple[tape.Var, tape.Var]:
        """(logits, embedded pixels) of a micro-batch: its trunk on a stream of its own, its side branch beside it."""
        device, other = self.spread.devices[where], self.spread.devices[1 - where]
        trunk, side = self.spread.trunks[turn][where], self.spread.side[where]
        with on(self.spread.home_of("position")):
            position = p["position"].to(self.spread.devices[1])  # each has its own; device 0 reads it over the link
        with on(trunk):
            x = self.embedding(p["intensity"], tape.array(digits, device)) + position
        with on(side):
            branch = tape.tanh(x.reshape(len(digits), 256) @ p["side"])
        with on(trunk):
            h = tape.tanh(tape.conv2d(x, p["conv"]))
        for _ in range(BLOCKS):
            # Device 0 is short of memory: what goes around the block waits on device 1, and is fetched back beside the
            # trunk.
            with on(trunk):
                around = h.to(other) if where == 0 else h
                through = tape.tanh(tape.conv2d(h, p["block"]))
            with on(side):
                around = around.to(device, on=device) if where == 0 else around
            with on(trunk):
                h = through + around
        with on(trunk):
            joined = tape.pool(h, 2).reshape(len(digits), 128) + branch
            return joined @ p["out"] + p["bias"], x


# ---------------------------------------------------------------- 2. One step


def losses_of(net: Net, digits: NDArray, labels: NDArray) -> tuple[list[tape.Var], list[tape.Var]]:
    """(losses, embedded pixels) of all micro-batches; the losses sum to the mean over the batch."""
    losses, pixels = [], []
    copies = net.copies()
    parts = zip(np.array_split(digits, MICRO_BATCHES), np.array_split(labels, MICRO_BATCHES), strict=True)
    for i, (d, t) in enumerate(parts):
        where, turn = i % 2, i // 2
        logits, x = net.forward(copies[where], d, where, turn)
        with on(net.spread.trunks[turn][where]):
            losses.append(tape.cross_entropy(logits, tape.array(t, logits.device), count=len(digits)))
        pixels.append(x)
    return losses, pixels


def descend(rate: float | NDArray, g: NDArray, w: NDArray, v: NDArray) -> None:
    """A kernel: momentum 0.9."""
    v *= 0.9
    v += g
    w -= rate * v


def descend_rows(rate: float, index: NDArray, rows: NDArray, w: NDArray, v: NDArray) -> None:
    """The same for a sparse gradient: (indices, rows)."""
    g = np.zeros_like(w)
    np.add.at(g, index[0], rows)
    descend(rate, g, w, v)


def learn(net: Net, rate: float | NDArray) -> None:
    """Every parameter goes down its gradient, on the caller's streams, and forgets it. `rate`: on the CPU an array, an
    operand that may change from replay to replay.
    """
    for name, p in net.parameters.items():
        g = p.grad
        kernel: Callable[..., None] = partial(descend, rate)
        reads = [g]
        if not isinstance(rate, float):
            kernel, reads = descend, [rate, g]
        elif isinstance(g, fanin.Sparse):
            kernel, reads = partial(descend_rows, rate), list(g.parts)
        tape.update(kernel, reads, [p, net.speed[name]], name=f"learn {name}")
        del g, reads
        p.grad = None  # its memory goes back as soon as the streams that use it have passed


def train_step(net: Net) -> Callable[[NDArray, NDArray, NDArray], tape.Var]:
    """A step on the CPU, from a batch and a rate to the loss: forward, backward, update."""

    def step(digits: NDArray, labels: NDArray, rate: NDArray) -> tape.Var:
        losses, _ = losses_of(net, digits, labels)
        tape.backward(losses)
        learn(net, rate)
        return sum(losses[1:], losses[0])

    return step


def recorded(net: Net) -> tape.Compiled[tape.Var]:
    """The same, recorded once and replayed."""
    arrays = cast("list[NDArray]", [*net.speed.values(), net.stage])
    return tape.compiled(train_step(net), static=[*net.parameters.values(), *arrays])


# ---------------------------------------------------------------- 3. The comparison with plain NumPy


def host(g: tape.Gradient) -> NDArray:
    """A gradient as a float64 ndarray."""
    if isinstance(g, fanin.Sparse):
        dense = np.zeros(g.shape)
        index, rows = (part if isinstance(part, np.ndarray) else part.numpy() for part in g.parts)
        np.add.at(dense, tuple(index), rows.astype("f8"))
        return dense
    return (g if isinstance(g, np.ndarray) else g.numpy()).astype("f8")


def deviation(got: NDArray, wanted: NDArray) -> float:
    """The largest difference, relative to the largest entry."""
    return float(abs(got - wanted).max() / abs(wanted).max())


class Check:
    """The results of the sampled steps."""

    def __init__(self) -> None:
        self.steps = self.gradients = 0
        self.worst = 0.0

    def step(self, net: Net, digits: NDArray, labels: NDArray, pixels: list[NDArray]) -> None:
        """Hold each gradient of a pass against a plain float64 sum over the micro-batches."""
        p = {name: v.numpy() for name, v in net.parameters.items()}
        total = {name: np.zeros(v.shape) for name, v in p.items()}
        parts = zip(np.array_split(digits, MICRO_BATCHES), np.array_split(labels, MICRO_BATCHES), pixels, strict=True)
        for d, t, dx in parts:
            _, gradients, wanted = plain.gradients(p, d, t, len(digits), BLOCKS)
            self.note(deviation(dx, wanted))
            for name, g in gradients.items():
                total[name] += g
        for name, v in net.parameters.items():
            self.note(deviation(host(v.grad), total[name]))
        self.steps += 1

    def note(self, deviation: float) -> None:
        self.gradients += 1
        self.worst = max(self.worst, deviation) if deviation == deviation else np.inf


# ---------------------------------------------------------------- 4. The run


class Machine(fanin.sim.Machine):
    """A machine that counts the kernels that were queued."""

    kernels = 0

    def launch(self, *args: Any, **kwargs: Any) -> None:
        self.kernels += 1
        super().launch(*args, **kwargs)


def handwritten() -> Batch:
    """The digits beside this file, and their labels; digits-license.txt has their authors, source and license."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return file["images"].astype("i8"), file["labels"].astype("i8")


class Digits:
    """The handwritten digits, one in five held out."""

    def __init__(self, rng: np.random.Generator) -> None:
        images, labels = handwritten()
        order = rng.permutation(len(labels))
        images, labels = images[order], labels[order]
        held = len(labels) // 5
        self.held, self.held_labels = images[:held], labels[:held]
        self.images, self.labels = images[held:], labels[held:]

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Batches without end, each digit once in an epoch."""
        while True:
            order = rng.permutation(len(self.labels))
            for i in range(0, len(order) - BATCH + 1, BATCH):
                some = order[i : i + BATCH]
                yield shifted(self.images[some], rng), self.labels[some]


def shifted(images: NDArray, rng: np.random.Generator) -> NDArray:
    """Half of the images moved by at most one pixel: shapes are to be learnt, not places."""
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1)])
    every = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), (1, 2))
    where = np.where(rng.random(len(images)) < 0.5, 1, rng.integers(0, 3, (2, len(images))))
    moved: NDArray = every[np.arange(len(images)), *where].copy()
    return moved


def accuracy(net: Net, digits: Digits) -> float:
    """The share of the held-out digits that the network classifies correctly."""
    copies = net.copies()
    found = [net.forward(copies[i], d, i, 0)[0].numpy().argmax(1) for i, d in enumerate(np.array_split(digits.held, 2))]
    return float((np.concatenate(found) == digits.held_labels).mean())


def step(
    net: Net,
    digits: NDArray,
    labels: NDArray,
    rate: float,
    check: Check | None,
    progress: Callable[[int, int], object] | None = None,
) -> float | None:
    """One step of training, in which every gradient is checked if `check` is there; then it returns the loss."""
    losses, pixels = losses_of(net, digits, labels)
    seen = [host(g) for g in tape.grad(losses, pixels)] if check else []
    tape.backward(losses, progress=progress)
    if check:
        check.step(net, digits, labels, seen)
    loss = sum(float(x.numpy()) for x in losses) if check else None
    learn(net, rate)
    return loss


def train(options: argparse.Namespace) -> int:
    screen, began, out = Screen(), time.monotonic(), Path(options.out)
    try:
        for name in (TRACE, PICTURE):
            _files.claim(out / name)
    except OSError as e:
        print(f"fanin demo: --out {options.out}: {e}", file=sys.stderr)
        return 2
    rng = np.random.default_rng(options.seed)
    digits = Digits(rng)
    epoch = len(digits.labels) // BATCH
    steps = options.steps or options.epochs * epoch
    every = max(1, steps // options.checks)
    check, before = Check(), fanin.counters()
    there = nullcontext() if options.cpu else Machine(2, options.seed, launch_us=LAUNCH_US, gbytes_per_s=GBYTES_PER_S)
    with there as machine, fanin.set_options(warn_stream_mismatch=False):
        net = Net(initial(rng), Spread(machine))
        screen.say(
            f"{len(digits.labels)} digits to learn, {len(digits.held)} held out; {steps} steps of {BATCH} in"
            f" {MICRO_BATCHES} micro-batches"
        )
        where = f"{len(machine.streams) + 2} streams of two simulated devices" if machine else "on the CPU"
        screen.say(f"{where}; on {f'one step in {every}' if every > 1 else 'every step'} each gradient is checked")
        batches, note = digits.batches(rng), ""
        with screen.progress("training", steps) as progress:
            for i in range(steps):
                rate, checked = options.rate * (1 - i / steps), check if i % every == 0 else None
                loss = step(net, *next(batches), rate, checked, progress.within)
                if loss is not None:
                    note = f"loss {loss:.3f}, gradients within {check.worst:.0e}"
                progress.step(note)
        right = accuracy(net, digits)
        if machine:
            machine.synchronize()
        after = fanin.counters()
        rows = [
            ("test accuracy (held-out digits)", f"{right:.1%}"),
            ("seconds", f"{time.monotonic() - began:.1f}"),
            ("gradients checked", str(check.gradients)),
            ("largest relative deviation", f"{check.worst:.1e}"),
            ("adds", f"{after.adds - before.adds:,}"),
            ("sums", f"{after.folds - before.folds:,}"),
        ]
        if machine:
            rows += [
                ("kernels", f"{machine.kernels:,}"),
                *((n.replace("_", " "), f"{after[n] - before[n]:,}") for n in ("events", "waits", "waits_elided")),
                ("races", str(machine.races)),
            ]
        screen.say()
        screen.table(rows)
        screen.say()
        unwritten = picture(screen, machine, net, *next(batches), out)
    failed = judge(screen, right, check, steps, EPOCHS * epoch)
    if failed:
        return 1
    return 2 if unwritten else 0


def train_recorded(options: argparse.Namespace) -> int:
    """--graph: each step twice, as it is and recorded, on the CPU: the same bits, and the time that each took."""
    screen, rng = Screen(), np.random.default_rng(options.seed)
    digits, start = Digits(rng), initial(rng)
    epoch = len(digits.labels) // BATCH
    steps = options.steps or options.epochs * epoch
    eager, net = (Net(start, Spread(None), sparse=False) for _ in range(2))
    as_it_is, replayed = train_step(eager), recorded(net)
    batches, wrong = digits.batches(rng), False
    took: tuple[list[float], list[float]] = ([], [])
    screen.say(
        f"{len(digits.labels)} digits to learn, {len(digits.held)} held out; {steps} steps of {BATCH} in"
        f" {MICRO_BATCHES} micro-batches, on the CPU, each as it is and recorded"
    )
    with screen.progress("training", steps) as progress:
        for i in range(steps):
            batch, rate = next(batches), np.array(options.rate * (1 - i / steps), "f4")
            losses = []
            for fn, times in ((as_it_is, took[0]), (replayed, took[1])):
                began = time.perf_counter()
                losses.append(fn(*batch, rate))
                times.append(time.perf_counter() - began)
            wrong = wrong or losses[0].numpy().tobytes() != losses[1].numpy().tobytes()
            progress.step(f"loss {float(losses[1].numpy()):.3f}")
    wrong = wrong or any(
        p.numpy().tobytes() != eager.parameters[n].numpy().tobytes() for n, p in net.parameters.items()
    )
    stats, right = replayed.stats, accuracy(net, digits)
    each = [float(np.median(times[2:] or times)) for times in took]  # after the warm-up and the recording
    screen.say()
    screen.table(
        [
            ("test accuracy (held-out digits)", f"{right:.1%}"),
            ("recordings", str(stats.recorded)),
            ("replays", f"{stats.replayed:,}"),
            ("their bytes", f"{stats.high_water:,}"),
            ("ms a step, as it is", f"{each[0] * 1e3:.2f}"),
            ("ms a step, replayed", f"{each[1] * 1e3:.2f} ({each[0] / each[1]:.2f} times as fast)"),
            ("loss and parameters", "they differ" if wrong else "the same bits"),
        ]
    )
    failed = judge(screen, right, Check(), steps, EPOCHS * epoch)
    if wrong:
        screen.say("fanin demo: the recorded step gave other bits than the step as it is", style="red")
    return 1 if failed or wrong else 0


def judge(screen: Screen, right: float, check: Check, steps: int, whole: int) -> bool:
    """Print what is wrong with the results; return whether anything is."""
    short = steps < whole
    if right < NEEDED and short:
        screen.say(f"(an accuracy of {NEEDED:.0%} is required after {whole} steps; these were {steps})")
    wrong = []
    if right < NEEDED and not short:
        wrong.append(f"accuracy {right:.1%} is below {NEEDED:.0%}")
    if not check.worst <= TOLERANCE:
        wrong.append(f"a gradient deviates by {check.worst:.1e}, more than {TOLERANCE:.0e}")
    for text in wrong:
        screen.say(f"fanin demo: {text}", style="red")
    return bool(wrong)


def picture(screen: Screen, machine: Machine | None, net: Net, digits: NDArray, labels: NDArray, out: Path) -> bool:
    """Write a trace and a picture of one backward pass, and print their names; return whether a file could not be
    written.
    """
    losses, _ = losses_of(net, digits, labels)
    if machine:
        machine.synchronize()  # the pass forward is not in the picture
    from fanin._svg import save
    from fanin._trace.plot import draw

    with fanin.trace() as t:
        tape.backward(losses)
    names = net.spread.names()

    def plot(path: Path) -> None:
        save(draw(t.picture(), names=names, rest=TRACE), str(path))

    made: dict[str, tuple[Callable[[Path], None], str]] = {
        TRACE: (partial(t.save, names=names), "one pass backward; open it in https://ui.perfetto.dev"),
        PICTURE: (plot, "a picture of one place in that pass"),
    }
    failed = False
    for name, (write, what) in made.items():
        try:
            write(out / name)
        except OSError as e:
            screen.say(f"fanin demo: --out {out}: {e}", style="red")
            failed = True
        else:
            screen.say(f"{out / name}: {what}")
    return failed


# ---------------------------------------------------------------- 5. A wait left out

#: The purpose of each wait, record and mark of the rules.
PURPOSE = {
    "S9.record": "the event after a slot's first gradient, for which the consumer's stream or the sum will wait",
    "S9.mark": "keeps a first gradient's memory until the consumer's stream is done with it",
    "S10.record": "the event after a slot's first gradient, if the consumer is on another device",
    "S11.record": "the event after a slot's first gradient, if neither producer nor consumer is on its device",
    "S12.record": "the event after each later gradient of a slot",
    "S12.wait": "the sum waits for the later gradients that other streams made",
    "S12.mark": "keeps the later gradients' memory until the sum has read it",
    "S13.wait": "the sum waits for the first gradient, if another stream made it",
    "S13.mark": "keeps the first gradient's memory until the sum has read it",
    "S15.record": "the event after a sum that is not made on the consumer's stream",
    "S18.record": "an event for a consumer on another stream than the sum's, if there is none yet",
    "S18.wait": "the consumer waits for the sum",
    "S19.mark": "keeps the sum's memory until the consumer is done with it",
    "S20.wait": "the caller's stream waits, at the end of the pass, for the streams on which the leaves were summed",
    "S20.mark": "keeps the leaves' gradients until the caller's stream is done with them",
    "S21.wait": "a conversion waits for the gradient, where it cannot run on its producer's stream",
    "S21.mark": "keeps a gradient's memory until it has been converted on another stream",
    "S21.record": "the event after such a conversion",
    "S22.wait": "the last step of a sum waits until the taker's stream is done with the memory that it is written to",
    "S22.mark": "keeps the memory that a sum is written to",
    "S22.record": "the event after the last step of a sum",
}

#: Those that another one covers in this network: leaving them out alone changes nothing.
COVERED = {
    "S9.mark": (
        "S13.mark marks the same memory when the sum is made, and S19.mark where there is nothing to sum; try"
        " --leave-out S9.mark --leave-out S13.mark"
    ),
    "S13.mark": "S9.mark has marked the same memory when it was added; try --leave-out S9.mark --leave-out S13.mark",
    "S18.record": (
        "a node of a pass takes its sums on its own stream, where they are summed; the event is for a take on another"
        " stream, as by InputBuffer.take(stream)"
    ),
    "S22.mark": "the taker reads the sum, so it waits for it and is marked itself (S18, S19)",
}


def leave_out(options: argparse.Namespace) -> int:
    """Train without these waits or records, and print the checker's report."""
    if options.cpu:
        print("fanin demo: --leave-out needs streams: run it without --cpu", file=sys.stderr)
        return 2
    screen, rng = Screen(), np.random.default_rng(options.seed)
    machine = Machine(2, options.seed, launch_us=LAUNCH_US, gbytes_per_s=GBYTES_PER_S)
    try:
        machine.leave_out(*options.leave_out)
    except ValueError as e:
        print(f"fanin demo: {e}", file=sys.stderr)
        return 2
    out = [w for w in PURPOSE if any(w == word or w.startswith(f"{word}.") for word in options.leave_out)]
    screen.say("left out:")
    for word in out:
        screen.say(f"  {word:<10}  {PURPOSE[word]}")
    screen.say()
    digits, names = Digits(rng), {}
    try:
        with machine, fanin.set_options(warn_stream_mismatch=False):
            spread = Spread(machine)
            names = spread.names()
            net, batches = Net(initial(rng), spread), digits.batches(rng)
            for _ in range(3):
                step(net, *next(batches), options.rate, Check())
    except fanin.RaceError as e:
        screen.say(f"RaceError: {e}", style="red")
        screen.say("\nstreams:")
        for i in (0, 1):
            screen.say(f"  sim:{i}: {', '.join(f'{s} {name}' for (d, s), name in sorted(names.items()) if d == i)}")
        return 1
    screen.say("no race: three steps, each gradient checked")
    for word in out:
        if word in COVERED:
            screen.say(f"  {word} is covered here: {COVERED[word]}")
    return 0


# ---------------------------------------------------------------- 6. On several ranks


@dataclass
class Trained:
    """What a rank has when the training ends."""

    digest: str
    accuracy: float
    curve: list[float]


def train_rank(group: dist.Group, options: argparse.Namespace) -> Trained:
    """Train on one rank: every rank has the same digits, and passes backward over its own micro-batches."""
    rng = np.random.default_rng(options.seed)
    digits = Digits(rng)
    net = Net(initial(rng), Spread(None), sparse=False)
    epochs = RANKS_EPOCHS if options.epochs == EPOCHS else options.epochs
    batches, steps = digits.batches(rng), options.steps or epochs * (len(digits.labels) // BATCH)
    reducer = dist.Reducer(list(net.parameters.values()), group, order="key")
    curve = []
    for i in range(steps):
        images, labels = next(batches)
        parts = list(zip(np.array_split(images, PARTS), np.array_split(labels, PARTS), strict=True))
        mine = range(group.rank, PARTS, group.size)
        losses = []
        for k in mine:
            logits, _ = net.forward(net.parameters, parts[k][0], 0, 0)
            loss = tape.cross_entropy(logits, tape.array(parts[k][1]), count=len(images))
            losses.append(np.float64(loss.numpy()).reshape(1))
            if k != mine[-1]:
                with reducer.accumulate(k):
                    tape.backward(loss)
            else:
                tape.backward(loss, reducer=reducer.at(k))
        learn(net, np.array(options.rate * (1 - i / steps), "f4"))
        if i % max(1, steps // POINTS) == 0:
            curve.append(float(dist.add_n(losses, group, keys=list(mine))[0]))
    weights = b"".join(p.numpy().tobytes() for p in net.parameters.values())
    return Trained(hashlib.sha256(weights).hexdigest()[:16], accuracy(net, digits), curve)


def launched() -> bool:
    """Whether mpiexec or torchrun started this process as one of several ranks."""
    return any(int(os.environ.get(name, "1")) > 1 for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))


def train_ranks(options: argparse.Namespace) -> int:
    """Train on 1, 2, 4 .. ranks and compare; under mpiexec or torchrun, on 1 rank and on all."""
    alone = {"--graph": options.graph, "--leave-out": options.leave_out}
    alone |= {"--checks": options.checks is not None, "--out": options.out is not None}
    for word, given in alone.items():
        if given:
            print(f"fanin demo: {word} is for one process: leave out --ranks, mpiexec, torchrun", file=sys.stderr)
            return 2
    screen = Screen()
    if launched():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            import torch.distributed

            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo")
                atexit.register(torch.distributed.destroy_process_group)  # no thread of Gloo outlives Python
        group = dist.group()
        if group.size > PARTS:
            raise SystemExit(f"fanin demo: {group.size} ranks: a step has {PARTS} micro-batches to deal out")
        found = {f"{group.size} ranks, {group.name}": train_rank(group, options)}
        if group.rank:
            return 0
        found = {"1 rank": dist.threads(1, lambda alone: train_rank(alone, options))[0], **found}
    else:
        numbers = sorted({n for n in (1, 2, 4, 8) if n < options.ranks} | {1, options.ranks})
        found = {}
        for n in numbers:
            results: list[Trained] = dist.threads(n, lambda group: train_rank(group, options))
            for rank, result in enumerate(results):
                if result != results[0]:
                    screen.say(f"fanin demo: rank {rank} of {n} ended with other weights than rank 0", style="red")
                    return 1
            found[f"{n} rank{'s' * (n > 1)}, threads"] = results[0]
    rows = [(name, f"{result.digest}  accuracy {result.accuracy:.1%}") for name, result in found.items()]
    first = next(iter(found.values()))
    screen.say(f"the weights' digest after training on digits in {PARTS} micro-batches a step, order by key")
    screen.table(rows)
    screen.say("loss: " + " ".join(f"{x:.3f}" for x in first.curve))
    same = all(result == first for result in found.values())
    screen.say("the same bits on every number of ranks" if same else "fanin demo: the weights differ")
    return 0 if same else 1


# ---------------------------------------------------------------- 7. The command line

HELP = f"""Train a small network on real handwritten digits, on two simulated devices, and check its gradients.

Micro-batches and branches of the network are spread over streams that run late and in any order that waits allow. On
sampled steps each gradient is held against a plain float64 sum. A table, a trace for Perfetto and a picture of one pass
backward come of it. Exit status: 0 all is well; 1 a gradient that deviates, a race, or, after {EPOCHS} epochs, a test
accuracy below {NEEDED:.0%}; 2 something is missing that the demo needs, or a file cannot be written.

examples:
  fanin demo
  fanin demo --epochs 5 --seed 7 --out /tmp/demo
  fanin demo --cpu                 the same network without streams
  fanin demo --graph               .. and its steps recorded once, and replayed
  fanin demo --ranks 4             on 1, 2 and 4 threads: the same weights
  mpiexec -n 4 fanin demo          .. on processes; or torchrun -m fanin demo
  fanin demo --leave-out S12.wait  shows the race that this wait prevents
  fanin demo --leave-out S9.mark --leave-out S13.mark"""


def ranks(text: str) -> int:
    n = positive(text)
    if n > 8:
        raise argparse.ArgumentTypeError(f"expected at most 8 ranks, one for each micro-batch, got {n}")
    return n


def rate(text: str) -> float:
    try:
        x = float(text)
    except ValueError:
        x = 0.0
    if not 0 < x < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return x


def arguments(parser: argparse.ArgumentParser) -> None:
    add, often = parser.add_argument, f"how often each digit is used (default: {EPOCHS})"
    add("--epochs", metavar="N", type=positive, default=EPOCHS, help=often)
    add("--steps", metavar="N", type=positive, help="train for so many steps instead")
    add("--checks", metavar="N", type=positive, help=f"on how many steps gradients are checked (default: {CHECKS})")
    add("--rate", metavar="X", type=rate, default=0.2, help="the learning rate at the start (default: 0.2)")
    seed = "of the digits' order, the parameters and the machine (default: 0)"
    add("--seed", metavar="N", type=natural, default=0, help=seed)
    add("--cpu", action="store_true", help="on the CPU instead of the simulated devices")
    graph = "on the CPU, each step recorded once and replayed, beside the step as it is"
    add("--graph", action="store_true", help=graph)
    add("--ranks", metavar="N", type=ranks, help="on the CPU on 1, 2, .. N ranks (at most 8), each a thread")
    add("--out", metavar="DIR", help="where trace and picture go (default: here)")
    word = "leave out a wait, record or mark of the stream rules: S12, S12.wait .. (may be repeated)"
    add("--leave-out", metavar="WORD", action="append", help=word)


def one_blas_thread() -> AbstractContextManager[object]:
    """The BLAS on one thread: the arrays are small, and a second one costs more than it gains."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        why = "threadpoolctl, which limits the BLAS to one thread, is not installed: the demo takes longer"
        print(f'fanin demo: {why}; pip install "fanin[demo]"', file=sys.stderr)
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(1)
    return limits


def run(options: argparse.Namespace) -> int:
    with one_blas_thread():
        try:
            if options.ranks or launched():
                return train_ranks(options)
            options.checks = options.checks or CHECKS
            options.out = "." if options.out is None else options.out
            if options.leave_out:
                return leave_out(options)
            return train_recorded(options) if options.graph else train(options)
        except fanin.RaceError as e:
            Screen().say(f"fanin demo: {e}", style="red")
            return 1
