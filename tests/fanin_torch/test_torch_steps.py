"""fanin.torch.accumulate: optimizers that step within a block, and calls there that clip or unscale."""

from __future__ import annotations

import threading
import warnings
from importlib import import_module
from typing import Any

import pytest

import fanin

pytestmark = pytest.mark.partners

torch = pytest.importorskip("torch", reason="torch is not installed")

NOTHING = r"^accumulate: {}\.step\(\) within the block steps nothing of {}, whose \.grad is there from the end"


def parameter() -> Any:
    return torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adafactor"])
def test_a_step_within_the_block_that_would_do_nothing_is_an_error(kind: str) -> None:
    p = parameter()
    optimizer = getattr(torch.optim, kind)([p], lr=1.0)
    with (
        pytest.raises(RuntimeError, match=NOTHING.format(kind, "layer.weight")),
        fanin.torch.accumulate([("layer.weight", p)]),
    ):
        p.sum().backward()
        optimizer.step()
    assert p.tolist() == [0.0, 0.0] and p.grad.tolist() == [1.0, 1.0]
    optimizer.step()
    assert p.tolist() != [0.0, 0.0]


def test_so_is_one_with_a_closure_and_one_of_a_gradient_scaler() -> None:
    p = parameter()
    optimizer = torch.optim.LBFGS([p])
    with pytest.raises(RuntimeError, match=NOTHING.format("LBFGS", r"parameters\[0\]")), fanin.torch.accumulate([p]):
        optimizer.step(lambda: p.sum().backward())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(RuntimeError, match=NOTHING.format("SGD", r"parameters\[0\]")), fanin.torch.accumulate([p]):
        scaler.scale(p.sum()).backward()
        scaler.step(torch.optim.SGD([p], 1.0))


def test_the_message_names_few_of_many() -> None:
    ps = [parameter() for _ in range(5)]
    optimizer = torch.optim.SGD(ps, 1.0)
    several = r"parameters\[0\], parameters\[1\], parameters\[2\] and 2 more"
    with pytest.raises(RuntimeError, match=NOTHING.format("SGD", several)), fanin.torch.accumulate(ps):
        optimizer.step()


def test_a_step_of_other_parameters_too_is_a_warning() -> None:
    p, other = parameter(), parameter()
    optimizer = torch.optim.SGD([p, other], 1.0)
    with fanin.torch.accumulate([p]):
        (p + other).sum().backward()
        with pytest.warns(RuntimeWarning, match=NOTHING.format("SGD", r"parameters\[0\]")) as seen:
            optimizer.step()
    assert seen[0].filename == __file__
    assert p.tolist() == [0.0, 0.0] and other.tolist() == [-1.0, -1.0]


def test_optimizers_of_other_parameters_are_left_alone() -> None:
    p, other = parameter(), parameter()
    with fanin.torch.accumulate([p]):
        (p + other).sum().backward()
        torch.optim.SGD([other], 1.0).step()
        torch.optim.SGD([parameter()], 1.0).step()
    assert other.tolist() == [-1.0, -1.0]


def test_blocks_of_other_parameters_within_a_block_are_told_apart() -> None:
    p, q = parameter(), parameter()
    of_p, of_q = (torch.optim.SGD([one], 1.0) for one in (p, q))
    with fanin.torch.accumulate([("p", p)]):
        with fanin.torch.accumulate([("q", q)]):
            (p + q).sum().backward()
            for optimizer, name in ((of_p, "p"), (of_q, "q")):
                with pytest.raises(RuntimeError, match=NOTHING.format("SGD", name)):
                    optimizer.step()
        of_q.step()
        with pytest.raises(RuntimeError, match=NOTHING.format("SGD", "p")):
            of_p.step()
    of_p.step()
    assert p.tolist() == q.tolist() == [-1.0, -1.0]


def test_a_step_of_the_last_pass_is_right_and_one_after_it_an_error() -> None:
    p, q = parameter(), parameter()
    optimizer = torch.optim.SGD([p, q], 1.0)
    with (
        pytest.raises(RuntimeError, match=NOTHING.format("SGD", "p, q")),
        fanin.torch.accumulate([("p", p), ("q", q)]) as block,
    ):
        with block.last(lambda _: optimizer.step()):
            (p + q).sum().backward()
        assert p.tolist() == q.tolist() == [-1.0, -1.0]
        optimizer.step()


