"""What a compiled function can stand in for: the one list of what a record of tensors may hold.

    an output is                                              made for the caller
    no tensor, or a tensor on memory of no argument           what the compiled function returns
    an argument                                               the argument itself
    a view of one, by torch's own view functions (`VIEWS`)    a view of the argument, by `as_strided`
    such a view made under no_grad or in inference mode       the same, made in that mode
    a view by detach(), .data or view(dtype), or of such      the same view of the argument's detach() or .data

    a write is                                                done to the caller's tensor
    by torch's in-place functions, with gradients enabled     copy_, with gradients enabled
    the same under no_grad, or in ways that add no history    copy_ under no_grad
    a write that no version counts (.data, NumPy, DLPack)     copy_ to .data

Everything else is refused by name: a `torch.autograd.Function` or a hook whose gradient a view made anew would lose,
a history that the argument does not have, another storage on its memory. `tie_of` decides about an output, `Reads`
sees what the function reads or sets on the way, `check_writes` decides about writes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .._interop.torch import layout_of
from .calls import meet, shows

__tracebackhide__ = True  # no frames of ours in reports of pytest

torch: Any = importlib.import_module("torch")
Tensor = Any

#: The view functions of torch whose backward is that of `as_strided`: the names of their nodes before "Backward".
VIEWS = frozenset({
    "Alias", "AsStrided", "Conj", "Diagonal", "Expand", "NegView", "Permute", "ReshapeAlias", "Select", "Slice",
    "Split", "SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "Unfold", "Unsqueeze", "View", "ViewAsComplex",
    "ViewAsReal",
})  # fmt: skip

#: What a function may call instead.
REMEDY = "expected no compiler, or torch.compile of the function itself"


def uncompiled(what: str) -> ValueError:
    """The error for what a compiled function cannot do."""
    return ValueError(f"functionalize: {what}: a compiled function cannot do that; {REMEDY}")


@dataclass(frozen=True)
class Tie:
    """How an output is a view of an argument, and so how it is made anew."""

    source: int
    """The argument, by its number."""
    grown: bool
    """It has the argument's history."""
    base: int | None
    """None where its base is that of the argument; else which of the detached tensors it is a view of."""
    is_base: bool
    """It is that detached tensor."""
    counted: bool
    """Writes to it count as writes to the argument."""
    creation: Any
    """How autograd calls the way in which the view was made; None for what is no view."""

    def like(self, other: Tie) -> bool:
        """Whether two runs made the same."""
        mine = self.grown, self.base, self.is_base, self.counted, self.creation
        return mine == (other.grown, other.base, other.is_base, other.counted, other.creation)


def root_of(t: Tensor) -> Tensor:
    """The tensor that has the history of a view."""
    return t if t._base is None else t._base


