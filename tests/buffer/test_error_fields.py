"""Errors about a buffer have their parts as attributes, so that no caller reads them out of the message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin

#: Names that resemble parts of a message.
CONFUSING = ["grads", "Mul: slot 7 (w), key 3: expected", "a: slot 0: ", "100% %s", "é" * 3]


def refused(call: Any, *args: Any, **named: Any) -> BaseException:
    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)) as caught:
        call(*args, **named)
    return caught.value


def fields(e: BaseException) -> dict[str, object]:
    words = ("object", "slot", "slot_name", "key", "expected", "got", "reason")
    return {word: getattr(e, word) for word in words if hasattr(e, word)}


@pytest.mark.parametrize("name", CONFUSING)
@pytest.mark.parametrize("slot_name", [None, *CONFUSING])
def test_a_wrong_dtype_names_its_place_and_what_was_expected(name: str, slot_name: str | None) -> None:
    buf = fanin.InputBuffer([fanin.Slot(3, "float32", name=slot_name)], name=name)
    e = refused(buf.add, 0, np.ones(3, "c8"), key=5)
    found = fields(e)
    assert found.pop("slot_name", None) == slot_name
    reason = found.pop("reason")
    assert found == {"object": name, "slot": 0, "key": 5, "expected": "dtype float32", "got": "complex64"}
    assert str(e) == f"{name}: slot 0{f' ({slot_name})' if slot_name else ''}, key 5: {reason}"


def test_an_error_about_a_whole_buffer_has_no_slot() -> None:
    buf = fanin.InputBuffer(2, name="grads")
    assert set(fields(refused(buf.stats, 0))) == {"object", "reason"}
    assert fields(refused(buf.add, 9, np.ones(3)))["object"] == "grads"


def test_an_error_found_at_the_import_has_the_same_fields() -> None:
    buf = fanin.InputBuffer([fanin.Slot(name="w")], name="grads")
    e = refused(buf.add, 0, np.array(["text"]), key=2)
    found = fields(e)
    assert str(e) == f"grads: slot 0 (w), key 2: {found.pop('reason')}"
    assert found == {"object": "grads", "slot": 0, "slot_name": "w", "key": 2}


@pytest.mark.parametrize("name", CONFUSING)
def test_the_engine_names_the_producer_even_if_names_resemble_message_parts(name: str) -> None:
    first = fanin.Node(lambda g: None, slots=[fanin.Slot(3, name=name)], name=name)
    node = fanin.Node(lambda g: np.ones(4), edges=[(first, 0)], name=name)
    e = refused(fanin.backward, [(node, 0, np.ones(3))])
    assert str(e).startswith(f"{name} returned an invalid gradient at index 0: expected a gradient of shape (3,)")
    assert str(e) == f"{name} returned an invalid gradient at index 0: {getattr(e, 'reason')}"  # noqa: B009


def test_the_engine_leaves_an_error_of_another_buffer_as_it_is() -> None:
    inner = fanin.InputBuffer([fanin.Slot(2)], name="inner")

    class Bad:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: object) -> object:
            inner.add(0, np.ones(3))
            return None

    node = fanin.Node(lambda g: Bad(), edges=[(fanin.Leaf(np.ones(3)), 0)], name="Mul")
    assert fields(refused(fanin.backward, [(node, 0, np.ones(3))])).get("object") != "Mul"
    assert str(refused(inner.add, 0, np.ones(3))).startswith("inner: slot 0: ")
