"""For training with torch: gradients of micro-batches, summed with one rounding.

    with fanin.torch.accumulate(model.parameters(), dtype=torch.float32):
        for x, y in micro_batches:
            loss(model(x), y).backward()

torch adds each micro-batch's gradient to `.grad` in the parameter's dtype and rounds every time: a sum of 64 bfloat16
gradients loses most of what comes after the sixteenth. Here they are summed in float32 and rounded once.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

try:
    import torch as _torch  # noqa: F401
except ImportError as e:  # pragma: no cover - depends on what is installed
    raise ImportError("fanin.torch needs torch, which is not installed; fanin itself does not depend on it") from e

from .accumulation import accumulate
from .fan_ins import backward

if TYPE_CHECKING or find_spec("fanin.audit"):
    from .audit import audit

if TYPE_CHECKING or find_spec("fanin.dist"):  # a copy of fanin may lack it
    from ..dist.torch_ranks import ReduceScatter, ddp_hook

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["ReduceScatter", "accumulate", "audit", "backward", "ddp_hook"]
