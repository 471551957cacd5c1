"""Subclasses of torch's tensors that tests use as parameters and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map


class Plain(torch.Tensor):
    """A subclass with torch's own `__torch_function__`."""


class Wrapped(torch.nn.Parameter):
    """A Parameter with a `__torch_function__` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Disabled(torch.nn.Parameter):
    """A Parameter without `__torch_function__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Two(torch.Tensor):
    """A wrapper of two tensors, without memory of its own."""

    def __new__(cls, a: Any, b: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), dtype=a.dtype, strides=a.stride())

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = []
        for name in ("a", "b"):
            inner = tree_map(lambda x, name=name: getattr(x, name) if isinstance(x, Two) else x, (args, kwargs))
            made.append(func(*inner[0], **inner[1]))
        if not isinstance(made[0], torch.Tensor):
            return made[0]
        return return_and_correct_aliasing(func, args, kwargs, Two(*made))
