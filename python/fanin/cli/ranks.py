"""`fanin demo --ranks N`: the demo's network on several ranks, with the same weights, bit by bit, for each number."""

from __future__ import annotations

import argparse
import hashlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from fanin import dist, tape

from . import demo
from .screen import Screen

MICRO_BATCHES = 8  #: of a step, dealt out to the ranks
EPOCHS = 4
POINTS = 8  #: of the loss curve


@dataclass
class Result:
    """What a rank has when the training ends."""

    digest: str
    accuracy: float
    curve: list[float]


def train(group: dist.Group, options: argparse.Namespace) -> Result:
    """Train on one rank: every rank has the same digits, and passes backward over its own micro-batches."""
    rng = np.random.default_rng(options.seed)
    digits = demo.Digits(rng)
    net = demo.Net(demo.initial(rng), demo.Spread(None), sparse=False)
    batches, steps = digits.batches(rng), steps_of(options, digits)
    reducer = dist.Reducer(list(net.parameters.values()), group, order="key")
    curve = []
    for i in range(steps):
        images, labels = next(batches)
        parts = list(zip(np.array_split(images, MICRO_BATCHES), np.array_split(labels, MICRO_BATCHES), strict=True))
        mine = range(group.rank, MICRO_BATCHES, group.size)
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
        demo.learn(net, np.array(options.rate * (1 - i / steps), "f4"))
        if i % max(1, steps // POINTS) == 0:
            curve.append(float(dist.add_n(losses, group, keys=list(mine))[0]))
    weights = b"".join(p.numpy().tobytes() for p in net.parameters.values())
    return Result(hashlib.sha256(weights).hexdigest()[:16], demo.accuracy(net, digits), curve)


def steps_of(options: argparse.Namespace, digits: demo.Digits) -> int:
    epochs = EPOCHS if options.epochs == demo.EPOCHS else options.epochs
    return int(options.steps or epochs * (len(digits.labels) // demo.BATCH))


def launched() -> bool:
    """Whether mpiexec or torchrun started this process as one of several ranks."""
    return any(int(os.environ.get(name, "1")) > 1 for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))


def world() -> dist.Group:
    """The group of the processes that mpiexec or torchrun started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
    return dist.group()


def run(options: argparse.Namespace) -> int:
    """Train on 1, 2, 4 .. ranks and compare; under mpiexec or torchrun, on 1 rank and on all."""
    screen = Screen()
    if launched():
        group = world()
        if group.size > MICRO_BATCHES:
            raise SystemExit(f"fanin demo: {group.size} ranks: a step has {MICRO_BATCHES} micro-batches to deal out")
        found = {f"{group.size} ranks, {group.name}": train(group, options)}
        if group.rank:
            return 0
        found = {"1 rank": dist.threads(1, lambda alone: train(alone, options))[0], **found}
    else:
        numbers = sorted({n for n in (1, 2, 4, 8) if n < options.ranks} | {1, options.ranks})
        found = {}
        for n in numbers:
            results: list[Result] = dist.threads(n, lambda group: train(group, options))
            for rank, result in enumerate(results):
                if result != results[0]:
                    screen.say(f"fanin demo: rank {rank} of {n} ended with other weights than rank 0", style="red")
                    return 1
            found[f"{n} rank{'s' * (n > 1)}, threads"] = results[0]
    return report(screen, found)


def report(screen: Screen, found: dict[str, Result]) -> int:
    """Print the table; 0 if every number of ranks gave the same bits."""
    rows: list[tuple[str, Any]] = []
    for name, result in found.items():
        rows.append((name, f"{result.digest}  accuracy {result.accuracy:.1%}"))
    first = next(iter(found.values()))
    screen.say(f"the weights' digest after training on digits in {MICRO_BATCHES} micro-batches a step, order by key")
    screen.table(rows)
    screen.say("loss: " + " ".join(f"{x:.3f}" for x in first.curve))
    same = all(result == first for result in found.values())
    screen.say("the same bits on every number of ranks" if same else "fanin demo: the weights differ")
    return 0 if same else 1
