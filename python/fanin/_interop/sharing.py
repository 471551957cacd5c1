"""Where the memory of an array lies that the C core cannot ask by itself: torch's tensors, whatever has DLPack.

`overlap`, `overlaps` and `overlaps_itself` are the core's (csrc/py/overlap.c). Only addresses, shapes and strides are
looked at; what a tensor's memory stands for (a conjugate, a negative, a gradient that is asked for) does not matter.
"""

from __future__ import annotations

import sys
from typing import Any

from . import arrays

#: (address, shape, strides in bytes, item size, dtype, may it be written, DLPack's device type and number); or a DLPack
#: capsule alone; or the class and the text of a refusal, which the core completes.
Memory = (
    tuple[int, tuple[int, ...], tuple[int, ...], int, str, bool, int, int] | tuple[Any] | tuple[type[Exception], str]
)

DEVICE_TYPES = {"cpu": 1, "cuda": 2, "mps": 8, "xpu": 14}


def memory_of(x: Any) -> Memory:
    """Where x lies, for the core."""
    if arrays.is_sparse(x):
        return (
            TypeError,
            f"{arrays.named(x)} is sparse and has several memories; expected one array: give its parts one by one",
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return tensor_memory(x)
    if arrays.is_jax(x) and x.is_deleted():
        return (TypeError, "the jax.Array has been deleted; expected one that still has its memory")
    if hasattr(type(x), "__dlpack__") and not arrays.is_subclass_of_known(x):
        return dlpack_memory(x)
    return (
        TypeError,
        (
            f"{arrays.named(x)} is no array in memory; expected an ndarray, a tensor, or an object with a buffer or"
            " __dlpack__"
        ),
    )


def tensor_memory(x: Any) -> Memory:
    """A strided torch tensor that has memory of its own; parameters and other plain subclasses as well."""
    torch: Any = sys.modules["torch"]
    arrays.quicken()
    if str(x.layout) != "torch.strided":
        return (
            TypeError,
            (
                f"the torch.Tensor has layout {str(x.layout).removeprefix('torch.')}; expected strided: give its parts"
                " one by one"
            ),
        )
    if not arrays.has_memory(x) or type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            TypeError,
            f"{arrays.named(x)} wraps others or stands for memory that is not there; expected a tensor with memory",
        )
    kind = DEVICE_TYPES.get(x.device.type)
    if kind is None:
        return (TypeError, f"the torch.Tensor is on {x.device}, whose addresses are not known")
    address, size = x.data_ptr(), x.element_size()
    if address == 0 and x.numel():
        return (TypeError, f"{arrays.named(x)} has no memory; expected a tensor with memory")
    strides = tuple(s * size for s in x.stride())
    return (address, tuple(x.shape), strides, size, str(x.dtype), True, kind, x.device.index or 0)


def dlpack_memory(x: Any) -> Memory:
    """By a capsule, which the core reads and gives back."""
    if not hasattr(type(x), "__dlpack_device__"):
        return (x.__dlpack__(),)
    kind, _ = x.__dlpack_device__()
    if kind not in (arrays.CPU, arrays.CUDA_HOST):
        # No stream: nothing is read, so nothing needs to be waited for.
        return (x.__dlpack__(stream=-1, max_version=(1, 3)),)
    try:
        return (arrays.capsule_of(x, arrays.NEVER)[0],)
    except arrays.Refusal as e:
        return (e.kind, str(e))
