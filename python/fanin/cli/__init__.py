"""The command line: `fanin demo`, `fanin check`, `fanin compare`, `fanin info`. `python -m fanin` is the same."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType

from fanin import __version__, _need

#: The parts that a command needs, which a copy of fanin may lack.
NEEDS = {"demo": ("sim", "dist"), "check": ("sim",), "compare": (), "info": ()}
#: The first part of those that this copy lacks, of the commands that need one.
MISSING = {
    command: lacks[0]
    for command, parts in NEEDS.items()
    if (lacks := [part for part in parts if not importlib.util.find_spec(f"fanin.{part}")])
}
COMMANDS: tuple[ModuleType, ...] = tuple(
    importlib.import_module(f"{__name__}.{command}") for command in NEEDS if command not in MISSING
)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    whole = argparse.ArgumentParser(
        prog="fanin",
        description="The input buffer of an autograd engine: ordered sums of gradients, on streams.",
        epilog="examples:\n  fanin demo\n  fanin check examples/06_check_me.py\n  fanin compare a.json b.json\n"
        "  fanin demo --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"fanin {__version__}")
    commands = whole.add_subparsers(metavar="command", required=True)
    width = max(20, min(shutil.get_terminal_size().columns - 2, 120))
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        description, _, examples = (module.HELP).partition("\n\nexamples:\n")
        one = commands.add_parser(
            name,
            help=description.partition("\n")[0].rstrip("."),
            description="\n\n".join(textwrap.fill(p, width) for p in description.split("\n\n")),
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(one)
        one.set_defaults(run=module.run)
    for name, part in MISSING.items():
        one = commands.add_parser(name, add_help=False, prefix_chars="+")  # whatever its options
        one.add_argument("rest", nargs=argparse.REMAINDER)
        one.set_defaults(run=lambda _, name=name, part=part: _need(part, name))
    return whole


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 all is well, 1 something was found, 2 it could not be tried."""
    for name in ("stdout", "stderr"):  # output that is closed (`>&-`) is discarded, so that no file gets its number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            options = parser().parse_args(words)
            status: int = options.run(options)
        finally:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nfanin: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        silence()
        return 141
    except (OSError, ModuleNotFoundError) as e:
        if isinstance(e, ModuleNotFoundError) and not MISSING:
            raise
        print(f"fanin: {e}", file=sys.stderr)
        silence()
        return 2


def silence() -> None:
    """If output cannot be written any more, let it go: Python would complain once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
