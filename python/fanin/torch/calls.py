"""Calls that change gradients by intent: clipping by norm, and the steps of GradScaler.

While an audit or a block of `accumulate` is open, these functions of torch are wrapped: an audit sees the sums before
and after each call, and a block refuses calls that would find no gradient.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

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
#: Called before a call, with its name and the parameters: raises to refuse it.
Guard: TypeAlias = Callable[[str, list[Any]], object]
_guards: list[Guard] = []
_theirs: dict[str, Any] = {}
_wrapped: dict[str, tuple[Any, Any]] = {}  # the last function of each name that was wrapped, and its wrapper


def watch(audit: Seen) -> None:
    """Wrap torch's functions for the first audit."""
    with _lock:
        _refs.append(weakref.ref(audit))
        _install()


def unwatch(audit: Seen) -> None:
    """Unwrap them after the last one. May be repeated."""
    with _lock:
        _refs[:] = [ref for ref in _refs if ref() not in (None, audit)]
        _restore()


def guard(check: Guard) -> None:
    """Call a function before each of torch's. May be repeated."""
    with _lock:
        if check not in _guards:
            _guards.append(check)
        _install()


def unguard(check: Guard) -> None:
    """Call it no more. May be repeated."""
    with _lock:
        _guards[:] = [one for one in _guards if one is not check]
        _restore()


def _open() -> list[Seen]:
    """The audits that are open."""
    return [audit for audit in (ref() for ref in [*_refs]) if audit is not None]


def _install() -> None:
    if _theirs:
        return
    for owner, name, wrap in PLACES:
        original = getattr(owner, name, None)
        if original is None:
            continue
        known, wrapper = _wrapped.get(name, (None, None))
        if known is not original:
            wrapper = functools.wraps(original)(wrap(original))
            _wrapped[name] = (original, wrapper)
        _theirs[name] = (owner, original, wrapper)
        setattr(owner, name, wrapper)


def _restore() -> None:
    if _refs or _guards:
        return
    for name, (owner, original, wrapper) in [*_theirs.items()]:
        if getattr(owner, name, None) is wrapper:  # else other code has wrapped it once more
            setattr(owner, name, original)
        del _theirs[name]


def _check(call: str, parameters: list[Any]) -> None:
    for check in [*_guards]:
        check(call, parameters)


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
        _check("clip_grad_norm_()", parameters)
        audits = [audit for audit in _open() if audit.has(parameters)]
        return _around(audits, "clipped", lambda: 1.0, lambda: original(parameters, *args, **kwargs))

    return clip


def _unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: Any) -> Any:
        if self.is_enabled():
            _check("GradScaler.unscale_()", [p for group in optimizer.param_groups for p in group["params"]])
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
