"""`fanin.audit.Ledger` in loops of NumPy arrays: right ones raise no alarm, planted faults are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.audit import AuditError, Ledger, Row
from kit.sample import sizes

Sum = Any


class Loop:
    """A loop of K micro-batches over arrays, into which one fault may be planted."""

    def __init__(self, seed: int, fault: str = "", k: int = 4, n: int = 300, dtype: str = "float32") -> None:
        self.rng = np.random.default_rng(seed)
        self.fault, self.k, self.n, self.dtype = fault, k, n, dtype
        self.ledger = Ledger()

    def run(self, steps: int = 2) -> tuple[Row, ...]:
        total: Sum = None
        for _ in range(steps):
            if self.fault != "not cleared":
                total = None
            made = []
            for i in range(self.k):
                weight = {"forgotten": 1.0, "twice divided": 1 / self.k**2}.get(self.fault, 1 / self.k)
                self.ledger.weight(weight)
                g = (self.rng.normal(size=self.n) * weight).astype(self.dtype)
                made.append(g)
                before = total
                if self.fault == "cleared" and i == 2:
                    before = total = np.zeros(self.n, self.dtype)
                self.ledger.made("w", g, before)
                total = self.add(i, total, g)
                self.ledger.arrived("w", total)
            total = self.change(total, made)
            self.ledger.read({"w": total})
        return self.ledger.rows

    def add(self, i: int, total: Sum, g: Sum) -> Sum:
        right = g.copy() if total is None else total + g
        if total is None:
            return right
        wrong = {
            "lost": lambda: total if i == 2 else right,
            "only the last": lambda: g.copy(),
            "only the first": lambda: total,
            "twice": lambda: right + g,
            "doubled": lambda: right * right.dtype.type(2),
            "scaled": lambda: right * right.dtype.type(0.3),
            "noise": lambda: right + self.rng.normal(size=self.n).astype(self.dtype),
        }
        return wrong.get(self.fault, lambda: right)()

    def change(self, total: Sum, made: list[Sum]) -> Sum:
        """What the loop does with the sum before the step."""
        dtype = total.dtype.type
        if self.fault == "assigned":
            return made[1].copy()
        if self.fault == "multiplied":
            return total * dtype(0.25)
        if self.fault == "declared":
            self.ledger.factor(0.25)
            return total * dtype(0.25)
        if self.fault == "dropped":
            return None
        return total


PLANTED: dict[str, tuple[str, str, str]] = {
    "cleared": ("w", "fault", "the sum was cleared after arrival 2, and is lost"),
    "lost": ("w", "fault", "not in the sum: arrival 3"),
    "only the last": ("w", "fault", "only the last of 4 arrivals counts: the sum was replaced each time"),
    "only the first": ("w", "fault", "only the first of 4 arrivals counts"),
    "twice": ("w", "fault", "counts twice: arrivals 2, 3, 4"),
    "doubled": ("w", "fault", "doubled the sum: arrivals 2, 3, 4"),  # the first one is right
    "scaled": ("w", "fault", "the sum was multiplied at arrivals 2, 3, 4"),
    "noise": ("w", "warning", "changed by other code at arrivals 2, 3, 4"),
    "assigned": ("w", "fault", "only arrival 2 of 4 counts (before the step)"),
    "dropped": ("w", "fault", "the sum was cleared after arrival 4, and is lost"),
    "not cleared": ("w", "fault", "not cleared: the sum begins with an earlier gradient"),
    "forgotten": ("the loss", "fault", "each micro-batch counts 1, expected 0.25: the loop forgets to divide by 4"),
    "twice divided": ("the loss", "fault", "each micro-batch counts 0.0625, expected 0.25: the loop divides"),
    "multiplied": ("the loss", "fault", "each micro-batch counts 0.0625, expected 0.25"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault: str, dtype: str) -> None:
    name, verdict, text = PLANTED[fault]
    rows = Loop(1, fault, dtype=dtype).run()
    found = [row for row in rows if row.parameter == name and row.verdict == verdict and row.happened.startswith(text)]
    assert found, "\n".join(map(str, rows))


def right_loops(count: int) -> Iterator[str]:
    """Random loops that are right; the alarms."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        ledger = Ledger(expect=["mean", "sum"][seed % 2])
        k = int(rng.choice([1, 2, 5, 16, 40]))
        dtype = rng.choice(["float32", "float64", "float16"])
        shapes = {f"p{i}": (int(rng.choice([1, 3, 200, 5000])), int(rng.choice([1, 2]))) for i in range(3)}
        weight = 1 / k if seed % 2 == 0 else 1.0
        for _ in range(int(rng.integers(1, 4))):
            sums: dict[str, Sum] = {}
            for name, shape in shapes.items():
                sums[name] = None if rng.random() < 0.5 else np.zeros(shape, dtype)
            for _ in range(k):
                ledger.weight(weight)
                for name, shape in shapes.items():
                    if rng.random() < 0.1:
                        continue  # takes no part
                    g = (rng.normal(size=shape) * (rng.random(size=shape) < rng.choice([0.01, 0.5, 1.0]))).astype(dtype)
                    ledger.made(name, g, sums[name])
                    sums[name] = g.copy() if sums[name] is None else sums[name] + g
                    ledger.arrived(name, sums[name])
            alarms = [row for row in ledger.read(sums) if row.verdict not in ("right", "note")]
            # A narrow sum that is right may lose digits, and the audit says so.
            yield from (str(row) for row in alarms if not row.happened.startswith(f"right, but {dtype} loses"))


