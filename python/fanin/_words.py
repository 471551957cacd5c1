"""Numbers and rules as words, for messages."""

from __future__ import annotations

S_RULES = 22  # the first bits of a set of rules are S, the rest A


def counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def fitted(svg: str) -> str:
    """SVG for a notebook: never wider than its cell."""
    return svg.replace("<svg", '<svg style="max-width: 100%; height: auto"', 1)


def type_of(x: object) -> str:
    """The type of an object for messages: "an int", "a list", "None"."""
    name = type(x).__name__
    return "None" if x is None else f"{'an' if name[:1] in 'AEIOaeio' or name == 'ndarray' else 'a'} {name}"


def ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def rule_names(bits: int) -> tuple[str, ...]:
    """The rules of a set of bits, as ("S9", "A6")."""
    numbers = (i for i in range(64) if bits >> i & 1)
    return tuple(f"S{i + 1}" if i < S_RULES else f"A{i + 1 - S_RULES}" for i in numbers)


def rules_of(bits: int) -> str:
    """The same as text: "S9, A6"."""
    return ", ".join(rule_names(bits))


def size(n: float) -> str:
    """A number of bytes as text: "512 KiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n >= unit:
            return f"{n / unit:.4g} {name}"
    return f"{n:.0f} B"
