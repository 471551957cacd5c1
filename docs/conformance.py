"""Writes conformance.md: what fanin.conformance finds of fanin and of other engines. It takes a minute."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests"), str(ROOT)]


class Subject(NamedTuple):
    title: str
    factory: str
    package: str | None = None


SUBJECTS = {
    "buffer": [
        Subject("fanin", "fanin:InputBuffer"),
        Subject("fanin.h", "kit.c_api:ConformingBuffer"),
        Subject("reference", "kit.engines:ReferenceBuffer"),
        Subject("dict of +=", "kit.engines:DictBuffer"),
    ],
    "engine": [
        Subject("fanin", "fanin.conformance.engines:Fanin"),
        Subject("reference", "kit.engines:Reference"),
        Subject("dict of +=", "kit.engines:Dict"),
        Subject("torch", "kit.engines:Torch", "torch"),
        Subject("HIPS autograd", "kit.engines:Hips", "autograd"),
        Subject("micrograd", "kit.engines:Micrograd", "micrograd"),
        Subject("MyGrad", "kit.engines:MyGrad", "mygrad"),
        Subject("tinygrad", "kit.engines:Tinygrad", "tinygrad"),
    ],
}

TEXT = """# Conformance

For authors of engines, and for those who choose one.
`fanin.conformance` is a suite of laws for buffers of gradients and for engines.
`fanin.conformance.engines` shows the few methods that it needs:

```
pytest -p fanin.testing.plugin --pyargs fanin.conformance --fanin-buffer mypkg:make_buffer -k test_buffer
pytest -p fanin.testing.plugin --pyargs fanin.conformance --fanin-engine mypkg:make_engine -k test_engine
```

The tables have what it finds.
A law states what fanin does.
Not each engine promises it, so that a "no" is a difference, not a defect.
A "yes": the law held in all cases of this run.
A "no": it did not in at least one.
A "-": there is no call for it, for the reason below the table.
The adapters of `tests/kit/engines.py` call the engines of others as authors of new operations do.
The column `fanin.h` is [the C API](c-api.md): a buffer that is made, filled and taken by its table alone.
`python docs/conformance.py` writes this page.
"""


def sentence(law: str) -> str:
    return law.replace("_", " ")


class Collector:
    """A pytest plugin that keeps, of each law, "yes", "no" or "-", and the first message."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.tbstyle = "native"  # of a traceback the last line alone is kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        law = report.nodeid.partition("::test_")[2].partition("[")[0]
        if report.failed:
            new = ("no", str(report.longrepr).strip().splitlines()[-1])
        elif report.skipped:
            new = ("-", str(report.longrepr[-1]).removeprefix("Skipped: "))  # type: ignore[index]
        elif report.when == "call":
            new = ("yes", "")
        else:
            return
        if self.found.get(law, ("yes",))[0] != "no":
            self.found[law] = new


def outcomes(kind: str, factory: str, select: str = "") -> dict[str, tuple[str, str]]:
    """Of each law, in the order of the suite: "yes", "no" or "-", and the first message."""
    collector = Collector()
    quiet = [word for plugin in ("cacheprovider", "terminal", "faulthandler") for word in ("-p", f"no:{plugin}")]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        pytest.main(
            [*quiet, "-p", "fanin.testing.plugin", "-c", os.devnull, "--rootdir", folder, "--capture=no"]
            + [
                "--pyargs",
                f"fanin.conformance.test_{kind}",
                f"--fanin-{kind}={factory}",
                *(["-k", select] if select else []),
            ],
            plugins=[collector],
        )
    return collector.found


def main() -> None:
    lines = [TEXT]
    for kind, subjects in SUBJECTS.items():
        results = [outcomes(kind, s.factory) for s in subjects]
        lines += [f"## {kind.title()}s", ""]
        lines += [f"| law | {' | '.join(s.title for s in subjects)} |", "|---" * (1 + len(subjects)) + "|"]
        lines += [f"| {sentence(law)} | {' | '.join(r[law][0] for r in results)} |" for law in results[0]]
        versions = [f"{s.title} {version(s.package).partition('+')[0]}" for s in subjects if s.package]
        if versions:
            lines += ["", f"Versions: {', '.join(versions)}."]
        lines += ["", "Laws for which there is no call:", ""]
        for subject, result in zip(subjects, results, strict=True):
            reasons = {reason: None for outcome, reason in result.values() if outcome == "-"}
            if reasons:
                lines.append(f"- {subject.title}: {'; '.join(reasons)}.")
        lines.append("")
        print(kind, {s.title: sum(o == "yes" for o, _ in r.values()) for s, r in zip(subjects, results, strict=True)})
    (ROOT / "docs" / "conformance.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
