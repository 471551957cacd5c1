"""`fanin info`: what is here."""

from __future__ import annotations

import argparse
import json

import fanin

HELP = """Print the versions, features and devices of this installation, and why something is missing.

examples:
  fanin info
  fanin info --json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> int:
    found = fanin.info()
    print(json.dumps(found, indent=1) if options.json else found)
    return 0
