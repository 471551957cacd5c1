"""Threads that fanin starts: a thread of a simulated machine starts others of that machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Here(threading.local):
    """Thread-local: the function that starts a thread; None outside of simulated machines."""

    spawn: Callable[..., Any] | None = None


here = _Here()
