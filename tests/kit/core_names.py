"""The declarations of the C core, csrc/py/core.pyi, and which of its names users meet."""

from __future__ import annotations

from pathlib import Path

import fanin
from fanin import _core
from kit.support import CSRC

SIGNATURES = CSRC / "py/core.pyi"
#: The same beside the built core, where there may be no sources.
BUILT = Path(_core.__file__).with_name("_core.pyi")


def public() -> set[str]:
    """The names that the package shows, and the types of what their objects return."""
    shown = {id(getattr(module, name)) for module in (fanin, fanin.sim) for name in module.__all__}
    return {"Target", "Machine", "Walk", "GraphFunction", "GraphStep"} | {
        name for name in dir(_core) if id(getattr(_core, name)) in shown and not name.startswith("_")
    }
