"""One line of a trace: a decision, or a call of a device."""

from __future__ import annotations

from dataclasses import dataclass

from .._words import counted

__tracebackhide__ = True  # no frames of ours in reports of pytest

HOST = -1
WORK = ("sum", "finish", "copy", "cast", "reduce", "upload", "download", "fill", "zero", "scatter", "widen", "merge")
WHAT = {"c": "contribution", "s": "sum", "h": "sum after hooks", "l": "leaf"}  # of which a digest is
LABEL = 127  # bytes that a label has room for (csrc/base/trace.h)


@dataclass(frozen=True)
class Line:
    """One decision or piece of queued work."""

    kind: str
    """add, fold, take: of a buffer. node, gradient: a node of a pass ran, and passed on a gradient. bucket, send: a
    step of a sum over ranks, and a message to a rank. record, wait, mark, kernel, copy, free, sync: of a device;
    elided: a wait that was left out because it already held. digest: the digest of a gradient or a sum. drop: the
    last reference to a sum of a boxed node went.
    """
    how: str
    """The case letter of the plan (rules S8-S11), or "". Of a digest what it is of: "c" a contribution, "s" a sum,
    "h" a sum that a hook replaced, "l" what a leaf has.
    """
    in_place: bool  #: Of a node: it was given no name, so that its label ends with its number
    device: int  #: The ordinal of the device; -1 for the CPU
    slot: int  #: -1: none. Of a sum over ranks: the number of the bucket
    count: int  #: The number of contributions that a fold summed. Of a contribution's digest: the edge of its node
    buffer: int  #: The buffer's number; 0: none. Of a sum over ranks: the group's
    key: int  #: -1: none. Of a sum over ranks: the number of the group's pass
    rules: tuple[str, ...]
    stream: int  #: The handle of the stream; 0: none
    other: int  #: Of a wait: the handle of the awaited stream. Of a gradient: the address of its memory
    event: int
    bytes: int
    host_ns: int  #: The time of the call, in nanoseconds of a monotonic clock
    start_us: float  #: On the clock of a simulated device, in microseconds; negative: unknown
    end_us: float
    label: str
    pass_number: int = 0  #: The number of the thread's backward pass; 0: none
    node: int = 0  #: .. of its node (`sequence_nr`)
    worker: int = 0  #: .. of its worker: 0 is the caller's
    to: int = 0  #: Of a gradient: the number of the node that gets it. Of a message: the rank
    begin_ns: int = 0
    """The start of a node, of work on the CPU and of a step of a sum over ranks; `host_ns` is its end. 0: unknown."""
    thread: int = 0  #: The thread, as a small number
    digest: int = 0  #: Of a gradient or a sum, 64 bits; 0: none, for the reason in `label`

    def __str__(self) -> str:
        where = "cpu" if self.device < 0 else f"device {self.device}, stream {self.stream}"
        words = [f"{self.kind:<6} {where}"]
        if self.kind == "wait":
            words.append(f"for event {self.event} of stream {self.other}")
        elif self.kind in ("record", "elided"):
            words.append(f"event {self.event}")
        elif self.kind == "gradient":
            words.append(f"of node {self.node} to node {self.to}")
        elif self.kind == "digest":
            words.append(f"{WHAT.get(self.how, self.how)} {self.digest:016x}")
        elif self.kind == "send":
            words.append(f"to rank {self.to}, {self.bytes} bytes")
        if self.label:
            words.append(self.label)
        if self.slot >= 0 and self.kind not in ("bucket", "send"):
            words.append(f"slot {self.slot}" + (f", key {self.key}" if self.key >= 0 else ""))
        if self.kind == "fold":
            words.append(f"{counted(self.count, 'term')}{', in place' if self.in_place else ''}")
        if self.rules:
            words.append("by " + ", ".join(self.rules))
        return "  ".join(words)
