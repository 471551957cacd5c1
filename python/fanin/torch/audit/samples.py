"""Sampled elements of torch's gradients, as NumPy arrays."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from ... import _core
from ..._interop.torch import quicken
from ..._words import type_of
from ...audit import places, rounding
from ...audit.rounding import Vector

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: The dtypes whose sums are replayed, and those of their parts.
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.complex128: "float64",
    torch.complex64: "float32",
}
ROWS = 2048  # rows of a sparse gradient that a sketch reads
COLUMNS = 16  # elements of each
BUCKETS = places.SAMPLES
#: Classes of tensors that need no look at their methods.
OWN = (torch.Tensor, torch.nn.Parameter)


class Unlike(Exception):
    """A gradient that cannot be compared; the message says why, after the parameter's name."""


def refuse_dispatching(what: str, x: torch.Tensor) -> None:
    """Unlike for a tensor of a subclass with a `__torch_dispatch__`, such as one that wraps other tensors."""
    if type(x) not in OWN and type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unlike(f"its {what} is {type_of(x)}, a subclass with a __torch_dispatch__ of its own")


class Samples:
    """The places of one parameter at which its gradients and its sum are read.

    Parameters
    ----------
    name : str
        Seeds the choice.
    total : torch.Tensor
        What the sum is like: its shape, dtype and layout.
    full : bool
        Read every element.
    spread : bool
        Choose the same places on all ranks.
    """

    def __init__(self, name: str, total: torch.Tensor, full: bool, spread: bool) -> None:
        self.name, self.spread = name, spread
        quicken()
        refuse_dispatching("gradient", total)
        self.sparse = total.layout == torch.sparse_coo
        if not self.sparse and total.layout != torch.strided:
            raise Unlike(f"its gradient has the layout {total.layout}")
        if total.dtype not in DTYPES:
            raise Unlike(f"sums of {total.dtype} are not replayed")
        self.tensor_dtype, self.shape = total.dtype, total.shape
        self.complex = total.dtype.is_complex
        self.dtype = DTYPES[total.dtype]
        self.n = total.numel() * (2 if self.complex else 1)
        self.whole = full or self.n <= places.SAMPLES
        self.index: torch.Tensor | None = None
        self.places: np.ndarray[Any, Any] | None = None  # the same, where the elements are read on the host
        self.again = 0
        if self.sparse:
            if self.dtype not in ("float32", "float64") or self.complex or total.sparse_dim() != 1:
                raise Unlike(f"its gradient is sparse, of {total.dtype} and {total.sparse_dim()} sparse dimensions")
            self.dtype = rounding.ROWS
            self.width = max(1, self.n // self.shape[0])
            rng = np.random.default_rng([zlib.crc32(name.encode()), 1])
            self.columns = torch.from_numpy(rng.integers(0, self.width, COLUMNS))
            self.one_in = max(1, total._nnz() // ROWS)  # rows of which one is read

    @property
    def nbytes(self) -> int:
        return 0 if self.index is None else self.index.nbytes

    def check(self, x: torch.Tensor) -> None:
        """Unlike if a sum has changed so that it cannot be compared with what was there."""
        refuse_dispatching("sum", x)
        if x.dtype != self.tensor_dtype or x.shape != self.shape:
            was = f"{self.tensor_dtype} of shape {tuple(self.shape)}"
            raise Unlike(f"its sum changed from {was} to {x.dtype} of shape {tuple(x.shape)}")
        if (x.layout == torch.sparse_coo) != self.sparse:
            raise Unlike("its gradients are sparse and dense")

    def choose(self, like: torch.Tensor) -> None:
        """Choose the places, by a gradient."""
        if self.whole or self.sparse:
            return
        if self.spread:
            found = places.spread(self.name, self.n)
        else:
            flat = self._parts(like).reshape(-1)
            found = places.chosen(
                self.name,
                self.n,
                lambda at: flat[torch.from_numpy(at)].float().cpu().numpy(),
                lambda: torch.nonzero(flat).view(-1).cpu().numpy(),
                self.again,
            )
        self.again += 1
        self.places, self.index = found, torch.from_numpy(found).to(like.device)

    def _parts(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of real numbers that requires no gradient."""
        if x.requires_grad:
            x = x.detach()
        if self.complex:
            x = torch.view_as_real(x.resolve_conj())
        return x

    def at(self, x: torch.Tensor) -> Vector:
        """The sampled elements: a copy."""
        if self.sparse:
            return self._sketch(x)
        index = self.index
        read = _core._elements(x, self.places)
        if read is not None:
            return read
        x = self._parts(x)
        if index is None:
            x = x.reshape(-1).clone()
        elif x.is_contiguous():
            x = x.view(-1).index_select(0, index)
        else:
            x = x.take(index.long())
        if x.dtype is not torch.float32 and x.dtype is not torch.float64:
            x = x.float()
        found: Vector = x.numpy() if x.is_cpu else x.cpu().numpy()
        return found

    def dead(self, x: Vector, gradient: torch.Tensor) -> bool:
        """Whether the gradient has elements that are not zero elsewhere, and few here."""
        if self.whole or self.sparse or self.spread or self.again > 8:
            return False
        here = int(np.count_nonzero(x))
        return here < rounding.ENOUGH and int(torch.count_nonzero(gradient)) > here

    def _sketch(self, x: torch.Tensor) -> Vector:
        """Sums with signs of the stored elements, in buckets by place: linear, and never dense."""
        x = x.detach()
        rows = x._indices()[0].clone()  # numpy() forbids to resize memory, so it is called for copies alone
        values = x._values().reshape(len(rows), self.width)
        ids = rows.cpu().numpy().astype(np.uint64)
        read = _hashed(ids) % np.uint64(self.one_in) == 0
        some = torch.from_numpy(np.flatnonzero(read))
        columns = self.columns
        picked = values.index_select(0, some.to(values.device)).index_select(1, columns.to(values.device))
        numbers = picked.double().cpu().numpy()
        at = _hashed(ids[read][:, None] * np.uint64(COLUMNS) + np.arange(COLUMNS, dtype=np.uint64))
        signs = np.where(at & np.uint64(1), 1.0, -1.0)
        buckets = ((at >> np.uint64(8)) % np.uint64(BUCKETS)).astype(np.int64)
        return np.bincount(buckets.ravel(), (numbers * signs).ravel(), BUCKETS).astype(np.float64)


def _hashed(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A number of 64 bits for each, by which they are spread (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
