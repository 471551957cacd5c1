"""`fanin compare`: what it prints, and its status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fanin.cli import main
from kit.two_runs import Plant, drawn, run

pytestmark = [pytest.mark.core, pytest.mark.rule("G3")]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    net = drawn(4)
    run(net).save(tmp_path / "a.json")
    shutil.copy(tmp_path / "a.json", tmp_path / "same.json")
    run(net, Plant("value", "top")).save(tmp_path / "b.json")
    return tuple(str(tmp_path / name) for name in ("a.json", "same.json", "b.json"))  # type: ignore[return-value]


def test_equal_runs_have_status_0(files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *files[:2]]) == 0
    assert capsys.readouterr().out.startswith("no difference: ")


def test_a_difference_has_status_1_and_is_named(
    files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", files[0], files[2]]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"first difference of {files[2]} and {files[0]}: pass 1, slot 0 of node ")
    assert "node top made it" in out


@pytest.mark.parametrize(
    "words", [["a.json"], ["a.json", "nowhere.json"], ["a.json", "cut.json"], ["a.json", "--ranks"]]
)
def test_what_cannot_be_compared_has_status_2_and_a_reason(
    words: list[str], files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(files[0]).parent
    (folder / "cut.json").write_bytes(Path(files[0]).read_bytes()[:500])
    status = main(["compare", *(w if w.startswith("-") else str(folder / w) for w in words)])
    said = capsys.readouterr()
    assert status == 2 and not said.out
    assert said.err.startswith("fanin: ") and len(said.err.splitlines()) == 1


def test_control_characters_of_names_do_not_reach_the_terminal(
    files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A name in a trace of somebody else's could steer the terminal, or write lines of its own."""
    hostile = json.dumps("\x1b]0;owned\x07\x1b[2J\nno difference: 9 digests \u202e\x85")[1:-1]
    for path in (files[0], files[2]):
        text = Path(path).read_text().replace('"top"', f'"{hostile}"').replace('"float64', f'"{hostile} float64')
        Path(path).write_text(text)
    assert main(["compare", files[0], files[2]]) == 1
    out = capsys.readouterr().out
    assert r"node \x1b]0;owned\x07\x1b[2J\nno difference: 9 digests \u202e\x85 made it" in out
    assert len(out.splitlines()) == 2 and all(line.isprintable() for line in out.splitlines())
    other = Path(files[1])  # of the same graph but for the name
    assert main(["compare", files[0], str(other)]) == 2
    err = capsys.readouterr().err
    assert r"\x1b]0;owned" in err and len(err.splitlines()) == 1 and err.rstrip("\n").isprintable()
