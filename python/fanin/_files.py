"""Files: where those of the package are, and those that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from typing import IO

from ._words import type_of


def get_include() -> str:
    """The folder of `fanin.h`, for extensions in C: nodes whose functions run without the interpreter (docs/c-api.md).

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
    """A file that appears whole or not at all. Its OSErrors name the path, whatever was written on the way."""
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
