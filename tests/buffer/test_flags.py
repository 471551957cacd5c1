"""A flag is a bool, NumPy's too. Other objects are refused by name: `donate="no"` does not give an array away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin


def leaf_graph() -> tuple[Any, Any]:
    leaf = fanin.Leaf(np.ones(3))
    return leaf, fanin.Node(lambda g: g, edges=[(leaf, 0)])


def backward(**named: Any) -> None:
    fanin.backward([(leaf_graph()[1], 0, np.ones(3))], **named)


def grad(**named: Any) -> None:
    leaf, node = leaf_graph()
    fanin.grad([(node, 0, np.ones(3))], [leaf], **named)


def took(**named: Any) -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, np.ones(3))
    buf.take(slot=0, **named)


FLAGS: dict[str, tuple[Any, str]] = {
    f"{name} {flag}": (call, flag)
    for name, flags, call in [
        ("InputBuffer", ("stats", "leaf", "create_graph"), lambda **named: fanin.InputBuffer(1, **named)),
        ("add", ("donate", "copy"), lambda **named: fanin.InputBuffer(1).add(0, np.ones(3), **named)),
        ("add_many", ("donate", "copy"), lambda **named: fanin.InputBuffer(1).add_many([0], [np.ones(3)], **named)),
        ("take", ("writable",), took),
        ("add_n", ("stats",), lambda **named: fanin.add_n([np.ones(3)], **named)),
        ("backward", ("keep_graph", "create_graph", "detect"), backward),
        ("grad", ("keep_graph", "create_graph", "detect"), grad),
        ("set_options", ("debug", "warn_stream_mismatch", "capture_redirect", "detect"), fanin.set_options),
    ]
    for flag in flags
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["no", "", 0, 1, 2.5, [], np.array([True])], ids=repr)
def test_a_flag_that_is_no_bool_is_refused_by_its_name(name: str, value: Any) -> None:
    call, flag = FLAGS[name]
    with pytest.raises(TypeError, match=rf"\(\): {flag}: expected a bool(| or None), got an? "):
        call(**{flag: value})


@pytest.mark.parametrize("name", [name for name in FLAGS if not name.startswith("set_options")])
@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_a_flag_is_a_bool_of_python_or_numpy(name: str, kind: Any) -> None:
    call, flag = FLAGS[name]
    for value in (False, True):
        call(**{flag: kind(value)})


def test_a_flag_of_numpy_has_its_value() -> None:
    given = [np.ones(3), np.ones(3)]
    buf = fanin.InputBuffer(1)
    for g in given:
        buf.add(0, g, copy=np.bool_(True))
        g[:] = 7
    assert buf.take(slot=0).tolist() == [2, 2, 2]
    buf.add(0, given[0], copy=np.bool_(False))
    assert buf.take(slot=0) is given[0]


def test_an_unknown_name_with_a_lone_surrogate_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^add\(\) has no argument") as caught:
        fanin.InputBuffer(1).add(0, np.ones(3), **{"\udc80": 1})
    assert "\udc80" in str(caught.value)
    with pytest.raises(TypeError, match=r"^InputBuffer\(\) has no argument"):
        fanin.InputBuffer(1, **{"stat\udc80": 1})
