"""PyTorch's own metadata of a function, for comparison with fanin's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors as upstream
from torch._functorch._aot_autograd.collect_metadata_analysis import run_functionalized_fw_and_collect_metadata
from torch._subclasses.fake_tensor import FakeTensorMode


def faked(args: list[Any]) -> tuple[Any, list[Any]]:
    mode = FakeTensorMode()
    return mode, [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]


def upstream_meta(fn: Callable[..., Any], args: list[Any], keep: bool = False, descs: Any = None) -> Any:
    """PyTorch's own metadata of a function."""
    mode, fake = faked(args) if not any(type(x).__name__ == "FakeTensor" for x in args) else (FakeTensorMode(), args)
    mode = next((x.fake_mode for x in fake if hasattr(x, "fake_mode")), mode)
    descs = descs or [upstream.PlainAOTInput(i) for i in range(len(args))]
    with mode:
        return run_functionalized_fw_and_collect_metadata(fn, flat_args_descs=descs, keep_input_mutations=keep)(*fake)