def test_a_block_that_fills_main_grad_or_has_raised_or_ended_has_no_say() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], 1.0)
    with fanin.torch.accumulate([p], into="main_grad"):
        optimizer.step()
    with pytest.raises(ZeroDivisionError), fanin.torch.accumulate([p]):
        1 / 0
    optimizer.step()
    block = fanin.torch.accumulate([p])
    block.__enter__()
    with pytest.warns(ResourceWarning, match="dropped without its exit"):
        del block
    optimizer.step()


def test_a_step_in_another_thread_is_heard_there() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], 1.0)
    errors: list[BaseException] = []

    def step() -> None:
        try:
            optimizer.step()
        except RuntimeError as e:
            errors.append(e)

    with fanin.torch.accumulate([("p", p)]):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert [str(e).startswith("accumulate: SGD.step() within the block steps nothing of p") for e in errors] == [True]


def test_blocks_that_come_and_go_leave_steps_of_other_threads_alone() -> None:
    other = parameter()
    other.grad = torch.ones(2)
    optimizer = torch.optim.SGD([other], 1.0)
    errors: list[BaseException] = []
    over = threading.Event()
    began = threading.Event()

    def steps() -> None:
        try:
            while not over.is_set():
                optimizer.step()
                began.set()
        except BaseException as e:
            errors.append(e)
            began.set()

    thread = threading.Thread(target=steps)
    thread.start()
    began.wait()
    p = parameter()
    for _ in range(300):
        with fanin.torch.accumulate([p]):
            pass
    over.set()
    thread.join()
    assert errors == []


def test_all_blocks_share_one_hook_of_all_optimizers() -> None:
    hooks = import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    p = parameter()
    with fanin.torch.accumulate([p]):
        before = len(hooks)
    with fanin.torch.accumulate([p]), fanin.torch.accumulate([parameter()]):
        assert len(hooks) == before


def test_a_step_without_a_block_warns_of_nothing() -> None:
    p = parameter()
    with fanin.torch.accumulate([p]):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD([p], 1.0).step()


# Over ranks, where an earlier `.grad` stays in its place


def over_ranks(body: Any, earlier: bool = False) -> list[Any]:
    """What a function of a group, a parameter and its optimizer returns on each of two ranks."""

    def on_rank(group: Any) -> Any:
        p = parameter()
        if earlier:
            p.grad = torch.full((2,), 4.0)
        return body(group, p, torch.optim.SGD([p], 1.0))

    return fanin.dist.threads(2, on_rank, timeout=None)


def test_over_ranks_a_step_within_the_block_that_would_do_nothing_is_an_error() -> None:
    def body(group: Any, p: Any, optimizer: Any) -> Any:
        message = NOTHING.format("SGD", "p") + ".*call it after the block$"
        with pytest.raises(RuntimeError, match=message), fanin.torch.accumulate([("p", p)], group=group):
            p.sum().backward()
            optimizer.step()
        assert p.grad is None
        with fanin.torch.accumulate([("p", p)], group=group):
            p.sum().backward()
        optimizer.step()
        return p.tolist()

    assert over_ranks(body) == [[-2.0, -2.0]] * 2


def test_over_ranks_a_step_by_an_earlier_gradient_alone_is_an_error() -> None:
    earlier = r"^accumulate: SGD\.step\(\) within the block steps p with the \.grad from before the block alone"

    def body(group: Any, p: Any, optimizer: Any) -> Any:
        with pytest.raises(RuntimeError, match=earlier), fanin.torch.accumulate([("p", p)], group=group):
            p.sum().backward()
            optimizer.step()
        stepped, kept = p.tolist(), p.grad.tolist()
        with fanin.torch.accumulate([("p", p)], group=group):
            p.sum().backward()
        optimizer.step()
        return [stepped, kept, p.tolist()]

    assert over_ranks(body, earlier=True) == [[[0.0, 0.0], [4.0, 4.0], [-6.0, -6.0]]] * 2


def test_over_ranks_a_step_after_the_last_pass_is_right_and_one_within_it_an_error() -> None:
    def body(group: Any, p: Any, optimizer: Any) -> Any:
        with fanin.torch.accumulate([("p", p)], group=group) as block:
            with block.last():
                p.sum().backward()
                with pytest.raises(RuntimeError, match=NOTHING.format("SGD", "p")):
                    optimizer.step()
            optimizer.step()
        return p.tolist()

    assert over_ranks(body) == [[-2.0, -2.0]] * 2


