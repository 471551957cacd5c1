"""The first message of a sum: which sum it is, and as much of it as fits.

Every sum begins with one exchange, in which each rank sends all others one message: a head of 64 bytes, and a body.

    kind   when                                                              body
    PLAN   the rank has a plan of the sum (plans.py)                         its term, the part of it that the other
                                                                             rank owns, or nothing, by its size
    FULL   it has none, it failed before, or the call has no plans           the header, as JSON

Every rank gets the messages of all ranks, its own included, and decides by these alone. So all ranks decide alike:

- All are FULL: the headers are there, and are compared.
- All are PLAN, and alike in the bytes before the key: those of the pass, the bucket, the step, the size of the term,
  what is in the body, and the digest of all that ranks must agree on. The sum goes on without headers.
- Else some rank has no plan, or another one, or is somewhere else: all ranks exchange FULL messages, which are the
  second ones of this sum on every rank. What differs is an error that names it; where nothing does the sum goes on.

Some engines have messages of one size alone (`Engine.padded`). There each head has the length of its message, and of
the one that came after it the last time. So after each exchange all ranks know the same size for the next one: the
largest that a rank expects. A longer message sends its rest in a second exchange, of which all ranks know by the heads.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fanin._interop.protocols import NDArray

from .engine import end_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

PLAN, FULL = 1, 2
HEAD, ALL, PART = 0, 1, 2  #: what follows the head of a plan: nothing, the term, or the part that the other rank owns

#: Magic, version, kind, way; bytes of the body; digest; step, pass, bucket; length, next; key.
_HEAD = struct.Struct("<4sBBHq16sqIIIIq")
HEAD_SIZE = _HEAD.size
ALIKE = HEAD_SIZE - 16  #: the bytes in which the plans of all ranks are alike: those before the length
#: What `heads_compare` of the core finds: one head, heads of one plan, another plan, a message that ends too early.
SAME, SAME_PLAN, OTHER_PLAN, CUT_SHORT = range(4)
_PLACE = struct.Struct("<qIIIIq")  #: what is after the digest ..
_PLACE_AT = HEAD_SIZE - _PLACE.size  #: .. and where it is
_LENGTHS = struct.Struct("<II")
_KEY = struct.Struct("<q")
_KEY_AT = HEAD_SIZE - _KEY.size
_NUMBERS = (1 << 32) - 1  #: of passes, before they begin anew
_MAGIC, _VERSION = b"fan\0", 2
NO_KEY = NO_STEP = -1
NO_DIGEST = bytes(16)

#: By measurement (benchmarks/ranks.py): terms of so many bytes divided by the number of ranks travel whole to every
#: rank, as ranks then wait for each other once instead of twice ..
WHOLE, WHOLE_MOST = 256 << 10, 64 << 10
#: .. and larger ones up to these in parts, each with the head to its owner, where the engine sends each rank another
#: first message.
PARTS = 256 << 10
LEAST = 960  #: bytes of a body for which there is room in any group

#: Bytes of the first message over an engine without `share`, and over one whose messages have one size where no rank
#: knows what comes; longer ones send the rest in a second.
FRAME = 1024


class CutShort(ValueError):
    """A message ends before its body does, or is none of fanin's."""


class Head(NamedTuple):
    """The first bytes of a message."""

    kind: int
    body: int  #: bytes of a header, or of the term
    way: int = HEAD  #: what is in the body of a plan's message
    digest: bytes = NO_DIGEST
    step: int = NO_STEP
    number: int = 0  #: of the pass
    bucket: int = 0
    length: int = 0  #: bytes of the longest message of this rank, and of the one that comes after it, ..
    after: int = 0  #: .. as far as this rank knows: of engines whose messages have one size
    key: int = NO_KEY

    def write(self) -> bytes:
        """The head as bytes."""
        kind, body, way, digest, step, number, *rest = self
        return _HEAD.pack(_MAGIC, _VERSION, kind, way, body, digest, step, number & _NUMBERS, *rest)


class Known:
    """What a rank may send again."""

    after = 0  #: bytes of the first message that it sent after this one the last time


def whole_of(ranks: int) -> int:
    """The bytes of the largest term that travels whole to every rank."""
    return max(LEAST, min(WHOLE_MOST, WHOLE // ranks))


def room_of(ranks: int, alike: bool) -> int:
    """The bytes of the largest first message of a group; alike: its engine sends all ranks the same one."""
    return HEAD_SIZE + (whole_of(ranks) if alike else max(LEAST, PARTS // ranks))


def read(raw: NDArray) -> Head:
    """The head of a message; CutShort if it is none, or if the part of its body that fits is not there."""
    if len(raw) < HEAD_SIZE:
        raise CutShort(f"a message of {len(raw)} bytes has no head")
    magic, version, kind, way, body, *rest = _HEAD.unpack_from(raw.data)
    head = Head(kind, body, way, *rest)
    if (magic, version) != (_MAGIC, _VERSION) or kind not in (PLAN, FULL) or head.body < 0:
        raise CutShort("a message is none of fanin's")
    return head


def place(
    messages: Sequence[memoryview],
    step: int | None,
    number: int,
    bucket: int,
    length: int,
    after: int,
    key: int | None,
) -> None:
    """Write the place of a sum, the lengths of messages, and the key of this rank's term, into a plan's messages."""
    step = NO_STEP if step is None else step
    key = NO_KEY if key is None else key
    for message in messages:
        _PLACE.pack_into(message, _PLACE_AT, step, number & _NUMBERS, bucket, length, after, key)


def key_of(message: NDArray) -> int | None:
    """The key in the message of a plan."""
    (key,) = _KEY.unpack_from(message.data, _KEY_AT)
    return None if key == NO_KEY else int(key)


def lengths_of(message: NDArray) -> tuple[int, int]:
    """The length of a message, and of the one after it, of which it has the head; 0 if it is none of fanin's."""
    if message[:4].tobytes() != _MAGIC:
        return 0, 0
    length, after = _LENGTHS.unpack_from(message.data, ALIKE)
    return length, after


class ByExchange:
    """`Engine.share` by `exchange`, for engines that lack it: messages of FRAME bytes, and one more for the rests."""

    def __init__(self, engine: Any, sends: Sequence[NDArray], receives: Sequence[NDArray]) -> None:
        send = sends[engine.rank]
        self.engine, self.receives = engine, receives
        self.data = len(send).to_bytes(8, "little") + send.tobytes()
        self.first = engine.exchange(self.data[:FRAME].ljust(FRAME, b"\0"))

    def wait(self, timeout: float | None) -> list[int]:
        end = end_of(timeout)
        made = [bytes(x) for x in self.first.wait(timeout)]
        sizes = [int.from_bytes(x[:8], "little") for x in made]
        room = max(sizes) + 8 - FRAME
        if room > 0:
            rests = self.engine.exchange(self.data[FRAME:].ljust(room, b"\0"))
            left = None if timeout is None else max(end - time.monotonic(), 1e-3)
            made = [x + rest for x, rest in zip(made, rests.wait(left), strict=True)]
        for x, size, receive in zip(made, sizes, self.receives, strict=True):
            receive[:size] = np.frombuffer(x, np.uint8)[8 : 8 + size]
        return sizes