def test_a_micro_batch_in_which_no_parameter_takes_part_counts() -> None:
    ledger, total = Ledger(), np.zeros(20)
    for k in range(4):
        ledger.weight(1 / 4)
        if k != 1:
            g = np.random.default_rng(k).normal(size=20)
            ledger.made("w", g, total)
            total = total + g
            ledger.arrived("w", total)
    assert [row.verdict for row in ledger.read({"w": total})] == ["right", "right"]


@pytest.mark.parametrize("count", sizes(40, 1000))
def test_right_loops_raise_no_alarm(count: int) -> None:
    assert list(right_loops(count)) == []


@pytest.mark.parametrize("n", [1, 8, 300, 100_000])
def test_a_ledger_keeps_4_kib_a_parameter_whatever_the_number_of_gradients(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    arrived = Ledger.arrived

    def arrive(ledger: Ledger, name: str, total: Sum) -> None:
        arrived(ledger, name, total)
        at = ledger._places["w"]
        seen.append(ledger.records["w"].nbytes + (0 if at is None else at.nbytes))

    monkeypatch.setattr(Ledger, "arrived", arrive)
    for k in (2, 200):
        seen.clear()
        Loop(0, k=k, n=n).run()
        assert 0 < max(seen) <= 4096, (n, k, max(seen))


def test_factors_are_declared_or_judged_with_the_weights() -> None:
    ledger = Ledger()
    g = np.random.default_rng(0).normal(size=(2, 300))
    for f, declared in [(0.5, True), (0.5, False), (1.0, True)]:
        ledger.made("w", g[0])
        ledger.arrived("w", g[0])
        ledger.made("w", g[1], g[0])
        ledger.arrived("w", g[0] + g[1])
        if declared:
            ledger.factor(0.5)
        ledger.read({"w": (g[0] + g[1]) * f})
    assert [row.verdict for row in ledger.rows if row.parameter == "w"] == ["right", "fault", "fault"]
    assert "not multiplied by 0.5" in ledger.rows[-1].happened


def test_a_micro_batch_with_the_weight_of_another_is_named() -> None:
    ledger = Ledger(weights=[1, 3])
    for weight in (0.75, 0.25):
        ledger.weight(weight)
        ledger.made("w", np.ones(3))
        ledger.arrived("w", np.ones(3))
    row = ledger.read({"w": np.ones(3)})[0]
    assert row.verdict == "fault" and "micro-batch 1 has the weight of micro-batch 2" in row.happened


def test_what_the_loop_drops_by_intent_is_no_fault() -> None:
    ledger = Ledger()
    ledger.made("w", np.ones(300))
    ledger.arrived("w", np.ones(300))
    ledger.discard()
    ledger.made("w", np.ones(300))
    ledger.arrived("w", np.ones(300))
    assert ledger.read({"w": np.ones(300)})[1].verdict == "right"


def test_check_raises_an_error_with_a_line_for_each_fault() -> None:
    loop = Loop(0, "lost")
    loop.run(1)
    with pytest.raises(AuditError, match="1 fault:\nw: fault: not in the sum: arrival 3"):
        loop.ledger.check()
    right = Loop(0)
    right.run()
    right.ledger.check()


def test_the_table_has_a_line_for_parameters_of_one_verdict() -> None:
    ledger = Ledger()
    for name in ("a", "b", "c"):
        ledger.made(name, np.ones(3))
        ledger.arrived(name, np.ones(3))
    ledger.read({"a": np.ones(3), "b": np.ones(3), "c": None})
    lines = str(ledger).splitlines()
    assert lines[0].split() == ["parameter", "verdict", "what", "happened"]
    assert re.match(r"c +fault +.*\[\+ cleared\]$", lines[1]) and re.match(r"a and 1 other +right", lines[3])
    assert repr(ledger) == "<fanin.audit.Ledger: 3 parameters, 1 step read>"


def test_wrong_arguments_are_refused_by_name_and_nothing_is_lost() -> None:
    with pytest.raises(ValueError, match='expect is "mean" or "sum"'):
        Ledger(expect="max")  # type: ignore[arg-type]
    ledger = Ledger()
    with pytest.raises(KeyError, match="w: call made before arrived"):
        ledger.arrived("w", np.ones(3))
    for wrong in (np.ones(3, int), np.ones(3, complex), "x"):
        with pytest.raises(TypeError, match="audit: w: expected an array of float64, float32 or float16"):
            ledger.made("w", wrong)
    with pytest.raises(ValueError, match=r"audit: w: expected a sum of the gradient's shape \(3,\), got \(4,\)"):
        ledger.made("w", np.ones(3), np.zeros(4))
    for bad, kind in (("3", TypeError), ([1], TypeError), (float("nan"), ValueError)):
        with pytest.raises(kind, match=r"audit: weight: expected a (finite )?number"):
            ledger.weight(bad)  # type: ignore[arg-type]
        with pytest.raises(kind, match=r"audit: share: expected a (finite )?number"):
            ledger.weight(0.5, bad)  # type: ignore[arg-type]
        with pytest.raises(kind, match=r"audit: weights: expected a (finite )?number"):
            Ledger(weights=[1, bad])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="audit: weights: expected a sequence of numbers, got an int"):
        Ledger(weights=3)  # type: ignore[arg-type]
    ledger.made("w", np.ones(3))
    for other in (np.ones(4), np.ones(3, "float32")):
        with pytest.raises(ValueError, match=r"audit: w: expected float64 of shape \(3,\), as before"):
            ledger.arrived("w", other)
    ledger.arrived("w", np.ones(3))
    with pytest.raises(TypeError, match="audit: read: expected a mapping from names to sums, got"):
        ledger.read(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="audit: read: no sum of w: give None"):
        ledger.read({"W": np.ones(3)})
    assert ledger.read({"w": np.ones(3), "never used": None})[1].verdict == "right"


def test_leaves_of_fanin_show_their_gradients_by_two_hooks() -> None:
    ledger = Ledger()
    w = fanin.Leaf(np.zeros(300))

    def made(g: Any) -> None:
        ledger.made("w", g, w.grad)

    w.register_hook(made)
    w.register_post_accumulate_grad_hook(lambda leaf: ledger.arrived("w", leaf.grad))
    for i in range(3):
        ledger.weight(1 / 3)
        if i == 2:
            w.grad = None
        fanin.backward([(w, 0, np.random.default_rng(i).normal(size=300))])
    row = ledger.read({"w": w.grad})[1]
    assert row.verdict == "fault" and "cleared after arrival 2" in row.happened