def test_over_ranks_optimizers_of_other_parameters_are_left_alone() -> None:
    def body(group: Any, p: Any, _: Any) -> Any:
        other = parameter()
        with fanin.torch.accumulate([p], group=group):
            (p + other).sum().backward()
            torch.optim.SGD([other], 1.0).step()
        return other.tolist()

    assert over_ranks(body) == [[-1.0, -1.0]] * 2


def test_an_earlier_gradient_in_a_block_without_ranks_is_kept_back_and_the_step_an_error() -> None:
    p = parameter()
    p.grad = torch.full((2,), 4.0)
    optimizer = torch.optim.SGD([p], 1.0)
    with pytest.raises(RuntimeError, match=NOTHING.format("SGD", "p")), fanin.torch.accumulate([("p", p)]):
        p.sum().backward()
        optimizer.step()
    assert p.tolist() == [0.0, 0.0] and p.grad.tolist() == [5.0, 5.0]


# Calls that clip or unscale

CLIPS = (
    r"^accumulate: clip_grad_norm_\(\) within the block clips nothing of {}, whose \.grad is there from the end of the"
)
UNSCALES = r"^accumulate: GradScaler\.unscale_\(\) within the block unscales nothing of {}, whose .*after the block$"


def test_a_clip_within_the_block_that_would_find_nothing_is_an_error() -> None:
    p, other = parameter(), parameter()
    with pytest.raises(RuntimeError, match=CLIPS.format("p")), fanin.torch.accumulate([("p", p)]):
        p.sum().backward()
        torch.nn.utils.clip_grad_norm_([p], 0.1)
    assert p.grad.tolist() == [1.0, 1.0]
    other.grad = torch.ones(2)
    with fanin.torch.accumulate([p]):
        torch.nn.utils.clip_grad_norm_(other, 0.5)
    torch.nn.utils.clip_grad_norm_([p], 0.5)
    assert 0 < p.grad.norm() < 0.51 and 0 < other.grad.norm() < 0.51


def test_a_clip_of_other_parameters_too_is_a_warning() -> None:
    p, other = parameter(), parameter()
    with fanin.torch.accumulate([p]):
        (p + other).sum().backward()
        with pytest.warns(RuntimeWarning, match=CLIPS.format(r"parameters\[0\]")) as seen:
            torch.nn.utils.clip_grad_norm_([p, other], 0.5)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("alone", [True, False])
def test_an_unscale_within_the_block_is_an_error_and_the_scaler_goes_on(alone: bool) -> None:
    """Else the sum stays scaled, since the scaler unscales an optimizer's gradients once a step."""
    p, other = parameter(), parameter()
    optimizer = torch.optim.SGD([p] if alone else [p, other], 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(RuntimeError, match=UNSCALES.format("p")), fanin.torch.accumulate([("p", p)]):
        scaler.scale((p + other).sum()).backward()
        scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]


def test_a_scaler_that_is_not_enabled_and_one_of_other_parameters_are_left_alone() -> None:
    p, other = parameter(), parameter()
    with fanin.torch.accumulate([p]):
        (p + 1024 * other).sum().backward()
        torch.amp.GradScaler("cpu", enabled=False).unscale_(torch.optim.SGD([p], 1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(other.sum())
        scaler.unscale_(torch.optim.SGD([other], 1.0))
    assert other.grad.tolist() == [1.0, 1.0]


def test_a_clip_in_the_last_pass_is_right() -> None:
    p = parameter()
    with fanin.torch.accumulate([p]) as block, block.last(lambda one: torch.nn.utils.clip_grad_norm_([one], 0.5)):
        p.sum().backward()
    assert p.grad is None


def test_torchs_functions_are_wrapped_while_a_block_or_an_audit_is_open() -> None:
    places = [(torch.nn.utils.clip_grad, "_clip_grads_with_norm_"), (torch.amp.GradScaler, "unscale_")]

    def now() -> list[Any]:
        return [getattr(owner, name) for owner, name in places]

    own = now()
    p = parameter()
    optimizer = torch.optim.SGD([p], 1.0)
    with fanin.torch.accumulate([p]):
        wrapped = now()
        with fanin.torch.audit([p], optimizer), fanin.torch.accumulate([parameter()]):
            assert now() == wrapped
        assert now() == wrapped
    assert now() == own and all(a is not b for a, b in zip(own, wrapped, strict=True))
    audit = fanin.torch.audit([p], optimizer)
    with audit:
        with fanin.torch.accumulate([p]):
            p.sum().backward()
        assert now() == wrapped
        optimizer.step()
    assert now() == own
