"""For training with torch: gradients of micro-batches, summed with one rounding.

    with fanin.torch.accumulate(model.parameters(), dtype=torch.float32):
        for x, y in micro_batches:
            loss(model(x), y).backward()

torch adds each micro-batch's gradient to `.grad` in the parameter's dtype, rounding every time: of 64 bfloat16 gradients little is right after
the sixteenth. Here they are summed in float32 and rounded once.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterable
from typing import Any

try:
    import torch
except ImportError as e:  # pragma: no cover - depends on what is installed
    raise ImportError("fanin.torch needs torch, which is not installed; fanin itself does not depend on it") from e

from . import _core
from .slots import Slot

__all__ = ["accumulate"]

_lock = threading.Lock()
_taken: dict[int, str] = {}  # parameters whose gradients some accumulate() collects now: id -> its name there


class accumulate:
    """Collect the gradients of several backward passes and leave their sums in `.grad`: a context manager.

    parameters: tensors that are leaves, or (name, tensor) pairs as `named_parameters()` has them; names are used in errors. Those that ask for no
    gradient are passed over, a parameter that comes twice counts once. dtype: in which the sum runs (a torch dtype, a NumPy dtype, a name, or
    "exact"); by default float32 for float16, bfloat16 and float8, else the parameter's own. into: "grad", or "main_grad" for a tensor in the dtype
    of the sum beside `.grad`, which is made where there is none. budget: bytes of gradients that are kept before they are folded into
    the running sums (`fanin.InputBuffer`).

    A gradient that is there at the beginning is the first term, as in torch. While the block runs `.grad` is None after each backward pass. At the
    end, also of a block that raised, what has come is summed and left where it was asked for; a parameter without a gradient keeps None.

    Raises TypeError (no tensor, no leaf), ValueError (`into`, a parameter that another block collects), ImportError (no torch).
    Source: hooks are `torch.Tensor.register_post_accumulate_grad_hook`; sums are rule A11 of docs/rules.md.

    >>> import torch  # doctest: +SKIP
    >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)  # doctest: +SKIP
    >>> with fanin.torch.accumulate(model.parameters(), dtype=torch.float32):  # doctest: +SKIP
    ...     for x in torch.randn(64, 8, 4, dtype=torch.bfloat16):
    ...         model(x).square().mean().backward()
    >>> model.weight.grad.dtype  # doctest: +SKIP
    torch.bfloat16
    """

    def __init__(self, parameters: Iterable[Any], dtype: Any = None, *, into: str = "grad", budget: float | None = None) -> None:
        if into not in ("grad", "main_grad"):
            raise ValueError(f'accumulate: into is "grad" or "main_grad", not {into!r}')
        self.into = into
        self._parameters, self._names = _leaves(parameters)
        slots = [
            Slot(shape=tuple(p.shape), dtype=p.dtype if into == "grad" else None, accumulate=dtype, name=name)
            for p, name in zip(self._parameters, self._names, strict=True)
        ]
        self._buffer = _core.InputBuffer(slots, budget=budget, name="accumulate")
        self._sums = [_sum_dtype(p, slot.accumulate) for p, slot in zip(self._parameters, slots, strict=True)]
        self._came = [False] * len(slots)
        self._hooks: list[Any] = []

    def __enter__(self) -> accumulate:
        with _lock:
            for p, name in zip(self._parameters, self._names, strict=True):
                if id(p) in _taken:
                    raise ValueError(f"accumulate: the gradient of {name} is collected by another block already, as {_taken[id(p)]}")
            _taken.update((id(p), name) for p, name in zip(self._parameters, self._names, strict=True))
        try:
            for slot, p in enumerate(self._parameters):
                first = getattr(p, self.into, None)
                if first is not None:
                    self._buffer.add(slot, first.detach())
                if self.into == "grad":
                    p.grad = None
                self._hooks.append(p.register_post_accumulate_grad_hook(self._collector(slot)))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: types.TracebackType | None) -> None:
        self._end()

    def _collector(self, slot: int) -> Any:
        def collect(p: Any) -> None:
            if p.grad is not None:
                self._buffer.add(slot, p.grad.detach())
                self._came[slot] = True
                p.grad = None

        return collect

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with _lock:
            for p in self._parameters:
                _taken.pop(id(p), None)
        if self.into == "grad":
            for p, total in zip(self._parameters, self._buffer.take(writable=True), strict=True):
                if total is not None:  # else .grad stays: None, or what was there where the block could not begin
                    p.grad = total
        else:
            outs = self._main_grads()
            self._buffer.take(out=outs)
            for p, out in zip(self._parameters, outs, strict=True):
                if out is not None:
                    p.main_grad = out
        self._came = [False] * len(self._came)

    def _main_grads(self) -> list[Any]:
        """Where the sums of "main_grad" go: the tensors that are there, or new ones; None where nothing came."""
        outs: list[Any] = []
        for p, dtype, came in zip(self._parameters, self._sums, self._came, strict=True):
            there = getattr(p, "main_grad", None)
            outs.append(torch.empty(p.shape, dtype=dtype, device=p.device) if there is None and came else there)
        return outs


def _leaves(parameters: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """Each tensor once, and what it is called."""
    if isinstance(parameters, torch.Tensor):
        raise TypeError("accumulate: expected several tensors, got one: give [tensor]")
    tensors: dict[int, Any] = {}
    names: list[str] = []
    for i, one in enumerate(parameters):
        name, p = one if isinstance(one, tuple) and len(one) == 2 else (f"parameters[{i}]", one)
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"accumulate: expected tensors, or (name, tensor) pairs, got a {type(p).__name__} as {name}")
        if not p.requires_grad or id(p) in tensors:
            continue
        if not p.is_leaf:
            raise TypeError(f"accumulate: {name} is no leaf: what an operation made has no .grad; expected the tensor that it was made of")
        tensors[id(p)] = p
        names.append(str(name))
    return list(tensors.values()), names


def _sum_dtype(p: Any, accumulate: Any) -> Any:
    """The torch dtype of a sum that is left in the accumulation dtype."""
    if accumulate is None or (isinstance(accumulate, str) and accumulate == "exact"):
        return torch.float32 if p.dtype.itemsize < 4 else p.dtype
    return getattr(torch, str(_core.dtype_name(accumulate)))
