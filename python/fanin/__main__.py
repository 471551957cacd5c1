"""`python -m fanin` is the command `fanin`."""

from __future__ import annotations

import sys

from fanin.cli import main

if __name__ == "__main__":
    sys.exit(main())
