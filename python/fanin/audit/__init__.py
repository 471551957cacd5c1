"""Audit a training loop: whether each gradient reaches the sum that the optimizer reads, once.

    ledger = fanin.audit.Ledger()
    ledger.made("w", g, total)  # before a gradient is added
    ledger.arrived("w", total)  # after it
    ledger.read({"w": total})  # before the optimizer's step: a row for each parameter

`fanin.torch.audit` does so by hooks, around a loop as it is.
"""

from .ledger import Ledger
from .rows import AuditError, Row

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["AuditError", "Ledger", "Row"]