def storage_of(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def has_storage(t: Tensor) -> bool:
    """Whether a tensor has one storage, and no transform of torch.func wraps it."""
    return layout_of(t) == "strided" and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def version_of(t: Tensor) -> int | None:
    """None for a tensor of inference mode."""
    return None if t.is_inference() else t._version


def tie_of(o: Tensor, tensors: Sequence[Tensor], near: Iterable[int], detached: list[Tensor]) -> Tie | str:
    """How an output on the memory of arguments is a view of one; or why it is none of the list.

    `near`: the arguments whose memory it is in, the closest first. `detached`: the bases without a history of earlier
    outputs; one of this output is appended.
    """
    same = [u for u in near if storage_of(tensors[u]) == storage_of(o)]
    if not same:
        return "lies on the memory of an argument, by a storage of its own (NumPy, DLPack)"
    if any(root_of(tensors[u]) is o for u in same):
        return "is the base of an argument, and no argument"
    if o.requires_grad and (o._backward_hooks or o.retains_grad):
        return "is a view of an argument, with a hook, or retains its gradient"
    try:
        node = o.grad_fn
    except RuntimeError as e:
        return f"is a view whose history autograd refuses to give ({str(e).partition('.')[0]})"
    base = o._base
    creation = None if base is None else torch._C._autograd._get_creation_meta(o)
    own = [u for u in same if base is not None and base is root_of(tensors[u])]
    if own:
        root = root_of(tensors[own[0]])
        if node is not None:
            leaves = [u for u in own if tensors[u].is_leaf and tensors[u].requires_grad]
            found = unlisted(node, root, [tensors[u] for u in leaves])
            if isinstance(found, str):
                return f"is a view of an argument, {found}"
            own = own if found is None else [u for u in leaves if tensors[u] is found]
        if node is None and root.requires_grad and creation == torch._C._autograd.CreationMeta.DEFAULT:
            return "is a view of an argument without its history"
        return Tie(own[0], node is not None, None, False, True, creation)
    whole = o if base is None else base
    if o.requires_grad and whole.is_leaf:
        return "is a leaf of its own on the memory of an argument"
    if o.requires_grad or whole.requires_grad:
        return "is on the memory of an argument, with a gradient that is not the argument's"
    counted = [u for u in same if counts_with(whole, tensors[u])]
    number = next((k for k, known in enumerate(detached) if known is whole), len(detached))
    if number == len(detached):
        detached.append(whole)
    return Tie((counted or same)[0], False, number, whole is o, bool(counted), creation)


def unlisted(node: Any, root: Tensor, leaves: Sequence[Tensor]) -> Tensor | str | None:
    """None where all nodes on the way from a view to the history of its root are of the list; the leaf among `leaves`
    where the way ends in that, which may be a view of a root without a history; else in words what is not.
    """
    end, number, at = root.grad_fn, root.output_nr, None
    while not (node is end and at == number):
        name = node.name()
        if name == "torch::autograd::AccumulateGrad" and (
            node.variable is root or any(node.variable is t for t in leaves)
        ):
            return None if node.variable is root else node.variable
        plain = re.fullmatch(r"(\w+)Backward\d+", name)
        if plain is None or plain[1] not in VIEWS or len(node.next_functions) != 1:
            return f"by {name}, which is none of torch's view functions"
        node, at = node.next_functions[0]
        if node is None:
            return "with a history that leads nowhere"
    return None


def counts_with(t: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one version counter; `other` is a private copy."""
    if t.is_inference() or other.is_inference():
        return False
    setter = torch._C._autograd._unsafe_set_version_counter
    was, before = other._version, t._version
    setter((other,), (was + 1,))
    same = t._version != before
    setter((other,), (was,))
    return bool(same)


#: What modules with hooks of a whole backward put around their inputs and outputs: a Function that `unlisted` finds.
MODULE_HOOK = torch.nn.modules._functions.BackwardHookFunction._backward_cls


def in_function() -> bool:
    """Whether a `torch.autograd.Function` runs: by what it alone disables, gradients of both modes. `torch.no_grad`
    leaves those of forward mode enabled. `apply` has a frame only up to torch 2.13.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_grad_enabled() or torch.is_inference_mode_enabled())


class Reads(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """What a function reads of tensors that a copy of an argument answers otherwise (whether it is a leaf, its
    gradient, where it lies in its storage), and which of them get hooks.
    """

    named: ClassVar = {
        torch.Tensor.is_leaf.__get__: "is_leaf is read",
        torch.Tensor.grad.__get__: ".grad is read",
        torch.Tensor.grad.__set__: ".grad is set",
        torch.Tensor.grad.__delete__: ".grad is set",
    }
    #: what a view made anew would not have
    hooking: ClassVar = {
        torch.Tensor.register_hook: "a hook is added to a view of it",
        torch.Tensor.retain_grad: "a view of it retains its gradient",
        torch.Tensor.grad_fn.__get__: "grad_fn is read of it, or of a view of it, and a node can have hooks",
    }
    #: and whether it depends on all of the storage
    places: ClassVar = {
        torch.Tensor.storage_offset: False,
        torch.Tensor.untyped_storage: True,
        torch.Tensor.storage: True,
    }

    def __init__(self) -> None:
        super().__init__()
        #: copies of which the function reads such a thing, by identity, and what
        self.found: dict[int, str] = {}
        #: storages in which it reads a place: whether it reads of all of it, too
        self.storages: dict[int, bool] = {}
        #: storages of which a tensor gets a hook, and in which words
        self.hooks: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func in self.named:
            self.found.setdefault(id(args[0]), self.named[func])
        elif func in self.places and has_storage(args[0]):
            with torch._C.DisableTorchFunctionSubclass():
                storage = storage_of(args[0])
                self.storages[storage] = self.places[func] or self.storages.get(storage, False)
        result = func(*args, **(kwargs or {}))
        if func in self.hooking and has_storage(args[0]):
            with torch._C.DisableTorchFunctionSubclass():
                if args[0].requires_grad and not isinstance(result, MODULE_HOOK):
                    self.hooks.setdefault(storage_of(args[0]), self.hooking[func])
        return result


def hides(o: object, arrays: Sequence[Any]) -> bool:
    """Whether a result that is no strided tensor is on the memory of one of some arrays."""
    if isinstance(o, torch.Tensor):
        parts: list[object] = [o._indices(), o._values()] if layout_of(o) == "sparse_coo" and o.is_cpu else []
    elif isinstance(o, (torch.UntypedStorage, torch.TypedStorage)):
        parts = [torch.empty(0, dtype=torch.uint8).set_(getattr(o, "_untyped_storage", o))]
    else:
        parts = [o] if isinstance(o, np.ndarray) or shows(o) else []
    return any(meet(part, array) for part in parts for array in arrays)


def unlisted_writes(
    tensors: Sequence[Tensor], grown: Iterable[int], seen: Iterable[int], in_functions: Iterable[int]
) -> Mapping[int, str]:
    """Of arguments that a write gave a history, those whose write is none of the list, and why. `seen`, `in_functions`:
    storages that torch's in-place functions wrote with gradients enabled; and within a Function.
    """
    found = {}
    for u in grown:
        storage = storage_of(tensors[u])
        if storage in set(in_functions):
            found[u] = "it is written by a torch.autograd.Function, and has its history"
        elif storage not in set(seen):
            found[u] = "it has a history that no in-place function of torch gave it"
    return found
