"""Planted loops: the rows that `fanin.torch.audit` has for each, and the faults that it cannot detect."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fanin.torch  # noqa: E402
from fanin.audit import AuditError, Row  # noqa: E402

pytestmark = pytest.mark.partners

K = 4


class Loop:
    """A loop of K micro-batches and two steps, which a fault overrides in one place."""

    k = K
    steps = 2
    dtype = torch.float32
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.net().to(self.dtype)
        self.optimizer = torch.optim.SGD(self.optimized(), 0.01)

    def net(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 9))

    def optimized(self) -> Any:
        return self.model.parameters()

    @property
    def weight(self) -> Any:
        return self.model[0].weight

    def run(self) -> Any:
        batches = torch.randn(self.k, 8, 20, dtype=self.dtype)
        with fanin.torch.audit(self.model.named_parameters(), self.optimizer, every=1, **self.options) as self.audit:
            for _ in range(self.steps):
                self.begin()
                for i, x in enumerate(batches):
                    self.before(i)
                    loss = self.model(x).float().square().mean()
                    self.weigh(i, self.audit.loss(loss, self.share(i))).backward()
                    self.after(i)
                self.end()
                self.optimizer.step()
                self.clear()
        return self.audit

    def share(self, i: int) -> float | None:
        return None

    def begin(self) -> None: ...

    def before(self, i: int) -> None: ...

    def after(self, i: int) -> None: ...

    def end(self) -> None: ...

    def weigh(self, i: int, loss: Any) -> Any:
        return loss / self.k

    def clear(self) -> None:
        self.optimizer.zero_grad()


class OnlyTheLast(Loop):
    def before(self, i: int) -> None:
        self.optimizer.zero_grad()


class OnlyTheFirst(Loop):
    def after(self, i: int) -> None:
        if i == 0:
            self.kept = self.weight.grad.clone()
        self.weight.grad = self.kept.clone()


class OneLost(Loop):
    def before(self, i: int) -> None:
        self.kept = None if self.weight.grad is None else self.weight.grad.clone()

    def after(self, i: int) -> None:
        if i == 2:
            self.weight.grad.copy_(self.kept)


class CountedTwice(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.weight.register_hook(self.keep)
        self.weight.register_post_accumulate_grad_hook(self.add_again)

    def add_again(self, p: Any) -> None:
        p.grad.add_(self.made)

    def keep(self, g: Any) -> None:
        self.made = g.clone()


class DoubledEachTime(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.weight.register_post_accumulate_grad_hook(self.double)

    def double(self, p: Any) -> None:
        p.grad.mul_(2)


class DividedTwice(Loop):
    def weigh(self, i: int, loss: Any) -> Any:
        return loss / self.k / self.k


class DividedAgainAtTheEnd(Loop):
    def end(self) -> None:
        for p in self.model.parameters():
            p.grad /= self.k


class OneDividedAgain(Loop):
    def end(self) -> None:
        self.weight.grad /= self.k


class ForgottenDivision(Loop):
    def weigh(self, i: int, loss: Any) -> Any:
        return loss


class NotCleared(Loop):
    def clear(self) -> None: ...


class NotClearedAndClipped(NotCleared):
    def end(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)


class ClearedTooOften(Loop):
    def before(self, i: int) -> None:
        if i == 2:
            self.optimizer.zero_grad(set_to_none=False)


class ClearedBeforeTheStep(Loop):
    def end(self) -> None:
        self.optimizer.zero_grad()


class OverwrittenByAssignment(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.weight.register_hook(lambda g: self.made.append(g.clone()))

    def end(self) -> None:
        self.weight.grad = self.made[-1]


class FrozenByMistake(Loop):
    def net(self) -> Any:
        net = super().net()
        net[0].bias.requires_grad_(False)
        return net


class FrozenWithin(Loop):
    def begin(self) -> None:
        self.model[0].bias.requires_grad_(False)


class NotInTheOptimizer(Loop):
    def optimized(self) -> Any:
        return self.model[0].parameters()


class Tied(torch.nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(20, 20))
        self.detached = detached

    def forward(self, x: Any) -> Any:
        again = self.weight.detach() if self.detached else self.weight
        return torch.tanh(x @ self.weight) @ again


class TiedBranchDetached(Loop):
    options = {"uses": True}

    def net(self) -> Any:
        return Tied(detached=True)


class WeightsOfAnother(Loop):
    tokens = (1, 2, 3, 4)

    def share(self, i: int) -> float:
        return self.tokens[i]

    def weigh(self, i: int, loss: Any) -> Any:
        return loss * (self.tokens[(i + 1) % K] / sum(self.tokens))


class MeanOfMeans(WeightsOfAnother):
    """Micro-batches of different numbers of tokens, which count alike."""

    def weigh(self, i: int, loss: Any) -> Any:
        return loss / K


class Bfloat16Loses(Loop):
    dtype = torch.bfloat16
    k, steps = 300, 1


class BlockLosesOne(Loop):
    """A block of fanin.torch.accumulate, whose sum lacks a gradient at its end."""

    def run(self) -> Any:
        batches = torch.randn(self.k, 8, 20)
        with fanin.torch.audit(self.model.named_parameters(), self.optimizer, every=1) as self.audit:
            made = []
            self.weight.register_hook(lambda g: made.append(g.clone()))
            with fanin.torch.accumulate(self.model.parameters()):
                for x in batches:
                    (self.audit.loss(self.model(x).square().mean()) / self.k).backward()
            self.weight.grad.copy_(made[0] + made[1] + made[3])
            self.optimizer.step()
        return self.audit


class MainGrad(Loop):
    """Sums in float32 beside .grad, by a hook of the node, as frameworks make them."""

    dtype = torch.bfloat16
    lost: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.nodes = []
        for p in self.model.parameters():
            p.main_grad = torch.zeros(p.shape)
            node = p.view_as(p).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, p=p: self.add(p))
            self.nodes.append(node)
        self.passes = 0

    def add(self, p: Any) -> None:
        if p is not self.weight or self.passes != self.lost:
            p.main_grad.add_(p.grad)
        p.grad = None

    def after(self, i: int) -> None:
        self.passes += 1

    def end(self) -> None:
        self.passes = 0
        for p in self.model.parameters():
            p.grad = p.main_grad.to(p.dtype)

    def clear(self) -> None:
        for p in self.model.parameters():
            p.main_grad.zero_()
            p.grad = None


class MainGradLosesOne(MainGrad):
    lost = 2


class MainGradIsNotRead(MainGrad):
    def end(self) -> None:
        super().end()
        self.weight.grad = torch.zeros_like(self.weight)


#: The loop; the row; its verdict; how its text begins; which part of the audit detects it.
PLANTED: list[tuple[type[Loop], str, str, str, str]] = [
    (OnlyTheLast, "0.weight", "fault", "only the last of 4 arrivals counts", "arrivals"),
    (OnlyTheFirst, "0.weight", "fault", "", "arrivals"),
    (OneLost, "0.weight", "fault", "arrival 3 is lost (after arrival 3)", "arrivals"),
    (CountedTwice, "0.weight", "fault", "each arrival counts twice", "arrivals"),
    (DoubledEachTime, "0.weight", "fault", "each arrival doubles the sum", "arrivals"),
    (DividedTwice, "the loss", "fault", "each micro-batch counts 0.0625, expected 0.25", "audit.loss"),
    (DividedAgainAtTheEnd, "the loss", "fault", "each micro-batch counts 0.0625, expected 0.25", "read, audit.loss"),
    (OneDividedAgain, "0.weight", "fault", "multiplied by 0.25, most others by 1", "read"),
    (ForgottenDivision, "the loss", "fault", "each micro-batch counts 1, expected 0.25", "audit.loss"),
    (NotCleared, "0.weight", "fault", "not cleared: the sum begins with an earlier gradient", "arrivals"),
    (NotClearedAndClipped, "0.weight", "fault", "not cleared: the sum begins with an earlier gradient", "arrivals"),
    (ClearedTooOften, "0.weight", "fault", "the sum was cleared after arrival 2, and is lost", "arrivals"),
    (ClearedBeforeTheStep, "0.weight", "fault", "the sum was cleared after arrival 4, and is lost", "read"),
    (OverwrittenByAssignment, "0.weight", "fault", "only arrival 4 of 4 counts (before the step)", "read"),
    (FrozenByMistake, "0.bias", "warning", "frozen: the optimizer has it, and requires_grad is False", "read"),
    (FrozenWithin, "0.bias", "warning", "frozen within the audit", "read"),
    (NotInTheOptimizer, "2.weight", "fault", "not in the optimizer, and has gradients", "read"),
    (TiedBranchDetached, "weight", "warning", "8 uses, 4 differentiable: test_audit_planted.py:", "uses"),
    (WeightsOfAnother, "the loss", "fault", "micro-batch 1 has the weight of micro-batch 2", "audit.loss"),
    (MeanOfMeans, "the loss", "fault", "micro-batch 1 counts 0.25, expected 0.1", "audit.loss"),
    (Bfloat16Loses, "0.weight", "warning", "right, but bfloat16 loses ", "arrivals"),
    (BlockLosesOne, "0.weight", "warning", "changed by other code before the step", "read"),
    (MainGradIsNotRead, "0.weight", "warning", "the optimizer reads .grad, which is not main_grad", "read"),
    (MainGradLosesOne, "0.weight", "fault", "not in the sum: arrival 3", "arrivals"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "row", "verdict", "text", "seen"), PLANTED, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_planted_loop_is_named(loop: type[Loop], row: str, verdict: str, text: str, seen: str) -> None:
    audit = loop().run()
    found = [r for r in audit.rows if r.parameter == row and r.verdict == verdict and r.happened.startswith(text)]
    assert found, str(audit)


def faults(rows: tuple[Row, ...]) -> list[Row]:
    return [row for row in rows if row.verdict in ("fault", "undecided", "warning")]


@pytest.mark.parametrize("loop", [Loop, MainGrad], ids=["grad", "main_grad"])
def test_the_loops_without_a_fault_are_right(loop: type[Loop]) -> None:
    audit = loop().run()
    assert faults(audit.rows) == [] and {row.verdict for row in audit.rows} == {"right"}, str(audit)


def test_bfloat16_loses_5_percent_of_a_long_sum() -> None:
    class Long(Loop):
        dtype = torch.bfloat16
        k, steps = 1024, 1

    rows = [row for row in Long().run().rows if "bfloat16 loses" in row.happened]
    lost = [float(row.happened.rpartition("loses ")[2].rstrip(" %")) for row in rows]
    assert max(lost) > 5, rows


@pytest.mark.parametrize("loop", [OneLost, ForgottenDivision])
def test_a_strict_audit_raises_before_the_optimizer_reads_and_grad_stays(loop: type[Loop]) -> None:
    one = loop()
    one.options = {"strict": True}
    before = [p.detach().clone() for p in one.model.parameters()]
    with pytest.raises(AuditError, match="fault"):
        one.run()
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
    assert all(p.grad is not None for p in one.model.parameters())
    assert not one.model[0].weight._backward_hooks


# Faults that it cannot detect


def test_a_fault_outside_of_the_sampled_elements_is_not_seen_unless_full() -> None:
    class OneElement(Loop):
        def net(self) -> Any:
            return torch.nn.Sequential(torch.nn.Linear(20, 5000), torch.nn.Tanh(), torch.nn.Linear(5000, 9))

        def end(self) -> None:
            at = self.audit._by_id[id(self.weight)].samples.index
            free = torch.ones(self.weight.numel(), dtype=torch.bool)
            if at is not None:
                free[at.long()] = False
            self.weight.grad.view(-1)[int(torch.nonzero(free)[0])] += 1

    assert faults(OneElement().run().rows) == []
    one = OneElement()
    one.options = {"full": True}
    assert {row.parameter for row in faults(one.run().rows)} == {"0.weight"}


def test_without_audit_loss_a_wrong_division_is_not_judged() -> None:
    def plain(self: Loop) -> Any:
        with fanin.torch.audit(self.model.named_parameters(), self.optimizer) as audit:
            for x in torch.randn(self.k, 8, 20):
                self.model(x).square().mean().backward()
            self.optimizer.step()
        return audit

    rows = plain(Loop()).rows
    assert faults(rows) == []
    assert [row.happened for row in rows if row.parameter == "the loss"] == [
        "whether the sum is the mean: give each loss to audit.loss"
    ]


def test_a_detached_branch_is_not_seen_without_uses() -> None:
    class Detached(TiedBranchDetached):
        options = {}

    assert faults(Detached().run().rows) == []


def test_a_parameter_that_no_pass_reaches_is_a_note() -> None:
    class Unreached(Loop):
        def weigh(self, i: int, loss: Any) -> Any:
            return super().weigh(i, loss)

        def net(self) -> Any:
            net = super().net()
            net.extra = torch.nn.Identity()
            net.extra.lost = torch.nn.Parameter(torch.ones(3))
            return net

    rows = [row for row in Unreached().run().rows if row.parameter == "extra.lost"]
    assert {(row.verdict, row.happened) for row in rows} == {("note", "no gradient in this step")}


def test_a_micro_batch_without_a_pass_is_not_seen() -> None:
    class Skipped(Loop):
        def weigh(self, i: int, loss: Any) -> Any:
            return loss / (self.k - 1) if i != 1 else loss.detach().requires_grad_() * 0

    assert faults(Skipped().run().rows) == []


def clipping_rows(limit: float, each: bool, scaled: bool) -> set[tuple[str, str]]:
    """What an audit says of the parameters in a loop that clips after each micro-batch, or once before the step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 9)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    with fanin.torch.audit(model.named_parameters(), optimizer) as audit:
        for i, x in enumerate(torch.randn(K, 8, 20)):
            scaler.scale(audit.loss(model(x).square().mean()) / K).backward()
            if each or i == K - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
    return {(row.verdict, row.happened) for row in audit.rows if row.parameter != "the loss"}


def test_a_norm_that_is_clipped_in_each_micro_batch_is_a_warning() -> None:
    ((verdict, happened),) = clipping_rows(1e-3, True, False)
    assert verdict == "warning" and happened.startswith("clipped after arrival 1 of 4")


def test_a_norm_that_is_clipped_before_it_is_unscaled_is_a_warning() -> None:
    ((verdict, happened),) = clipping_rows(1e-3, False, True)
    assert verdict == "warning" and happened.startswith("clipped before it was unscaled")


def test_a_norm_that_is_clipped_once_or_is_below_its_limit_is_right() -> None:
    assert clipping_rows(1e-3, False, False) == {("right", "")}
    assert clipping_rows(1e9, True, False) == {("right", "")}
    assert clipping_rows(1e9, False, True) == {("right", "")}
