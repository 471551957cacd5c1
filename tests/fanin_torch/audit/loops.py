"""Random training loops that are right, and faults that can be planted into them."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import fanin.torch
from fanin.audit import Row

__tracebackhide__ = True

DTYPES = [torch.float32] * 4 + [torch.bfloat16] * 3 + [torch.float64, torch.float16]


class Net(torch.nn.Module):
    """Layers of random sizes, with parameters that are tied, unused, sparse, of one element, or large."""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        self.ids, width = rng.choice([3, 50, 400]), rng.choice([1, 2, 7, 16, 33])
        large = rng.random() < 0.04
        hidden = 1000 if large else rng.choice([1, 3, 17, 40])
        self.is_sparse = rng.random() < 0.25 and dtype in (torch.float32, torch.float64)
        self.embedding = torch.nn.Embedding(self.ids, width, sparse=self.is_sparse)
        self.first = torch.nn.Linear(width, hidden)
        self.inner = torch.nn.Linear(hidden, hidden)
        self.last = torch.nn.Linear(hidden, width)
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.is_tied = rng.random() < 0.4 and not self.is_sparse
        self.unused = torch.nn.Linear(3, 3) if rng.random() < 0.3 else None
        self.checkpoint = rng.choice([None, None, None, True, False])
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.embedding(ids)))

        def block(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x)) + x

        x = block(x) if self.checkpoint is None else checkpoint(block, x, use_reentrant=self.checkpoint)
        x = self.last(x) * self.gain
        return torch.nn.functional.linear(x, self.embedding.weight) if self.is_tied else x


@dataclass
class Loop:
    """One random loop, by its seed.

    Attributes
    ----------
    rows : tuple of Row
        What the audit found.
    fault : callable, optional
        Called after each pass with the loop and the number of the pass, to plant a fault.
    """

    seed: int
    fault: Callable[[Loop, int], None] | None = None
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = field(default=lambda m: m)
    replicated: bool = False  # `wrap` makes a DistributedDataParallel
    size: int = 1  # ranks, each of which has its own data
    rank: int = 0
    rows: tuple[Row, ...] = ()
    text: str = ""

    def run(self) -> Loop:
        """Run it on one thread: small operations take longer on several ones."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._run_all()
        finally:
            torch.set_num_threads(threads)

    def _run_all(self) -> Loop:
        rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.rng = rng
        self.dtype = rng.choice(DTYPES)
        self.net = Net(rng, self.dtype)
        if self.replicated:  # DistributedDataParallel refuses checkpoints that are passes of their own
            self.net.checkpoint = None if self.net.checkpoint is None else False
        self.model = self.wrap(self.net)
        self.k = rng.choice([1, 2, 3, 4, 7, 8, 16, 64] if not self.replicated else [1, 2, 4])
        self.steps = rng.choice([1, 2, 3]) if self.k < 16 else 1
        self.way = rng.choice(["loss", "loss", "grad", "tokens", "sum", "silent"])
        self.block = not self.replicated and rng.random() < 0.2
        self.scaler = None
        self.penalty = rng.choice([None, None, None, None, "inputs", "parameters"])
        if self.penalty and (self.net.checkpoint is not None or self.is_narrow or self.replicated):
            self.penalty = None
        if rng.random() < 0.25 and not self.is_narrow and not self.replicated:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** rng.choice([3, 16]))
        self.clip = rng.choice([None, None, "norm", "norm", "value"])
        self.two = rng.choice([None, None, None, "summed", "apart"]) if not self.block else None
        self.two = None if self.replicated else self.two
        self.to_none = rng.random() < 0.7
        self.late = rng.random() < 0.5  # clear at the beginning of a step, or at its end
        self.same = rng.random() < 0.3  # all micro-batches are equal
        self.overflow = self.scaler is not None and rng.random() < 0.3
        kind = rng.choice([torch.optim.SGD, torch.optim.AdamW])
        if self.net.is_sparse:
            kind = torch.optim.SGD
        self.optimizer = kind(self.net.parameters(), 0.01)
        torch.manual_seed(1000 * self.seed + self.rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._run()
        return self

    @property
    def is_narrow(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    def __str__(self) -> str:
        known = {k: v for k, v in vars(self).items() if isinstance(v, bool | str | int | torch.dtype) and k != "text"}
        inside = [k for k in ("is_sparse", "is_tied", "checkpoint") if getattr(self.net, k) not in (None, False)]
        return f"{known} {inside}\n{self.text}"

    def _run(self) -> None:
        named = [(name, p) for name, p in self.net.named_parameters()]
        expect = "sum" if self.way == "sum" else "mean"
        with fanin.torch.audit(named, self.optimizer, expect=expect, every=1) as audit:
            self.audit = audit
            for step in range(self.steps):
                if self.late:
                    self.optimizer.zero_grad(set_to_none=self.to_none)
                self._step(step)
                if not self.late:
                    self.optimizer.zero_grad(set_to_none=self.to_none)
        self.rows, self.text = audit.rows, str(audit)

    def _step(self, step: int) -> None:
        ids = torch.randint(0, self.net.ids, (self.k, 4))
        if self.same:
            ids = ids[:1].expand(self.k, 4)
        tokens = [self.rng.randint(1, 9) for _ in range(self.k)]
        self.total = sum(tokens)
        with self._collected():
            for i in range(self.k):
                last = i == self.k - 1
                quiet = contextlib.nullcontext()
                if not last and hasattr(self.model, "no_sync"):
                    quiet = self.model.no_sync()
                marked = self.audit.micro_batch() if self.two == "apart" else contextlib.nullcontext()
                with marked, quiet:
                    self._micro_batch(ids[i], tokens[i], self.overflow and step == 0 and last)
                if self.fault is not None:
                    self.fault(self, i)
        self._finish()

    def _collected(self) -> Any:
        if not self.block:
            return contextlib.nullcontext()
        return fanin.torch.accumulate(self.net.named_parameters())

    def _weighed(self, loss: torch.Tensor, tokens: int) -> torch.Tensor:
        """The loss with the weight that the loop gives it."""
        if self.way == "silent":
            return loss / self.k
        shown = self.audit.loss(loss, tokens if self.way == "tokens" else None)
        if self.way == "loss":
            shown = shown / self.k
        if self.way == "tokens":
            shown = shown * (tokens / self.total)
        if self.way == "sum":
            shown = shown * self.size
        return shown

    def _micro_batch(self, ids: torch.Tensor, tokens: int, overflow: bool) -> None:
        y = self.model(ids)
        loss = y.float().square().mean() if self.is_narrow else y.square().mean()
        if self.penalty == "parameters":
            [g] = torch.autograd.grad(loss, [self.net.last.weight], create_graph=True)
            loss = loss + g.square().sum()
        if self.penalty == "inputs":
            x = torch.ones_like(self.net.last.bias, requires_grad=True)
            out = (self.net.last(torch.tanh(self.net.first(x)))).square().sum() * self.net.gain
            [g] = torch.autograd.grad(out, [x], create_graph=True)
            loss = loss + g.square().sum()
        if overflow:
            loss = loss * float("inf")
        losses = [loss]
        if self.two is not None:
            losses.append(self.model(ids).abs().mean().to(loss.dtype))
        if self.two == "summed":
            losses = [losses[0] + losses[1]]
        for one in losses:
            scaled = self._weighed(one, tokens)
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
            scaled.backward()

    def _finish(self) -> None:
        """What comes between the last pass and the next step."""
        if self.scaler is not None and (self.clip or self.rng.random() < 0.5):
            self.scaler.unscale_(self.optimizer)
        if self.way == "grad":
            self.audit.factor(1 / self.k)
            for p in self.net.parameters():
                if p.grad is not None:
                    p.grad = p.grad / self.k if p.grad.is_sparse else p.grad.div_(self.k)
        if self.clip == "norm" and not self.net.is_sparse:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.rng.choice([1e-3, 1.0, 1e9]))
        if self.clip == "value" and not self.net.is_sparse:
            torch.nn.utils.clip_grad_value_(self.net.parameters(), 1e-3)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def alarms(rows: tuple[Row, ...]) -> Iterator[str]:
    """The rows that call a loop wrong."""
    return (str(row) for row in rows if row.verdict in ("fault", "undecided"))
