"""The folder of fanin.h, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from ._words import type_of

if TYPE_CHECKING:
    from pathlib import Path

__tracebackhide__ = True  # no frames of ours in reports of pytest


def get_include() -> str:
    """Return the folder of `fanin.h`, for extensions in C with nodes that run without the interpreter (docs/c-api.md).

    >>> import fanin, os
    >>> os.listdir(fanin.get_include())
    ['fanin.h']
    """
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def path_text(path: str | os.PathLike[str], what: str) -> str:
    """The path as text."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(f"{what}: expected a path, a str or an os.PathLike of one, got {type_of(text)}")
    if "\0" in text:
        raise ValueError(f"{what}: a path cannot hold a NUL, as {text!r} does")
    return text


def write_whole(path: str, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all. Its OSErrors name the path, not the temporary file."""
    import tempfile  # not at the start: it imports the compressors

    name = None
    try:
        if not path or os.path.isdir(path):
            code = errno.EISDIR if path else errno.ENOENT
            raise OSError(code, os.strerror(code))
        folder, last = os.path.split(path)
        handle, name = tempfile.mkstemp(prefix=f".{last[:40]}.", dir=folder or os.curdir)
        with os.fdopen(handle, "wb") as out:
            fill(out)
            out.flush()
            os.fsync(out.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException as e:
        if name is not None:
            os.unlink(name)
        if isinstance(e, OSError) and e.errno is not None and (name is None or e.filename in (None, name)):
            raise OSError(e.errno, e.strerror, path) from None
        raise


def claim(path: Path) -> None:
    """Find out, before the work, whether `path` can be written later; its folder is made. OSError, which names the
    path, if not. Nothing is left there.
    """
    import tempfile

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
