"""Files that a command writes, checked before the work begins, so that an unwritable folder is reported at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def claim(path: Path) -> None:
    """Find out, before the work, whether `path` can be written later; its folder is made. OSError, which names the
    path, if not. Nothing is left there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.is_file():  # else a pipe or a device, which is written as it is
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        elif not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
