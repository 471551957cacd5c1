"""Counts memory of sums over ranks."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

from fanin import _core


class Messages:
    """Counts the bytes of messages that are alive: what a reducer has of gradients, sums and messages, but for exact
    sums.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.new = _core.message_new
        monkeypatch.setattr(_core, "message_new", self.counted)

    def counted(self, size: int) -> Any:
        made = self.new(size)
        self.add(size)
        weakref.finalize(made, self.add, -size)
        return made

    def add(self, size: int) -> None:
        with self.lock:
            self.now += size
            self.most = max(self.most, self.now)
