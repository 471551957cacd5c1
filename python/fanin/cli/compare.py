"""`fanin compare`: which node, slot and key differ first between two runs."""

from __future__ import annotations

import argparse
import sys

import fanin

HELP = """Name the first gradient or sum in which two runs differ, from their traces.

The traces are recorded with fanin.trace(digests=True) and saved with trace.save(path). What is found is the node that
made another gradient of equal sums, or the slot whose equal contributions gave another sum. The status is 0 where
nothing differs, 1 where something does, 2 where the files cannot be compared.

examples:
  fanin compare run-a.json run-b.json
  fanin compare all-ranks.json --ranks
  fanin compare all-ranks.json --ranks --leaves"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A.json", help="a trace with digests")
    parser.add_argument("b", metavar="B.json", nargs="?", help="a second one, of the same graph")
    parser.add_argument("--ranks", action="store_true", help="compare the ranks of A with each other")
    parser.add_argument("--leaves", action="store_true", help="compare only what leaves have after each pass")


def run(options: argparse.Namespace) -> int:
    try:
        found = fanin.compare(options.a, options.b, ranks=options.ranks, leaves=options.leaves)
    except ValueError as e:
        print(f"fanin: {e}", file=sys.stderr)
        return 2
    print(found)
    if found.difference is None and not found.compared:
        return 2
    return 0 if found else 1
