"""A thread that sends for a reducer or a group, beside the thread that runs a pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__tracebackhide__ = True  # no frames of ours in reports of pytest


class Sender:
    """A thread for the work of its owner, which begins with the first. No work keeps the process from its end."""

    def __init__(self, owner: object, name: str) -> None:
        self.work: SimpleQueue[Any] = SimpleQueue()  #: what the thread calls; `end` ends it
        #: Dies with the owner, and then is put by C code alone, in which no Ctrl-C is lost.
        self.end = weakref.ref(owner, self.work.put)
        self.name = name
        self._begun = False

    def put(self, work: Callable[[], None]) -> None:
        """Let the thread call `work`, which raises nothing. If this raises, it may call it or not."""
        if not self._begun:
            threading.Thread(target=_work_of, args=(self.work, self.end), name=self.name, daemon=True).start()
            self._begun = True  # after Ctrl-C before this line a second thread begins, which does no harm
        self.work.put(work)

    def close(self) -> None:
        """End the thread after the work that was put, if it has begun. May be repeated."""
        if self._begun:
            self.work.put(self.end)


def _work_of(queue: SimpleQueue[Any], end: object) -> None:
    """Do what comes in a queue, until `end`."""
    while (work := queue.get()) is not end:
        work()
        del work  # it has the owner, whose end is the thread's
    queue.put(end)  # for a second thread
