"""Parameters whose gradients DistributedDataParallel averages over ranks."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

from ...audit.record import Record

__tracebackhide__ = True  # no frames of ours in reports of pytest


def replicas(parameters: list[torch.Tensor]) -> dict[int, Any]:
    """The DistributedDataParallel module of each parameter that has one, by the parameter's id."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    from torch.nn.parallel import DistributedDataParallel

    ours = {id(p) for p in parameters}
    found: dict[int, Any] = {}
    for module in [x for x in gc.get_objects() if type(x) is DistributedDataParallel]:
        for name, p in module.module.named_parameters():
            if id(p) in ours and name not in module.parameters_to_ignore:
                found[id(p)] = module
    return found


def average(records: dict[str, Record], modules: dict[str, Any], total: float) -> tuple[float, int]:
    """Judge the averages of this step: all ranks of a module call this, with the same parameters.

    Parameters
    ----------
    records, modules : dict
        Of the parameters, by name.
    total : float
        The sum of this rank's weights.

    Returns
    -------
    float, int
        The mean of these sums over ranks, and how many ranks there are.
    """
    ranks = 1
    for module in {id(m): m for m in modules.values()}.values():
        names = [name for name in records if modules.get(name) is module]
        group = module.process_group
        ranks = torch.distributed.get_world_size(group)
        each = []
        for name in names:
            record = records[name]
            n = 0 if record.drift is None else len(record.drift)
            each += [np.array([float(n > 0)]), _fit(record.drift), _fit(record.moved)]
        wire = torch.from_numpy(np.concatenate([np.array([total]), *each]))
        device = next(module.module.parameters()).device
        wire = wire.to(device)
        torch.distributed.all_reduce(wire, group=group)
        total = float(wire[0]) / ranks
        sums = wire[1:].cpu().numpy().reshape(len(names), -1)
        for name, row in zip(names, sums, strict=True):
            record = records[name]
            if record.drift is not None and row[0] == ranks:
                width = (len(row) - 1) // 2
                n = min(len(record.drift), width)
                record.averaged(row[1 : 1 + n], row[1 + width : 1 + width + n], ranks)
            elif record.drift is not None:
                record.excuse = "ranks averaged it in this step, and not all of them saw so"
    return total, ranks


def _fit(x: Any) -> Any:
    """As many numbers on each rank."""
    wide = np.zeros(256)
    if x is not None:
        wide[: len(x)] = x[:256]
    return wide
