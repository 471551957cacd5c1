"""`fanin demo`: a small network learns handwritten digits on two simulated devices, and each of its gradients is checked.

1. The network and how it is spread over streams.
2. One step: forward, backward, update.
3. What is held against plain NumPy.
4. The run: progress, table, trace and picture.
5. A wait left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fanin
from fanin import tape

from . import plain
from .screen import Screen

#: Of every 5 digits one is held back; of the others each step takes so many, in so many micro-batches.
BATCH, MICRO_BATCHES = 128, 4
#: How often the one residual block is applied: its weights are tied.
BLOCKS = 2
#: The largest deviation of a float32 gradient from the float64 one, relative to that gradient's largest entry.
TOLERANCE = 1e-4
NEEDED = 0.95

# ---------------------------------------------------------------- 1. The network and how it is spread


def initial(rng: np.random.Generator) -> dict[str, Any]:
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
    fan = {"intensity": 4, "position": 16, "bias": np.inf}
    return {
        name: rng.normal(0, fan.get(name, int(np.prod(shape[:-1]))) ** -0.5 if name != "bias" else 0, shape).astype("f4")
        for name, shape in shapes.items()
    }


@dataclass
class Spread:
    """The machine's streams, and what lies where: parameters on device 0 (the last bias on device 1), made on its stream `w`."""

    machine: Any
    devices: list[tape.Device] = field(init=False)
    home: list[Any] = field(init=False)
    lanes: list[list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = tape.devices(self.machine)
        self.home = [self.machine.stream(device=i) for i in (0, 1)]
        self.lanes = [[self.machine.stream(device=i) for _ in range(2)] for i in (0, 1)]


class Net:
    """The parameters, and what a step needs of the machine."""

    def __init__(self, start: dict[str, Any], spread: Spread) -> None:
        self.spread = spread
        self.parameters: dict[str, tape.Var] = {}
        self.speed: dict[str, Any] = {}
        for name, value in start.items():
            where = int(name == "bias")
            with fanin.stream(spread.home[where]):
                self.parameters[name] = tape.parameter(value, spread.devices[where], name)
            self.speed[name] = spread.devices[where].put(np.zeros_like(value))
        # Memory on device 1 in which the sums for device 0 are made, one after the other.
        self.stage = self.spread.devices[1].put(np.zeros(self.parameters["side"].data.size, "f4"))

    def replicas(self) -> list[dict[str, tape.Var]]:
        """The parameters as each device reads them. Device 0 pushes copies; the position's one copy serves both, over the link."""
        here = dict(self.parameters)
        there = {"bias": here["bias"]}
        with fanin.stream(self.spread.home[0]):
            for name, p in self.parameters.items():
                if name != "bias":
                    staged = name in ("block", "side")
                    stage = self.stage[: p.data.size].reshape(p.shape) if staged else None
                    there[name] = p.to(self.spread.devices[1], stage=stage)
        here["position"] = there["position"]
        return [here, there]

    def forward(self, p: dict[str, tape.Var], digits: Any, where: int, turn: int) -> tuple[tape.Var, tape.Var]:
        """(logits, embedded pixels) of a micro-batch on one device: the trunk on one stream, the side branch on the other."""
        device, other = self.spread.devices[where], self.spread.devices[1 - where]
        trunk, side = self.spread.lanes[where][turn % 2], self.spread.lanes[where][1 - turn % 2]
        with fanin.stream(trunk):
            x = tape.embedding(p["intensity"], tape.array(digits, device)) + p["position"]
        with fanin.stream(side):
            branch = tape.tanh(x.reshape(len(digits), 256) @ p["side"])
        with fanin.stream(trunk):
            h = tape.tanh(tape.conv2d(x, p["conv"]))
            for _ in range(BLOCKS):
                # Device 0 is short of memory: it parks what skips the block on device 1, and fetches it back.
                parked = h.to(other) if where == 0 else h
                t = tape.tanh(tape.conv2d(h, p["block"]))
                h = (parked.to(device, on=device) if where == 0 else parked) + t
            joined = tape.pool(h, 2).reshape(len(digits), 128) + branch
            return joined @ p["out"] + p["bias"], x


# ---------------------------------------------------------------- 2. One step


def losses_of(net: Net, digits: Any, labels: Any) -> tuple[list[tape.Var], list[tape.Var]]:
    """(losses, embedded pixels) of all micro-batches; the losses sum to the mean over the batch."""
    losses, pixels = [], []
    replicas = net.replicas()
    parts = zip(np.array_split(digits, MICRO_BATCHES), np.array_split(labels, MICRO_BATCHES), strict=True)
    for i, (d, t) in enumerate(parts):
        where, turn = i % 2, i // 2
        logits, x = net.forward(replicas[where], d, where, turn)
        with fanin.stream(net.spread.lanes[where][turn % 2]):
            losses.append(tape.cross_entropy(logits, tape.array(t, logits.device), count=len(digits)))
        pixels.append(x)
    return losses, pixels


def descend(rate: float) -> Any:
    """A kernel: momentum 0.9."""

    def kernel(g: Any, w: Any, v: Any) -> None:
        v *= 0.9
        v += g
        w -= rate * v

    return kernel


def descend_rows(rate: float) -> Any:
    """The same for a sparse gradient: (indices, rows)."""
    dense = descend(rate)

    def kernel(index: Any, rows: Any, w: Any, v: Any) -> None:
        g = np.zeros_like(w)
        np.add.at(g, index[0], rows)
        dense(g, w, v)

    return kernel


def learn(net: Net, rate: float) -> None:
    """Every parameter goes down its gradient, on the caller's streams, and forgets it."""
    for name, p in net.parameters.items():
        g = p.grad
        if isinstance(g, fanin.Sparse):
            tape.update(descend_rows(rate), list(g.parts), [p, net.speed[name]], name=f"learn {name}")
        else:
            tape.update(descend(rate), [g], [p, net.speed[name]], name=f"learn {name}")
        p.grad = g = None  # its memory goes back as soon as the streams that use it have passed


# ---------------------------------------------------------------- 3. What is held against plain NumPy


def host(g: Any) -> Any:
    """A gradient as a float64 ndarray."""
    if isinstance(g, fanin.Sparse):
        dense = np.zeros(g.shape)
        np.add.at(dense, tuple(g.parts[0].numpy()), g.parts[1].numpy().astype("f8"))
        return dense
    return g.numpy().astype("f8")


def deviation(got: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest entry."""
    return float(abs(got - wanted).max() / abs(wanted).max())


class Check:
    """What the sampled steps have shown."""

    def __init__(self) -> None:
        self.steps = self.gradients = 0
        self.worst = 0.0

    def step(self, net: Net, digits: Any, labels: Any, pixels: list[Any]) -> None:
        """Hold each gradient of a pass against a plain float64 sum over the micro-batches."""
        p = {name: v.numpy() for name, v in net.parameters.items()}
        total = {name: np.zeros(v.shape) for name, v in p.items()}
        parts = zip(np.array_split(digits, MICRO_BATCHES), np.array_split(labels, MICRO_BATCHES), pixels, strict=True)
        for d, t, dx in parts:
            _, gradients, wanted = plain.gradients(p, d, t, len(digits), BLOCKS)
            self.note(deviation(host(dx), wanted))
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


class Digits:
    """The digits that scikit-learn ships, one in five held back."""

    def __init__(self, rng: np.random.Generator) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = rng.permutation(len(labels))
        images, labels = images.astype("i8").reshape(-1, 8, 8)[order], labels.astype("i8")[order]
        held = len(labels) // 5
        self.held, self.held_labels = images[:held], labels[:held]
        self.images, self.labels = images[held:], labels[held:]

    def batches(self, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        """Batches without end, each digit once in an epoch."""
        while True:
            order = rng.permutation(len(self.labels))
            for i in range(0, len(order) - BATCH + 1, BATCH):
                some = order[i : i + BATCH]
                yield self.images[some], self.labels[some]


def accuracy(net: Net, digits: Digits) -> float:
    """The share of the held-back digits that the network knows."""
    replicas = net.replicas()
    found = [net.forward(replicas[i], d, i, 0)[0].numpy().argmax(1) for i, d in enumerate(np.array_split(digits.held, 2))]
    return float((np.concatenate(found) == digits.held_labels).mean())


def step(net: Net, digits: Any, labels: Any, rate: float, check: Check | None) -> float | None:
    """One step of training, in which every gradient is checked if `check` is there; then it returns the loss."""
    losses, pixels = losses_of(net, digits, labels)
    seen = tape.grad(losses, pixels) if check else []
    tape.backward(losses)
    if check:
        check.step(net, digits, labels, seen)
    loss = sum(float(x.numpy()) for x in losses) if check else None
    learn(net, rate)
    return loss


def train(options: argparse.Namespace) -> int:
    screen, began = Screen(), time.monotonic()
    rng = np.random.default_rng(options.seed)
    digits = Digits(rng)
    steps = options.steps or options.epochs * (len(digits.labels) // BATCH)
    every = max(1, steps // options.checks)
    check, before = Check(), fanin.counters()
    with Machine(devices=2, seed=options.seed) as machine, fanin.set_options(warn_stream_mismatch=False):
        net = Net(initial(rng), Spread(machine))
        screen.say(f"{len(digits.labels)} digits to learn, {len(digits.held)} held back; {steps} steps of {BATCH} in {MICRO_BATCHES} micro-batches")
        screen.say(f"{len(machine.streams) + 2} streams of two simulated devices; every {every}th step each gradient is checked")
        batches, note = digits.batches(rng), ""
        with screen.progress("training", steps) as progress:
            for i in range(steps):
                rate = options.rate * (1 - i / steps)
                sampled = i % every == 0
                loss = step(net, *next(batches), rate, check if sampled else None)
                if loss is not None:
                    note = f"loss {loss:.3f}, largest deviation of a gradient {check.worst:.0e}"
                progress.step(note)
        right = accuracy(net, digits)
        machine.synchronize()
        done = fanin.counters()
        seconds = time.monotonic() - began
        made = picture(net, *next(batches), Path(options.out), screen)
        races = machine.races
    screen.say()
    screen.table(
        [
            ("accuracy on held-back digits", f"{right:.1%}"),
            ("seconds", f"{seconds:.1f}"),
            ("gradients checked", str(check.gradients)),
            ("largest relative deviation", f"{check.worst:.1e}"),
            ("adds", f"{done.adds - before.adds:,}"),
            ("sums", f"{done.folds - before.folds:,}"),
            ("kernels", f"{machine.kernels:,}"),
            ("events", f"{done.events - before.events:,}"),
            ("waits", f"{done.waits - before.waits:,}"),
            ("waits elided", f"{done.waits_elided - before.waits_elided:,}"),
            ("races", str(races)),
        ]
    )
    screen.say()
    for line in made:
        screen.say(line)
    wrong = [
        f"accuracy {right:.1%} is below {NEEDED:.0%}" if right < NEEDED else "",
        f"a gradient deviates by {check.worst:.1e}, more than {TOLERANCE:.0e}" if not check.worst <= TOLERANCE else "",
        f"{races} races" if races else "",
    ]
    for text in filter(None, wrong):
        screen.say(f"fanin demo: {text}", style="red")
    return int(any(wrong))


def picture(net: Net, digits: Any, labels: Any, out: Path, screen: Screen) -> list[str]:
    """A trace and a picture of one pass backward; says what was written."""
    losses, _ = losses_of(net, digits, labels)
    with fanin.trace() as t:
        tape.backward(losses)
    out.mkdir(parents=True, exist_ok=True)
    t.save(out / "fanin-demo.json")
    said = [f"{out / 'fanin-demo.json'}: one pass backward; open it in https://ui.perfetto.dev"]
    try:
        t.plot(out / "fanin-demo.svg", title="One pass backward: four micro-batches on two simulated devices")
    except ImportError as e:
        return [*said, f"no picture: {e}"]
    return [*said, f"{out / 'fanin-demo.svg'}: the same as a picture"]


# ---------------------------------------------------------------- 5. A wait left out

#: What each wait, record and mark is for.
PURPOSE = {
    "S9.record": "the first gradient's event, when its producer runs on another stream than the consumer",
}


def leave_out(options: argparse.Namespace) -> int:
    """Train as ever, but without these; the checker says what comes of it."""
    screen = Screen()
    rng = np.random.default_rng(options.seed)
    digits = Digits(rng)
    with Machine(devices=2, seed=options.seed) as machine, fanin.set_options(warn_stream_mismatch=False):
        machine.leave_out(*options.leave_out)
        net = Net(initial(rng), Spread(machine))
        batches = digits.batches(rng)
        screen.say(f"leaving out: {', '.join(options.leave_out)}")
        try:
            for _ in range(2):
                step(net, *next(batches), options.rate, Check())
            machine.synchronize()
        except fanin.RaceError as e:
            screen.say(f"RaceError: {e}", style="red")
            return 1
    screen.say("no race")
    return 0
