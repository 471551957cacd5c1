"""`fanin.torch.audit`: whether each gradient of a training loop reaches what the optimizer reads."""

from .block import audit

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["audit"]
