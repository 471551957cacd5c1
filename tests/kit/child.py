"""A forked child of the tests' own process: the one place that forks it."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable


def in_child(act: Callable[[], None]) -> int:
    """The child's exit status: 0: `act` returned; 256: it raised.

    Libraries with threads that another test has imported here, and Python from 3.12 on, warn of a fork. It is a
    RuntimeWarning or a DeprecationWarning, no fault of the test that forks, and comes or not by what ran before it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]
