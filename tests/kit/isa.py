"""The instruction sets that sums may use on this machine."""

from __future__ import annotations

import pytest

import fanin


def isas() -> list[str]:
    """Their names, as `fanin.set_options(isa=)` takes them, the narrowest first."""
    with pytest.raises(ValueError, match=r"this machine has") as caught:
        fanin.set_options(isa="none of them")
    return [word.strip(" '") for word in str(caught.value).partition("has")[2].split(",")]
