"""`python -m benchmarks` beside real peers: none that is installed is marked absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import timing

from kit.support import ROOT, run_python

pytestmark = pytest.mark.partners

ROWS = ("small_add", "life", "torch_add", "torch_accumulate", "small_sums", "in_cache", "many_slots")
ROWS += ("engines", "passes")


def test_peers_that_are_installed_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    only = [word for row in ROWS for word in ("--only", row)]
    run_python(["-m", "benchmarks", "--quick", "--json", str(file), *only], cwd=ROOT)
    absent = {name for one in json.loads(file.read_text())["results"] for name in one["absent"]}
    for peer, word in {"torch": "torch", "jax": "jax", "autograd": "HIPS"}.items():
        if timing.version(peer):
            assert not [name for name in absent if word in name]
        else:
            assert [name for name in absent if word in name]
