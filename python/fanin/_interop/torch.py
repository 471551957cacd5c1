"""torch's tensors, in and out. A tensor whose memory does not hold its value is never read directly."""

from __future__ import annotations

import functools
import sys
import types

from .. import _core
from ..slots import Sparse
from .classes import TABLE, TORCH, attribute, has_memory, is_torch, table_of
from .protocols import Shape, Tensor
from .records import READ_ONLY, WRITABLE, Capsule, Dense, SparseArray, refuse
from .sparse import Part
from .streams import NO_SYNC, library_stream, wait_for

__tracebackhide__ = True  # no frames of ours in reports of pytest

CUDA = 2  # DLPack's device type of torch's "cuda"

# In


@functools.cache
def quicken() -> None:
    """Tensors are read through torch's exchange table where it has one: torch 2.10 and later."""
    torch = sys.modules["torch"]
    table = getattr(torch.Tensor, TABLE, None)
    if table is not None:
        base, graph = torch._C.TensorBase, torch.autograd.graph
        # The table throws where one of these differs. A mode runs Python code when it is read.
        plain = (base.layout, torch.strided, base.is_nested, False, base.is_meta, False)
        modes = torch._C._is_torch_function_mode_enabled
        _core.quick_tensors(torch.Tensor, table, torch.Tensor.is_neg, base.requires_grad, (modes, *plain), graph, TORCH)
        if _core.table_known(table, TORCH):
            _core.read_by_table(torch.Tensor, TORCH, True)


def skip_frames(code: types.CodeType) -> bool:
    """Keep Dynamo from compiling the frames of a code object, and those that they call. False: this torch cannot."""
    if attribute("torch", "_C", "_dynamo", "eval_frame", "set_code_exec_strategy") is None:
        return False
    frames = sys.modules["torch"]._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(code, strategy)
    return True


def layout_of(x: Tensor) -> str:
    """Its layout by name: "strided", "sparse_coo", .."""
    return str(x.layout).removeprefix("torch.")


def torch_of(x: Tensor, ready: _core.Stream | None = None) -> Dense | SparseArray | None:
    """A tensor; None: it is an object to us, without memory of its own."""
    quicken()
    if not has_memory(x):
        return None
    if x.is_quantized:
        refuse(_core.DTypeError, "a quantized torch.Tensor has no sum; expected x.dequantize()")
    if x.device.type not in ("cpu", "cuda"):
        refuse(BufferError, f"the torch.Tensor is on {x.device}; expected memory of the host or of a CUDA device")
    x = x.detach() if x.requires_grad else x
    layout = layout_of(x)
    if layout == "strided":
        return Dense(TORCH, x, source_of(x, ready))
    if layout == "sparse_coo":
        indices, values = source_of(x._indices(), ready), source_of(x._values(), ready)
        return SparseArray(TORCH, x, "coo", tuple(x.shape), indices, None, values, x.is_coalesced())
    format = layout.removeprefix("sparse_")
    if format not in ("csr", "csc", "bsr", "bsc"):
        refuse(BufferError, f"the torch.Tensor has layout {layout}; expected strided or sparse")
    if x.values().ndim != (3 if format in ("bsr", "bsc") else 1):
        refuse(BufferError, f"the torch.Tensor is a batch of {format} matrices or has dense axes; expected one matrix")
    pointers, indices, values = (source_of(t, ready) for t in strided_parts(x))
    return SparseArray(TORCH, x, format, tuple(x.shape), indices, pointers, values, False)


def strided_parts(x: Tensor) -> list[Tensor]:
    """The strided tensors that a torch tensor is made of: itself; of a sparse one its pointers, indices and values."""
    layout = layout_of(x)
    if layout == "strided":
        return [x]
    if layout == "sparse_coo":
        return [x._indices(), x._values()]
    rows = layout in ("sparse_csr", "sparse_bsr")
    return [x.crow_indices(), x.col_indices(), x.values()] if rows else [x.ccol_indices(), x.row_indices(), x.values()]


def source_of(x: Tensor, ready: _core.Stream | None = None) -> Capsule:
    """The memory of a strided tensor, or of a copy, which is not written, if the memory does not hold the value. On a
    CUDA device that copy runs on torch's current stream; nothing else is waited for, because a gradient is ready on
    its producer's stream.
    """
    torch = sys.modules["torch"]
    writes = WRITABLE
    if x._is_zerotensor():
        x, writes = torch.zeros(x.shape, dtype=x.dtype, device=x.device), READ_ONLY
    elif x.is_conj() or x.is_neg():
        x, writes = x.resolve_conj().resolve_neg(), READ_ONLY
    if x.device.type == "cpu":
        if x.numel():
            last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            if x.untyped_storage().nbytes() < (last + 1) * x.element_size():
                refuse(BufferError, f"the storage of the torch.Tensor was resized: it ends before element {last}")
        return Capsule(torch.utils.dlpack.to_dlpack(x.detach()), -1, 0, writes)
    index = x.device.index
    wait_for(x, index, ready, library_stream(x, index) if writes == READ_ONLY else None)
    table = table_of(type(x))
    capsule = torch.utils.dlpack.to_dlpack(x.detach()) if table is None else _core.table_take(table, x.detach())
    return Capsule(capsule, CUDA, index, writes)


# Out

SUM = "_fanin_sum"  # an attribute of sparse tensors in the core's memory that only the core has


def is_sum(x: object) -> bool:
    return hasattr(x, SUM)


def torch_out(part: Part) -> object:
    """A tensor over a sum. On a device nothing waits, because `take` has ordered the consumer's stream. Read-only
    memory, such as a gradient's own indices, is copied on the host, since torch's tensors are writable; of an expanded
    sum no more than what it repeats (A13).
    """
    try:
        capsule = part.__dlpack__(stream=NO_SYNC) if isinstance(part, _core.Array) else part.__dlpack__()
    except BufferError:
        if isinstance(part, _core.Array):
            raise
        base, shape = part.compact()
        expanded: object = sys.modules["torch"].utils.dlpack.from_dlpack(base.__dlpack__(copy=True)).expand(shape)
        return expanded
    made: object = sys.modules["torch"].utils.dlpack.from_dlpack(capsule)
    return made


def torch_sparse_out(
    format: str, shape: Shape, indices: Part, pointers: Part | None, values: Part, coalesced: bool
) -> object:
    torch = sys.modules["torch"]
    made: object
    if pointers is None:
        coo = torch.sparse_coo_tensor(torch_out(indices), torch_out(values), shape, check_invariants=False)
        made = coo._coalesced_(True) if coalesced else coo
        setattr(made, SUM, True)
        return made
    layout = getattr(torch, f"sparse_{format}")
    parts = (torch_out(pointers), torch_out(indices), torch_out(values))
    made = torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=False)
    return made


def torch_parts_out(
    format: str, shape: Shape, indices: Part, pointers: Part | None, values: Part, coalesced: bool
) -> Sparse:
    parts = (indices, values) if pointers is None else (pointers, indices, values)
    return Sparse(format, tuple(torch_out(p) for p in parts), shape)


def wrote(x: object) -> None:
    """Report a write by the core into x (`out=`): torch counts writes, so that a backward pass that needs the old value
    raises.
    """
    if is_torch(x):
        sys.modules["torch"].autograd.graph.increment_version(x)


def convert(x: Tensor, dtype: str) -> Tensor:
    return x.to(getattr(sys.modules["torch"], dtype))
