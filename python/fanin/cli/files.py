"""Files that a command writes, checked before the work begins, so that an unwritable folder is reported at once."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from fanin._files import write_whole


def claim(path: Path) -> None:
    """Find out, before the work, whether `path` can be written later; its folder is made. OSError, which names the
    path, if not. Nothing is left there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_regular(path):
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        elif not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


def write(path: Path, text: str) -> None:
    """The file, whole or not at all; a pipe or a device is written as it is."""
    if is_regular(path):
        write_whole(str(path), lambda out: out.write(text.encode()))
    else:
        path.write_text(text)


def is_regular(path: Path) -> bool:
    """Whether there is nothing at `path`, or a file that another one may take the place of."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True
