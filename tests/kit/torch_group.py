"""A process group of torch's in the process of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Groups stay until Python ends. To free one, torch waits for its threads while it holds the interpreter's lock; a
#: thread that has just ended an operation may wait for that lock to drop a tensor, and then neither goes on.
KEPT: list[Any] = []


@contextlib.contextmanager
def group_alone(folder: Path) -> Iterator[None]:
    """A group of one rank over Gloo."""
    dist: Any = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
