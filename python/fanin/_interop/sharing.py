"""The addresses of arrays that the C core cannot read itself: torch's tensors, objects with DLPack.

`overlap`, `overlaps` and `overlaps_itself` (fanin.sharing) call csrc/py/arrays/overlap.c. Only addresses, shapes and
strides are read; conjugate and negative bits and requires_grad do not matter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

from .arrays import capsule_of, is_host
from .classes import exports, has_memory, is_jax, is_sparse, is_subclass_of_known, is_tensor, is_torch, named
from .protocols import Tensor
from .records import READ_ONLY, BorrowedCapsule, Memory, Refusal, Refused, Region
from .streams import NO_SYNC
from .torch import is_sum, layout_of, quicken

__tracebackhide__ = True  # no frames of ours in reports of pytest

DEVICE_TYPES = {"cpu": 1, "cuda": 2, "mps": 8, "xpu": 14}


def memory_of(x: object) -> Memory:
    """Where x lies, for the core."""
    if is_sparse(x):
        return Refused(
            TypeError, f"{named(x)} is sparse and has several memories; expected one array: give its parts one by one"
        )
    if is_tensor(x):
        torch = sys.modules["torch"]
        quicken()
        if layout_of(x) != "strided":
            return Refused(
                TypeError, f"the torch.Tensor has layout {layout_of(x)}; expected strided: give its parts one by one"
            )
        plain = getattr(type(x), "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
        if not has_memory(x) or not plain:
            return Refused(TypeError, f"{named(x)} wraps other tensors or has no memory; expected a tensor with memory")
        kind = DEVICE_TYPES.get(x.device.type)
        if kind is None:
            return Refused(TypeError, f"the torch.Tensor is on {x.device}, whose addresses are unknown")
        address, size = x.data_ptr(), x.element_size()
        if address == 0 and x.numel():
            return Refused(TypeError, f"{named(x)} has no memory; expected a tensor with memory")
        strides = tuple(s * size for s in x.stride())
        return Region(address, tuple(x.shape), strides, size, str(x.dtype), True, kind, x.device.index or 0)
    if is_jax(x) and x.is_deleted():
        return Refused(TypeError, "the jax.Array has been deleted; expected one that still has its memory")
    if exports(x) and not is_subclass_of_known(x):  # by a capsule, which the core reads and gives back
        if not hasattr(type(x), "__dlpack_device__"):
            return BorrowedCapsule(x.__dlpack__())
        kind, _ = x.__dlpack_device__()
        if not is_host(kind):
            # No stream: nothing is read, so nothing needs to be waited for.
            return BorrowedCapsule(x.__dlpack__(stream=NO_SYNC, max_version=(1, 3)))
        try:
            return BorrowedCapsule(capsule_of(x, READ_ONLY).capsule)
        except Refusal as e:
            return e.as_record()
    return Refused(
        TypeError,
        f"{named(x)} is no array in memory; expected an ndarray, a tensor, or an object with a buffer or __dlpack__",
    )


def has_parts_alone(x: object) -> bool:
    """Whether a torch tensor of layout sparse_coo on the CPU, of which the caller has the only reference, alone has the
    memory of its indices and values (L3, L7): no tensor beside it has it (as `detach()` makes one), no view of a part,
    no other process, and no library lent it.
    """
    if not is_torch(x) or layout_of(x) != "sparse_coo" or x.requires_grad or weakref.getweakrefcount(x):
        return False
    below = getattr(sys.modules["torch"]._C, "_AutoDispatchBelowADInplaceOrView", None)
    if below is None or not hasattr(x, "_use_count") or x._use_count() != 1:
        return False
    made_here = is_sum(x)
    with below():  # else views of the parts come
        parts = [x._values(), x._indices()]
    return is_alone(parts.pop(), made_here) and is_alone(parts.pop(), made_here)


def is_alone(part: Tensor, made_here: bool) -> bool:
    """Whether a sparse tensor alone has this part of it, and this its memory: as often as of a tensor that is new."""
    torch = sys.modules["torch"]
    return (
        part._use_count() == 2  # of the sparse tensor, and `part`
        and memory_counts(part, made_here) == memory_counts(torch.empty(1))
        and not weakref.getweakrefcount(part)
        and part.is_contiguous()
    )


def memory_counts(x: Tensor, made_here: bool = False) -> tuple[int, ...]:
    """The references that torch and Python count to a tensor's memory and to its storage object; whether torch's
    allocator made the memory (or fanin, if `made_here`); whether other processes may have it. Something else has the
    memory if these are not those of a new tensor.
    """
    count: Callable[[int], int] = sys.modules["torch"]._C._storage_Use_Count
    memory = x.untyped_storage()
    return (
        count(memory._cdata),
        sys.getrefcount(memory),
        weakref.getweakrefcount(memory),
        memory.resizable() or made_here,
        memory.is_shared() and x.device.type == "cpu",  # on a GPU all memory says so
    )
