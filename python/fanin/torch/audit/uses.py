"""Uses of parameters in the forward: how many lead to a gradient."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import fanin

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Files whose frames are not a call site.
INSIDE = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (torch, fanin))
SITES = 8


class Uses(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Counts, for each parameter, calls that use it and those whose result leads back to it."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.counts = {id(p): [0, 0] for p in parameters}
        self.sites: dict[int, dict[str, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and torch.is_grad_enabled() and not _is_getter(func):
            for x in (*args, *(kwargs or {}).values()):
                count = self.counts.get(id(x))
                if count is not None and result is not x:
                    count[0] += 1
                    count[1] += result.requires_grad
                    sites = self.sites.setdefault(id(x), {})
                    if len(sites) < SITES:
                        sites[_site()] = result.requires_grad
        return result

    def start(self) -> None:
        """A step begins."""
        for count in self.counts.values():
            count[:] = 0, 0
        self.sites.clear()

    def words(self, p: torch.Tensor) -> str | None:
        """What is remarkable about the uses of a parameter."""
        uses, through = self.counts[id(p)]
        if not 0 < through < uses:
            return None
        sites = self.sites.get(id(p), {})
        where = ", ".join(f"{site}{'' if through else ' (detached)'}" for site, through in sites.items())
        return f"{uses} uses, {through} differentiable: {where}"


def _is_getter(func: Any) -> bool:
    """Whether a function reads an attribute, such as `.grad`; `.data` is a use."""
    data: Any = torch.Tensor.data
    return getattr(func, "__name__", "") == "__get__" and func != data.__get__


def _site() -> str:
    """The file and line that called torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(INSIDE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
