"""A script in the place of nvcc: it answers what fanin reads of nvcc, records each call, and writes a given file."""

from __future__ import annotations

from pathlib import Path

#: "made" lies beside the script: what it writes; "nvcc.log" has a line for each call.
SCRIPT = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$0.log"
case "$*" in
--version) echo "Cuda compilation tools, release 13.2, V13.2.1" ;;
--list-gpu-code) echo sm_50 sm_75 sm_90 sm_90a sm_999 ;;
--help) echo "--threads" ;;
*) while [ "$1" != -o ]; do source=$1; shift; done; cat "$source" > "$here/source"; cat "$here/made" > "$2" ;;
esac
"""
MADE = b"PFU\xba and what comes after"


def fake_nvcc(folder: Path, old: str = "", new: str = "", made: bytes = MADE) -> Path:
    """Writes the script to `folder`, with `new` for `old`."""
    folder.mkdir(parents=True, exist_ok=True)
    assert old in SCRIPT
    path = folder / "nvcc"
    path.write_text(SCRIPT.replace(old, new) if old else SCRIPT)
    path.chmod(0o755)
    (folder / "made").write_bytes(made)
    return path


def calls(nvcc: Path) -> list[str]:
    """The arguments of each call so far."""
    log = nvcc.with_name("nvcc.log")
    return log.read_text().splitlines() if log.exists() else []
