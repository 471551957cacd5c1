"""Calls that change gradients by intent: clipping by norm, and the steps of GradScaler.

While an audit is open, these functions of torch are wrapped, so that it sees the sums before and after each call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad

__tracebackhide__ = True  # no frames of ours in reports of pytest


class Seen(Protocol):
    """What an open audit does at such a call."""

    def begin(self) -> object:
        """Return the sums, before the call."""

    def end(self, before: Any, mark: str, scale: float) -> None:
        """Compare the sums after it. `scale` is a factor that the weights of losses have, too."""

    def reads(self) -> int:
        """Return how many steps the optimizer has read."""

    def skipped(self) -> None:
        """Begin the step anew, which GradScaler has skipped."""

    def has(self, parameters: Iterable[object]) -> bool:
        """Return whether the audit watches one of them."""

    def steps_by(self, optimizer: object) -> bool:
        """Return whether it is the audit's optimizer."""


_lock = threading.RLock()
_refs: list[weakref.ref[Seen]] = []  # of those that are open, so that a dropped one ends
_theirs: dict[str, Any] = {}


def watch(audit: Seen) -> None:
    """Wrap torch's functions for the first audit."""
    with _lock:
        _refs.append(weakref.ref(audit))
        if not _theirs:
            _install()


def unwatch(audit: Seen) -> None:
    """Unwrap them after the last one. May be repeated."""
    with _lock:
        _refs[:] = [ref for ref in _refs if ref() not in (None, audit)]
        if not _refs and _theirs:
            _restore()


def _open() -> list[Seen]:
    """The audits that are open."""
    return [audit for audit in (ref() for ref in [*_refs]) if audit is not None]


def _install() -> None:
    for owner, name, wrap in PLACES:
        original = getattr(owner, name, None)
        if original is not None:
            wrapper = functools.wraps(original)(wrap(original))
            _theirs[name] = (owner, original, wrapper)
            setattr(owner, name, wrapper)


def _restore() -> None:
    for name, (owner, original, wrapper) in [*_theirs.items()]:
        if getattr(owner, name, None) is wrapper:  # else other code has wrapped it once more
            setattr(owner, name, original)
        del _theirs[name]


def _around(audits: list[Seen], mark: str, scale: Callable[[], float], call: Callable[[], Any]) -> Any:
    """Call, and show the audits the sums before and after."""
    before = [audit.begin() for audit in audits]
    factor = scale()
    result = call()
    for audit, sums in zip(audits, before, strict=True):
        audit.end(sums, mark, factor)
    return result


def _clip(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        audits = [audit for audit in _open() if audit.has(parameters)]
        return _around(audits, "clipped", lambda: 1.0, lambda: original(parameters, *args, **kwargs))

    return clip


def _unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: Any) -> Any:
        audits = [audit for audit in _open() if audit.steps_by(optimizer)] if self.is_enabled() else []
        return _around(audits, "unscaled", lambda: 1 / float(self.get_scale()), lambda: original(self, optimizer))

    return unscale_


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        audits = [(audit, audit.reads()) for audit in _open() if audit.steps_by(optimizer)]
        result = original(self, optimizer, *args, **kwargs)
        for audit, reads in audits:
            if audit.reads() == reads:
                audit.skipped()
        return result

    return step


#: Where a function is looked up when it is called, its name, and what wraps it.
PLACES: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
    (clip_grad, "_clip_grads_with_norm_", _clip),
    (grad_scaler.GradScaler, "unscale_", _unscale),
    (grad_scaler.GradScaler, "step", _step),
]
