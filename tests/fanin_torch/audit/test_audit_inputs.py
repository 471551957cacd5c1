"""Bad input of `fanin.torch.audit`: right, or an error or a row that names the parameter and the cause."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fanin.torch  # noqa: E402
from kit.child import in_child  # noqa: E402
from kit.torch_classes import Two  # noqa: E402

pytestmark = pytest.mark.partners


def net(width: int = 20, dtype: Any = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 30), torch.nn.Tanh(), torch.nn.Linear(30, 9)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), 0.01)


def run(model: Any, k: int = 3, width: int = 20) -> None:
    for _ in range(k):
        (model(torch.randn(4, width)).square().mean() / k).backward()


def hooks(model: Any) -> int:
    """How many hooks the parameters have."""
    return sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def row(audit: Any, name: str) -> Any:
    return [row for row in audit.rows if row.parameter == name][-1]


# Arguments


def test_wrong_arguments_are_refused_by_name() -> None:
    model, optimizer = net()
    audit = fanin.torch.audit
    with pytest.raises(TypeError, match=r"audit: expected tensors, got a Sequential: give model\.parameters\(\)"):
        audit(model, optimizer)
    with pytest.raises(TypeError, match="audit: expected several tensors, got one"):
        audit(model[0].weight, optimizer)
    with pytest.raises(TypeError, match=r"audit: expected a torch.optim.Optimizer, got a list: .*audit.read\(\)"):
        audit(model.parameters(), [optimizer])
    with pytest.raises(ValueError, match="audit: expected parameters, got none"):
        audit([], optimizer)
    with pytest.raises(ValueError, match="audit: the SGD has none of the parameters"):
        audit(net()[0].parameters(), optimizer)
    with pytest.raises(ValueError, match="audit: two parameters are called w"):
        audit([("w", model[0].weight), ("w", model[2].weight)], optimizer)
    for every in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="audit: every is a positive number of steps"):
            audit(model.parameters(), optimizer, every=every)
    with pytest.raises(ValueError, match='audit: expect is "mean" or "sum"'):
        audit(model.parameters(), optimizer, expect="max")
    with pytest.raises(TypeError, match="is no leaf"):
        audit([model[0].weight * 2], optimizer)
    with pytest.raises(TypeError, match="weight"):
        audit(model.parameters(), optimizer, weigths=[1])
    with pytest.raises(TypeError, match="audit: weights: expected a sequence of numbers, got an int"):
        audit(model.parameters(), optimizer, weights=3)
    with pytest.raises(
        TypeError, match=r"audit: loss: expected a tensor, the one whose backward\(\) runs, got a float"
    ):
        audit(model.parameters(), optimizer).loss(0.25)
    with pytest.raises(RuntimeError, match="__exit__ without __enter__"):
        audit(model.parameters(), optimizer).__exit__(None, None, None)
    assert hooks(model) == 0


def test_an_audit_inside_of_another_of_the_same_parameters_is_refused() -> None:
    model, optimizer = net()
    with fanin.torch.audit(model.named_parameters(), optimizer) as outer:
        before = hooks(model)
        with pytest.raises(ValueError, match=r"audit: 0\.weight is watched by another audit"):
            fanin.torch.audit(model[0].named_parameters(prefix="0"), optimizer).__enter__()
        with pytest.raises(ValueError, match="audit: the block has begun already"):
            outer.__enter__()
        assert hooks(model) == before
        run(model)
        optimizer.step()
    assert {r.verdict for r in outer.rows} == {"right", "not judged"}
    with fanin.torch.audit(model[0].parameters(), optimizer), fanin.torch.audit(model[2].parameters(), optimizer):
        assert hooks(model) == before
    assert hooks(model) == 0


def test_a_block_can_begin_again() -> None:
    model, optimizer = net()
    audit = fanin.torch.audit(model.named_parameters(), optimizer, every=1)
    for _ in range(2):
        with audit:
            run(model)
            optimizer.step()
            optimizer.zero_grad()
    assert row(audit, "0.weight").verdict == "right" and audit._reads == 2


# What changes within a block


def test_parameters_that_change_within_a_block_are_named() -> None:
    model, optimizer = net()
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        run(model)
        optimizer.step()
        optimizer.zero_grad()
        model.to(torch.float64)  # dtype
        for _ in range(3):
            model(torch.randn(4, 20, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    found = row(audit, "0.weight")
    assert found.verdict == "not judged" and "changed from torch.float32" in found.happened and "float64" in str(found)


def test_other_memory_of_the_same_shape_is_right() -> None:
    model, optimizer = net()
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        for p in model.parameters():
            p.data = p.data.clone()
        run(model)
        for p in model.parameters():
            p.grad = p.grad.clone()
        optimizer.step()
    assert row(audit, "0.weight").verdict == "right"


def test_parameters_that_appear_and_vanish_are_right_or_a_note() -> None:
    model, optimizer = net()
    extra = torch.nn.Parameter(torch.ones(3))
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        run(model)
        optimizer.add_param_group({"params": [extra]})
        optimizer.step()
        optimizer.zero_grad()
        model[2] = torch.nn.Identity()
        run(model)
        optimizer.step()
    assert row(audit, "0.weight").verdict == "right" and row(audit, "2.weight").verdict == "note"


def test_layouts_and_dtypes_that_are_not_followed_are_named() -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    q = torch.nn.Embedding(10, 4, sparse=True).to(torch.bfloat16)
    optimizer = torch.optim.SGD([p, q.weight], 0.1)
    with fanin.torch.audit([("p", p), ("q", q.weight)], optimizer) as audit:
        for _ in range(2):
            ((p * p).abs().sum() + q(torch.tensor([1, 2])).float().sum()).backward()
        optimizer.step()
    assert row(audit, "p").verdict == "right"
    assert row(audit, "q").verdict == "not judged" and "sparse, of torch.bfloat16" in row(audit, "q").happened


@pytest.mark.parametrize("of", ["gradient", "sum"])
def test_a_subclass_that_makes_its_operations_itself_is_named(of: str) -> None:
    p = torch.nn.Parameter(torch.ones(300) if of == "sum" else Two(torch.ones(300), torch.ones(300)))
    optimizer = torch.optim.SGD([p], 0.1)
    with fanin.torch.audit([("p", p)], optimizer, every=1) as audit:
        for i in range(2):
            torch.autograd.backward([p], [torch.ones(300) if of == "sum" else Two(torch.ones(300), torch.ones(300))])
            if of == "sum" and i == 0:
                p.grad = None
                p.__dict__["main_grad"] = Two(torch.ones(300), torch.ones(300))
        optimizer.step()
    found = row(audit, "p")
    assert (found.verdict, found.happened) == (
        "not judged",
        f"its {of} is a Two, a subclass with a __torch_dispatch__ of its own",
    )


# Errors and interrupts


def test_a_hook_that_raises_ends_the_pass_as_ever_and_the_next_passes_are_judged() -> None:
    model, optimizer = net()
    switch = [True]

    def broken(g: Any) -> None:
        if switch[0]:
            raise ArithmeticError("mine")

    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        model[0].weight.register_hook(broken)
        with pytest.raises(ArithmeticError, match="mine"):
            run(model)
        switch[0] = False
        run(model)
        optimizer.step()
    assert {r.verdict for r in audit.rows if r.parameter != "the loss"} <= {"right", "note"}, str(audit)


def test_an_error_within_the_audit_is_a_row_and_the_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = net()
    expected, _ = net()
    torch.manual_seed(1)
    run(expected)
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:

        def fails(*_: Any) -> Any:
            raise MemoryError("planted")

        monkeypatch.setattr(sys.modules["fanin.torch.audit.samples"].Samples, "at", fails)
        torch.manual_seed(1)
        run(model)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
        optimizer.step()
    assert "the audit failed: MemoryError: planted" in row(audit, "0.weight").happened


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that runs in the audit's files."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        if "fanin/torch/audit/" not in frame.f_code.co_filename or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_ctrl_c_at_every_point_leaves_no_hook_and_no_wrapper() -> None:
    from torch.nn.utils import clip_grad

    original = clip_grad._clip_grads_with_norm_
    p = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(p.parameters(), 0.01)
    model = torch.nn.Sequential(p)
    hit = 0
    for n in points():
        optimizer.zero_grad()
        if not interrupted(model, optimizer, n):
            break
        hit += 1
        assert hooks(model) == 0, n
        assert not optimizer._optimizer_step_pre_hooks, n
        assert clip_grad._clip_grads_with_norm_ is original, n
    assert hit > 50
    optimizer.zero_grad()
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        run(model, 2, 3)
        optimizer.step()
    assert row(audit, "0.weight").verdict == "right", str(audit)


def points() -> Iterator[int]:
    """Each line at first, then one in seven: the hooks run the same lines again and again."""
    return itertools.chain(range(1, 120), range(120, 10**6, 7))


def interrupted(model: Any, optimizer: Any, n: int) -> bool:
    trace = Interrupts(n)
    old = sys.gettrace()
    sys.settrace(trace)
    try:
        with fanin.torch.audit(model.named_parameters(), optimizer, every=1):
            run(model, 2, 3)
            optimizer.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
    return trace.left <= 0


# Threads, children, compiled code


def test_passes_of_several_threads_are_right() -> None:
    model, optimizer = net()
    for _ in range(5):
        with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
            threads = [threading.Thread(target=run, args=(model, 4)) for _ in range(3)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            optimizer.step()
            optimizer.zero_grad()
        assert {r.verdict for r in audit.rows if r.parameter != "the loss"} == {"right"}, str(audit)


def test_a_pass_that_runs_while_ranks_compare_is_not_waited_for_and_the_next_step_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = net()
    ranks = sys.modules["fanin.torch.audit.ranks"]

    def exchange(records: Any, modules: Any, total: float) -> tuple[float, int]:
        """A rank that answers when a pass of this one has ended."""
        if not exchanged:
            t = threading.Thread(target=run, args=(model, 1))
            t.start()
            t.join()
        exchanged.append(len(modules))
        return total, 1

    exchanged: list[int] = []
    monkeypatch.setattr(ranks, "average", exchange)
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        for one in audit._watched:
            one.replica = types.SimpleNamespace(require_backward_grad_sync=False)
        for _ in range(3):
            run(model)
            optimizer.step()
            optimizer.zero_grad()
    rows = [row for row in audit.rows if row.parameter == "0.weight"]
    assert [row.verdict for row in rows] == ["right", "not judged", "right"], str(audit)
    assert rows[1].happened == "a pass ran while the optimizer's step began" and exchanged == [4, 4, 4]


def has_no_audit(model: Any, audit: Any) -> None:
    assert hooks(model) == 0 and not audit._active


def test_a_forked_child_has_no_audit() -> None:
    model, optimizer = net()
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        run(model)
        assert in_child(functools.partial(has_no_audit, model, audit)) == 0
        assert hooks(model) > 0
        optimizer.step()
    assert row(audit, "0.weight").verdict == "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("skips", [True, False], ids=["frames skipped", "hooks wrapped"])
@pytest.mark.parametrize("where", ["model", "step", "block"])
def test_compiled_code_is_followed(where: str, skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not skips:
        monkeypatch.setattr(sys.modules["fanin.torch.audit.block"], "skip_frames", lambda _: False)
    model, optimizer = net()
    called = torch.compile(model, backend="aot_eager") if where == "model" else model

    def step(audit: Any) -> None:
        for _ in range(3):
            loss = called(torch.randn(4, 20)).square().mean()
            (audit.loss(loss) / 3).backward()
        optimizer.step()

    def block() -> Any:
        with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
            (torch.compile(step, backend="eager") if where == "step" else step)(audit)
        return audit

    audit = (torch.compile(block, backend="eager") if where == "block" else block)()
    assert {r.verdict for r in audit.rows} == {"right"}, str(audit)
    torch._dynamo.reset()


def test_each_block_asks_torch_once_for_each_code_object_of_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[types.CodeType] = []

    def skips(code: types.CodeType) -> bool:
        asked.append(code)
        return True

    monkeypatch.setattr(sys.modules["fanin.torch.audit.block"], "skip_frames", skips)
    model, optimizer = net()
    for _ in range(2):
        with fanin.torch.audit(model.named_parameters(), optimizer, every=1):
            run(model)
            optimizer.step()
    names = sorted(code.co_name for code in asked)
    assert len([*model.parameters()]) > 1 and len(asked) == 8
    assert names[::2] == names[1::2] and len(set(names)) == 4


# Other loops


def test_an_optimizer_with_a_closure_is_not_judged() -> None:
    model, _ = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 20)).square().mean()
        loss.backward()
        return loss

    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        closure()
        optimizer.step(closure)
    assert row(audit, "0.weight").happened == "step(closure) makes gradients within the step"


def test_without_an_optimizer_of_torch_the_loop_reads() -> None:
    model, _ = net()
    with fanin.torch.audit(model.named_parameters(), None, every=2) as audit:
        counts = []
        for _ in range(4):
            run(model)
            counts.append(len(audit.read()))
            model.zero_grad()
    assert counts == [5, 0, 5, 0] and {r.step for r in audit.rows} == {0, 2}


def test_a_block_without_a_step_says_so() -> None:
    model, optimizer = net()
    with fanin.torch.audit(model.named_parameters(), optimizer) as audit:
        run(model)
    assert [str(r) for r in audit.rows] == ["the loop: not judged: optimizer.step() was not called in the audit"]


def test_a_block_that_begins_behind_the_passes_is_not_judged() -> None:
    model, optimizer = net()
    run(model)
    with fanin.torch.audit(model.named_parameters(), optimizer) as audit:
        optimizer.step()
    assert {r.verdict for r in audit.rows} <= {"not judged", "note"}, str(audit)


def test_a_dropped_audit_leaves_no_hook() -> None:
    model, optimizer = net()
    audit = fanin.torch.audit(model.named_parameters(), optimizer).__enter__()
    assert hooks(model) > 0
    del audit
    assert hooks(model) == 0


def test_gradients_of_another_loss_are_discarded_by_intent() -> None:
    model, optimizer = net()
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        run(model)
        optimizer.zero_grad()
        audit.discard()
        run(model)
        optimizer.step()
    assert row(audit, "0.weight").verdict == "right"


@pytest.mark.parametrize("k", [2, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_audit_keeps_4_kib_a_parameter_whatever_the_number_of_micro_batches(k: int, dtype: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(100_000, dtype=dtype))
    optimizer = torch.optim.SGD([p], 0.1)
    with fanin.torch.audit([("p", p)], optimizer) as audit:
        kept = []
        for _ in range(k):
            (p * torch.randn(100_000, dtype=dtype)).sum().backward()
            one = audit._watched[0]
            kept.append(one.record.nbytes + one.samples.nbytes)
        optimizer.step()
    assert 0 < max(kept) <= 4096
