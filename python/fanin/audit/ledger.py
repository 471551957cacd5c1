"""The ledger of a training loop: what was made, what arrived, and what the optimizer reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._checks import number, sequence
from .._words import counted, type_of
from . import rounding
from .losses import LOSS, Expect, Losses, not_judged
from .places import SAMPLES, Indices, chosen
from .record import FEW, Record
from .rounding import Vector
from .rows import Row, Verdict, check, table

__tracebackhide__ = True  # no frames of ours in reports of pytest

Array = np.ndarray[Any, Any]
NEAR = 2.0**-20  # a fraction by which factors of all parameters may differ
ROWS = 4096  # rows that are kept; of further steps only what is not right


class Ledger:
    """Compare the gradients that passes make with the sums that an optimizer reads: a few lines in a loop.

    `made` before a gradient is added, `arrived` after it, `read` before the optimizer's step. The ledger looks at 256
    elements of each gradient, among those that are not zero, bit for bit; a fault that changes a fraction f of the
    elements is seen with probability 1 - (1 - f)^256. It keeps at most 4 KB for each parameter of 4 bytes an element
    and fewer, whatever the number of gradients.

    `fanin.torch.audit` is this ledger with torch's hooks.

    Parameters
    ----------
    expect : str
        "mean": each of K micro-batches should count 1/K; "sum": 1. Judged where `weight` is called.
    weights : sequence of float, optional
        What the micro-batches of a step count relative to each other, such as their numbers of tokens.
    full : bool
        Look at every element.

    Raises
    ------
    TypeError
        `weights` is no sequence of numbers.
    ValueError
        An unknown `expect`; a weight that is not finite.

    Notes
    -----
    Source: prototypes; bits decide, because least squares over a sketch of the gradients finds coefficients from 0.69
    to 1.27 in a right loop of 32 bfloat16 micro-batches.

    Examples
    --------
    A loop that clears its sum in each micro-batch:

    >>> ledger = fanin.audit.Ledger()
    >>> for g in np.random.default_rng(0).normal(size=(3, 50)):
    ...     total = np.zeros(50)
    ...     ledger.made("w", g, total)
    ...     total += g
    ...     ledger.arrived("w", total)
    >>> print(ledger.read({"w": total})[1])
    w: fault: only the last of 3 arrivals counts: the sum was cleared each time
    """

    __slots__ = (
        "__weakref__",
        "_declared",
        "_places",
        "_rows",
        "_shapes",
        "expect",
        "full",
        "losses",
        "records",
        "steps",
    )

    def __init__(self, *, expect: Expect = "mean", weights: Sequence[float] | None = None, full: bool = False) -> None:
        if not isinstance(expect, str) or expect not in ("mean", "sum"):
            raise ValueError(f'audit: expect is "mean" or "sum", not {expect!r}')
        if weights is not None:
            weights = [_weight("audit: weights", w) for w in sequence("audit: weights", weights, "numbers")]
        self.expect: Expect = expect
        self.full = full
        self.losses = Losses(expect, weights)
        self.records: dict[str, Record] = {}
        self.steps = 0
        self._declared: list[float] = []
        self._places: dict[str, Indices | None] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        self._rows: list[Row] = []

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all steps that were read, in order."""
        return tuple(self._rows)

    def __str__(self) -> str:
        return table(self._rows, self.steps)

    def __repr__(self) -> str:
        return f"<fanin.audit.Ledger: {counted(len(self.records), 'parameter')}, {counted(self.steps, 'step')} read>"

    def made(self, name: str, gradient: object, total: object = None) -> None:
        """Record a gradient that is not added yet.

        Parameters
        ----------
        name : str
            The parameter's.
        gradient : array
            Of any shape, in float64, float32 or float16.
        total : array, optional
            The sum so far, of the same shape; None: there is none.

        Raises
        ------
        TypeError
            Not an array, or of another dtype.
        ValueError
            Another shape, or another dtype of the sum, than before.
        """
        array, sum_ = _array(name, gradient), None if total is None else _array(name, total)
        record = self._record(name, array if sum_ is None else sum_, array)
        x = self._at(name, array)
        if np.count_nonzero(x) < FEW and self._places.get(name) is not None and array.any():
            self._choose(name, array)
            record.renewed(None if sum_ is None else self._at(name, sum_))
            x = self._at(name, array)
        self.losses.ran = True
        record.made(self._wide(record, x), None if sum_ is None else self._wide(record, self._at(name, sum_)))

    def arrived(self, name: str, total: object) -> None:
        """Record the sum after a gradient was added.

        Raises
        ------
        KeyError
            `made` was not called for the parameter.
        """
        if name not in self.records:
            raise KeyError(f"audit: {name}: call made before arrived")
        array = _array(name, total)
        record = self._record(name, array, array)
        record.arrived(self._wide(record, self._at(name, array)))

    def weight(self, weight: float, share: float | None = None) -> None:
        """Record the number by which the loop multiplies the loss of a micro-batch, before its gradients are made.

        Parameters
        ----------
        weight : float
            The factor.
        share : float, optional
            What the micro-batch should count relative to the others, such as its number of tokens.

        Raises
        ------
        TypeError, ValueError
            Not a number, or not a finite one.
        """
        factor = _weight("audit: weight", weight)
        part = None if share is None else _weight("audit: share", share)
        if self.losses.losses:
            self.losses.ran = True  # each call begins a micro-batch, also where no parameter took part in the last one
        loss = self.losses.add(part)
        loss.weights.append((0, factor))
        loss.tolerance = 1e-6

    def factor(self, f: float) -> None:
        """Declare that the loop multiplies the sums of this step by a number."""
        self._declared.append(float(f))

    def discard(self) -> None:
        """Declare that the loop drops what has arrived in this step, as after an overflow."""
        for record in self.records.values():
            record.discard("discarded")
        self.losses.start()
        self._declared.clear()

    def read(self, totals: Mapping[str, object]) -> list[Row]:
        """Compare with what the optimizer reads, and end the step.

        Parameters
        ----------
        totals : mapping
            The sum of each parameter, or None where there is none.

        Returns
        -------
        list of Row
            Of the losses and of each parameter that was named so far.

        Raises
        ------
        TypeError
            Not a mapping.
        KeyError
            It lacks a parameter that was named.
        """
        if not isinstance(totals, Mapping):
            raise TypeError(f"audit: read: expected a mapping from names to sums, got {type_of(totals)}")
        for name in self.records:
            if name not in totals:
                raise KeyError(f"audit: read: no sum of {name}: give None for a parameter that has none")
        values: dict[str, Vector | None] = {}
        for name, record in self.records.items():
            total = totals[name]
            if total is not None:
                array = _array(name, total)
                self._record(name, array, array)
                values[name] = self._wide(record, self._at(name, array))
            else:
                values[name] = None
        return self.close(values)

    # For frontends that sample by themselves

    def close(
        self,
        values: Mapping[str, Vector | None],
        scale: float = 1.0,
        step: int | None = None,
        total: float | None = None,
    ) -> list[Row]:
        """End the step with the sampled elements that the optimizer reads.

        Parameters
        ----------
        values : mapping
            Those of each parameter.
        scale : float
            A factor of all sums.
        step : int, optional
            The number of the step, for rows.
        total : float, optional
            What the weights of this step sum to, for ranks: their mean over ranks.

        Returns
        -------
        list of Row
            The row of the losses is the first one.
        """
        self.losses.over_ranks = total
        at = self.steps if step is None else step
        weighed = any(loss.weights for loss in self.losses.losses) and not any(x.unlike for x in self.losses.losses)
        quiet = not any(record.began or record.pending for record in self.records.values())
        for name, record in self.records.items():
            record.look(values.get(name), "before the step")
        shared = [f.value for record in self.records.values() for f, _, _ in record.factors if f.decided]
        clips = [c for record in self.records.values() for c in record.clips]
        rows = []
        scales: dict[str, tuple[float, float]] = {}
        for name, record in self.records.items():
            y = values.get(name)
            if quiet and not rounding.empty(y):
                record.excuse = record.excuse or "no pass has run since the audit began"
            row = record.read(y, self._declared, shared, clips, weighed)
            if record.moving and not record.unscaled and not record.excuse:
                scales[name] = record.scale
            rows.append(row)
        first, of = self._weights(scales, scale, weighed, {row.parameter: row.verdict for row in rows})
        rows = [first, *(of.get(row.parameter, row) for row in rows)]
        rows = [dataclasses.replace(row, step=at) for row in rows]
        self.steps += 1
        self._rows += rows if len(self._rows) < ROWS else [r for r in rows if r.verdict == "fault"][:1]
        for record in self.records.values():
            record.start()
        self.losses.start()
        self._declared.clear()
        return rows

    def _weights(
        self, scales: dict[str, tuple[float, float]], scale: float, weighed: bool, kept: dict[str, Verdict]
    ) -> tuple[Row, dict[str, Row]]:
        """The row of the losses, and those of parameters whose sums are multiplied by another number than most."""
        groups: list[tuple[float, float, list[str]]] = []
        for name, (low, high) in sorted(scales.items(), key=lambda item: item[1][1] - item[1][0]):
            for i, (a, b, names) in enumerate(groups):
                if max(a, low) * (1 - NEAR) <= min(b, high) * (1 + NEAR):
                    groups[i] = (min(max(a, low), b), max(min(b, high), a), [*names, name])
                    break
            else:
                groups.append((low, high, [name]))
        low, high, alike = max(groups, key=lambda group: len(group[2]), default=(1.0, 1.0, []))
        row = self.losses.judge(low * scale * (1 - NEAR), high * scale * (1 + NEAR))
        if row is None:
            return not_judged(self.expect), {}
        if not scales and row.verdict == "fault":
            return Row(LOSS, "not judged", f"other code changed the gradients, too: {row.happened}"), {}
        wrong = {}
        for a, b, names in groups:
            for name in names:
                if weighed and names is not alike and kept[name] not in ("fault", "undecided"):
                    most = f"most others by {(low + high) / 2:.4g}"
                    wrong[name] = Row(name, "fault", f"multiplied by {(a + b) / 2:.4g}, {most}")
        return row, wrong

    # Samples of arrays

    def _record(self, name: str, total: Array, like: Array) -> Record:
        """The record of a parameter, whose shape and dtype are as they were."""
        known = self._shapes.get(name)
        if known is None:
            if like.shape != total.shape:
                raise ValueError(
                    f"audit: {name}: expected a sum of the gradient's shape {like.shape}, got {total.shape}"
                )
            dtype = str(total.dtype)
            self._shapes[name] = (total.shape, dtype)
            self.records[name] = Record(name, dtype)
            self._choose(name, like)
        elif known != (total.shape, str(total.dtype)) or like.shape != total.shape:
            raise ValueError(
                f"audit: {name}: expected {known[1]} of shape {known[0]}, as before, got {total.dtype} of shape"
                f" {total.shape if like.shape == total.shape else like.shape}"
            )
        return self.records[name]

    def _choose(self, name: str, array: Array) -> None:
        n = array.size
        if n <= SAMPLES or self.full:
            self._places[name] = None
            return
        flat = array.reshape(-1)
        again = name in self._places
        self._places[name] = chosen(name, n, lambda at: flat[at], lambda: np.flatnonzero(flat), int(again))

    def _at(self, name: str, array: Array) -> Array:
        places = self._places[name]
        return array.reshape(-1).copy() if places is None else array.reshape(-1)[places]

    def _wide(self, record: Record, x: Array) -> Vector:
        return x.astype(rounding.carrier(record.dtype))

    def check(self) -> None:
        """Raise AuditError if a row is a fault, or undecided."""
        check(self._rows)


def _weight(what: str, x: object) -> float:
    """A finite number."""
    n = number(what, x)
    if not math.isfinite(n):
        raise ValueError(f"{what}: expected a finite number, got {n}")
    return n


def _array(name: str, x: object) -> Array:
    """An array of a dtype whose sums are replayed."""
    array = np.asarray(x)
    if str(array.dtype) not in ("float64", "float32", "float16"):
        what = f"{array.dtype}" if isinstance(x, np.ndarray) else type_of(x)
        raise TypeError(f"audit: {name}: expected an array of float64, float32 or float16, got {what}")
    return array
