"""Random right loops raise no alarm, and a gradient that is taken out of one is detected."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fanin_torch.audit.loops import Loop, alarms  # noqa: E402

pytestmark = pytest.mark.partners

#: 40 loops in the ordinary run, 1,000 by hand.
COUNTS = [pytest.param(40, id="sample"), pytest.param(1000, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_right_loops_raise_no_alarm(count: int) -> None:
    wrong, verdicts = [], Counter[str]()
    for seed in range(count):
        loop = Loop(seed).run()
        verdicts.update(row.verdict for row in loop.rows)
        if [*alarms(loop.rows)]:
            wrong.append(str(loop))
        failed = [row for row in loop.rows if "the audit failed" in row.happened]
        wrong += [f"seed {seed}: {row}" for row in failed]
    assert not wrong, "\n".join(wrong)
    assert verdicts["right"] > 0.7 * verdicts.total(), verdicts  # else it would judge nothing


def lose(loop: Any, i: int) -> None:
    """Take the last pass's gradient of one parameter out of its sum."""
    p = loop.net.first.weight
    now = None if p.grad is None else p.grad.detach().clone()
    if now is not None and loop.earlier is not None and i == loop.k - 1 and not torch.equal(now, loop.earlier):
        p.grad.copy_(loop.earlier)
        loop.planted += 1
    loop.earlier = now


def test_a_gradient_that_is_lost_in_a_random_loop_is_seen() -> None:
    seen = Counter[str]()
    for seed in range(40):
        loop = Loop(seed, fault=lose)
        loop.earlier, loop.planted = None, 0  # type: ignore[attr-defined]
        loop.run()
        if not loop.planted or loop.overflow:  # type: ignore[attr-defined]
            continue
        rows = [row for row in loop.rows if row.parameter == "first.weight"]
        verdicts = {row.verdict for row in rows}
        if verdicts & {"fault", "undecided"}:
            seen["named"] += 1
        elif "warning" in verdicts or loop.clip == "value":
            seen["changed by other code"] += 1  # clipping by value hides what it was before
        else:
            seen["missed"] += 1
    assert seen["missed"] == 0 and seen["named"] >= 15 and seen["named"] > 2 * seen["changed by other code"], seen
