"""Kinds of parameters by operations: each cell has torch's gradient, or an error that names the parameter."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist.test_gloo import on_processes
from fanin import dist
from kit.support import ROOT
from kit.torch_group import group_alone

torch = pytest.importorskip("torch")
ft = pytest.importorskip("fanin.torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from fanin._interop import torch_leaves  # noqa: E402
from kit.torch_classes import Disabled, Plain, Two, Wrapped  # noqa: E402

pytestmark = [
    pytest.mark.partners,
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:FSDP is switching"),
]

nn = torch.nn

#: The pass of one loss.
BACKWARD = ft.backward


def reduced(loss: Any, reducer: Any) -> None:
    """The pass of one loss whose gradients a reducer sums."""
    with reducer:
        loss.backward()


# ---------------------------------------------------------------- kinds


#: A parameter, and its loss in each step.
Made = tuple[Any, Callable[[int], Any]]

STEPS = 4
SHAPE = (2, 3)


def matrix() -> Any:
    return torch.arange(6.0).reshape(SHAPE)


def images() -> Any:
    return torch.arange(24.0).reshape(2, 3, 2, 2)


def factors(p: Any, step: int) -> Any:
    """Small integers, so that each sum is exact in bfloat16, and no two of a row are equal."""
    plain = torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape) % 3 + 1 + step % 2
    return plain.to(p.dtype)


def thrice(p: Any) -> Made:
    """A parameter whose gradients meet three at a time."""

    def loss(step: int) -> Any:
        made = sum((p * factors(p, step)).sum() for _ in range(3))
        return made.real if made.is_complex() else made

    return p, loss


def once(of: Callable[[Any], Any]) -> Callable[[Any], Made]:
    return lambda p: (p, lambda step: of(p) * (1 + step % 2))


def inferred(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


def beside_data(p: Any) -> Made:
    """An inference tensor has a history only where an operation also reads a tensor that is none."""

    def loss(step: int) -> Any:
        if p.ndim == 4:
            return nn.functional.conv2d(factors(p, step), p).sum()
        return sum(nn.functional.linear(factors(p, step + k), p).sum() for k in range(3))

    return p, loss


def read_only() -> Any:
    x = np.arange(6, dtype=np.float32).reshape(SHAPE)
    x.flags.writeable = False
    return nn.Parameter(torch.from_numpy(x))


def with_grad_dtype(dtype: Any) -> Any:
    p = nn.Parameter(matrix().bfloat16())
    p.grad_dtype = dtype
    return p


def fake() -> Made:
    mode = FakeTensorMode()
    with mode:
        p = nn.Parameter(torch.zeros(SHAPE))

    def loss(step: int) -> Any:
        with mode:
            return (p * factors(p, step)).sum()

    return p, loss


def lazy() -> Made:
    layer = nn.LazyLinear(3)
    return layer.weight, lambda step: layer.weight.sum()


def embedding() -> Made:
    layer = nn.Embedding.from_pretrained(matrix(), freeze=False, sparse=True)

    def loss(step: int) -> Any:
        return layer(torch.tensor([0, 1, step % 2])).sum()

    loss.layer = layer  # type: ignore[attr-defined]
    return layer.weight, loss


def no_leaf() -> Made:
    p = matrix().requires_grad_().clone()
    p.retain_grad()
    return p, lambda step: (p * (1 + step)).sum()


def sharded(way: str) -> Made:
    """A process group of this process must be there."""
    from torch.distributed import fsdp, tensor

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if way == "DTensor":
        p = nn.Parameter(tensor.distribute_tensor(matrix(), mesh))
        return p, lambda step: (p * (1 + step)).sum().to_local()
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(matrix())
    if way == "fully_shard":
        fsdp.fully_shard(model, mesh=mesh)
        call: Any = model
    else:
        call = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    [p, *_] = call.parameters()
    return p, lambda step: call(torch.ones(2, 3) * (1 + step)).sum()


# ---------------------------------------------------------------- the table


ACCUMULATE, MAIN_GRAD, OVER_RANKS = "`accumulate`", '`accumulate(into="main_grad")`', "`accumulate(group=)`"
PASS, REDUCER, AUDIT, HOOK = "`backward`", "`Reducer`", "`audit`", "`ddp_hook`"
OPERATIONS = (ACCUMULATE, MAIN_GRAD, OVER_RANKS, PASS, REDUCER, AUDIT, HOOK)


class Rule(enum.Enum):
    """What an operation does with a parameter that it does not refuse."""

    TORCHS = "torch's own gradient; where torch raises for some of the kinds of a row, the same error"
    NEITHER = "torch's own error"
    DENSE = "a dense gradient where torch's own is sparse"
    RIGHT = "the sum, where torch itself raises"
    UNTRIED = "the operation takes no such parameter"


@dataclass(frozen=True)
class Taken:
    """A cell of the table that is no refusal."""

    rule: Rule
    text: str


@dataclass(frozen=True)
class Refused:
    """An error that names the parameter."""

    error: type[Exception]
    match: str

    @property
    def text(self) -> str:
        return self.error.__name__

    def refuses(self, outcome: object) -> bool:
        if not isinstance(outcome, Raised):
            return False
        known = {self.error.__name__, "DTypeError"} if self.error is ValueError else {self.error.__name__}
        return outcome.error in known and re.search(self.match, outcome.text) is not None


Cell = Taken | Refused

TORCHS = Taken(Rule.TORCHS, "as torch")
ROUNDED_ONCE = Taken(Rule.TORCHS, "as torch, with one rounding")
NEITHER = Taken(Rule.NEITHER, "torch's error")
DENSE = Taken(Rule.DENSE, "dense")
RIGHT = Taken(Rule.RIGHT, "the sum")
UNTRIED = Taken(Rule.UNTRIED, "–")
#: The verdict of an audit, beside which the gradient is torch's.
JUDGED, UNJUDGED = Taken(Rule.TORCHS, "right"), Taken(Rule.TORCHS, "not judged")


@dataclass(frozen=True)
class Row:
    """Kinds of parameters whose cells are the same."""

    text: str
    kinds: dict[str, Callable[[], Made]]
    cells: dict[str, Cell] = field(default_factory=dict)  #: others: as torch
    reference: Callable[[], Made] | None = None  #: whose gradients torch can sum
    group: bool = False  #: needs a process group

    def cell(self, operation: str) -> Cell:
        return self.cells.get(operation, JUDGED if operation == AUDIT else TORCHS)


def refused(error: type[Exception], match: str, *operations: str) -> dict[str, Cell]:
    return dict.fromkeys(operations, Refused(error, match))


COLLECTS = (ACCUMULATE, MAIN_GRAD, OVER_RANKS, REDUCER)
TAKES = (*COLLECTS, AUDIT)
TRAVELS = (OVER_RANKS, REDUCER)

ROWS = (
    Row(
        "a tensor or Parameter of float32, float64 or complex64; a view with torch's conjugate or negative bit",
        {
            "parameter": lambda: thrice(nn.Parameter(matrix())),
            "tensor": lambda: thrice(matrix().requires_grad_()),
            "buffer": lambda: thrice(nn.Buffer(matrix()).requires_grad_()),
            "float64": lambda: thrice(nn.Parameter(matrix().double())),
            "complex64": lambda: thrice(nn.Parameter(matrix().cfloat())),
            "conjugate": lambda: thrice(matrix().cfloat().conj().requires_grad_()),
            "negative": lambda: thrice(matrix().cfloat().conj().imag.requires_grad_()),
            "scalar": lambda: thrice(nn.Parameter(torch.tensor(2.0))),
            "no elements": lambda: thrice(nn.Parameter(torch.zeros(0, 3))),
            "shared": lambda: thrice(nn.Parameter(matrix().share_memory_())),
            "read-only": lambda: thrice(read_only()),
        },
    ),
    Row(
        "bfloat16, float16; with `grad_dtype` set to float32",
        {
            "bfloat16": lambda: thrice(nn.Parameter(matrix().bfloat16())),
            "float16": lambda: thrice(nn.Parameter(matrix().half())),
            "grad_dtype": lambda: thrice(with_grad_dtype(torch.float32)),
        },
        dict.fromkeys(OPERATIONS, ROUNDED_ONCE) | {AUDIT: JUDGED},
    ),
    Row(
        "a tensor subclass on memory of its own, a Parameter with `__torch_function__`",
        {
            "Parameter of a subclass": lambda: thrice(nn.Parameter(matrix().as_subclass(Plain))),
            "subclass": lambda: thrice(matrix().as_subclass(Plain).requires_grad_()),
            "subclass of Parameter": lambda: thrice(Wrapped(matrix())),
            "without the function": lambda: thrice(Disabled(matrix())),
            "subclass, channels_last": lambda: thrice(Wrapped(images().to(memory_format=torch.channels_last))),
        },
    ),
    Row(
        "channels_last, transposed, permuted, a piece of a tensor: `.grad` and `main_grad` have its strides",
        {
            "channels_last": lambda: thrice(nn.Parameter(images().to(memory_format=torch.channels_last))),
            "channels_last, bfloat16": lambda: thrice(
                nn.Parameter(images().bfloat16().to(memory_format=torch.channels_last))
            ),
            "transposed": lambda: thrice(nn.Parameter(matrix().t())),
            "permuted": lambda: thrice(nn.Parameter(images().permute(2, 0, 3, 1))),
            "piece": lambda: thrice(nn.Parameter(torch.cat([matrix(), matrix()])[2:])),
        },
    ),
    Row(
        "with gaps, expanded, with elements that share memory: `.grad` and `main_grad` have C order",
        {
            "gaps": lambda: thrice(nn.Parameter(torch.cat([matrix(), matrix()], 1)[:, ::2])),
            "expanded": lambda: thrice(nn.Parameter(torch.ones(3).expand(SHAPE))),
            "overlapping": lambda: thrice(nn.Parameter(torch.arange(6.0).as_strided(SHAPE, (1, 1)))),
        },
    ),
    Row(
        "an inference tensor",
        {
            "inference": lambda: beside_data(inferred(lambda: nn.Parameter(matrix()))),
            "inference tensor": lambda: beside_data(inferred(lambda: matrix().requires_grad_())),
            "inference, channels_last": lambda: beside_data(
                inferred(lambda: nn.Parameter(images().to(memory_format=torch.channels_last)))
            ),
        },
        {HOOK: NEITHER},
    ),
    Row(
        "whose gradients are sparse (`Embedding(sparse=True)`)",
        {"embedding": embedding},
        {
            MAIN_GRAD: DENSE,
            OVER_RANKS: DENSE,
            REDUCER: DENSE,
            HOOK: Refused(TypeError, "ddp_hook: a bucket is a sparse gradient"),
        },
    ),
    Row(
        "float8, of which torch adds no two",
        {"float8": lambda: once(lambda p: p.float().sum())(nn.Parameter(matrix().to(torch.float8_e4m3fn)))},
        dict.fromkeys(COLLECTS, RIGHT) | dict.fromkeys((PASS, AUDIT, HOOK), NEITHER),
        reference=lambda: once(lambda p: p.float().sum())(nn.Parameter(matrix())),
    ),
    Row(
        "`grad_dtype` of None",
        {"any grad_dtype": lambda: thrice(with_grad_dtype(None))},
        refused(ValueError, "the grad_dtype of odd is None", ACCUMULATE, *TRAVELS),
    ),
    Row(
        "complex32",
        {"complex32": lambda: once(lambda p: p.real.sum())(nn.Parameter(matrix().to(torch.complex32)))},
        refused(ValueError, "odd: dtype torch.complex32 is not summed", *COLLECTS) | {AUDIT: UNJUDGED},
    ),
    Row(
        "a wrapper subclass (`_make_wrapper_subclass`), a MaskedTensor",
        {
            "wrapper": lambda: thrice(nn.Parameter(Two(matrix(), matrix() + 1))),
            "masked": lambda: once(lambda p: p.sum())(
                torch.masked.masked_tensor(matrix(), matrix() > 2).requires_grad_()
            ),
        },
        refused(TypeError, "odd: a main_grad lies in memory", MAIN_GRAD)
        | refused(TypeError, "odd: expected a tensor whose elements lie in memory", *TRAVELS)
        | {AUDIT: UNJUDGED},
    ),
    Row(
        "a wrapper subclass of 16 bits",
        {"wrapper of bfloat16": lambda: thrice(nn.Parameter(Two(matrix().bfloat16(), matrix().bfloat16())))},
        refused(TypeError, r"odd: a sum in torch\.float32 is of gradients whose elements lie in memory", ACCUMULATE)
        | refused(TypeError, "odd: a main_grad lies in memory", MAIN_GRAD)
        | refused(TypeError, "odd: expected a tensor whose elements lie in memory", *TRAVELS)
        | {AUDIT: UNJUDGED},
    ),
    Row(
        'on `device="meta"`, a FakeTensor',
        {
            "meta": lambda: thrice(nn.Parameter(torch.zeros(SHAPE, device="meta"))),
            "fake": fake,
        },
        refused(TypeError, "odd: a main_grad lies in memory", MAIN_GRAD)
        | refused(TypeError, "odd: expected a tensor whose elements lie in memory", *TRAVELS)
        | {AUDIT: UNJUDGED, HOOK: NEITHER},
    ),
    Row(
        "sparse (COO, CSR, CSC, BSR, BSC), mkldnn",
        {
            "coo": lambda: once(torch.sparse.sum)(nn.Parameter(matrix().to_sparse())),
            "hybrid": lambda: once(torch.sparse.sum)(nn.Parameter(matrix().to_sparse(1))),
            "csr": lambda: once(lambda p: (p @ torch.ones(3, 2)).sum())(nn.Parameter(matrix().to_sparse_csr())),
            "csc": lambda: once(lambda p: (p @ torch.ones(3, 2)).sum())(nn.Parameter(matrix().to_sparse_csc())),
            "bsr": lambda: once(lambda p: (p @ torch.ones(4, 2)).sum())(
                nn.Parameter(torch.ones(4, 4).to_sparse_bsr((2, 2)))
            ),
            "mkldnn": lambda: once(lambda p: p.to_dense().sum())(matrix().to_mkldnn().requires_grad_()),
        },
        refused(TypeError, "odd has the layout torch", *TAKES) | {HOOK: NEITHER},
    ),
    Row(
        "a nested tensor",
        {
            "nested": lambda: once(lambda p: p.to_padded_tensor(0.0).sum())(
                nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
            ),
            "jagged": lambda: once(lambda p: p.values().sum())(
                torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).requires_grad_()
            ),
        },
        refused(TypeError, "odd is a nested tensor", *TAKES),
    ),
    Row(
        "an uninitialized parameter of a lazy module",
        {"lazy": lazy},
        refused(TypeError, "odd is a UninitializedParameter, which has no shape yet", *TAKES)
        | dict.fromkeys((PASS, HOOK), NEITHER),
    ),
    Row(
        "a tensor that an operation made, as by `torch.nn.utils.parametrize`",
        {"no leaf": no_leaf},
        refused(TypeError, "odd is no leaf", *TAKES) | {HOOK: UNTRIED},
    ),
    Row(
        "a DTensor, a parameter that FSDP shards (`fully_shard`, `FullyShardedDataParallel`)",
        {way: lambda way=way: sharded(way) for way in ("DTensor", "fully_shard", "FullyShardedDataParallel")},
        refused(RuntimeError, "odd is sharded by (DTensor|FSDP)", *TAKES) | {HOOK: NEITHER},
        group=True,
    ),
)

KINDS = {kind: row for row in ROWS for kind in row.kinds}


def table() -> str:
    """The table of docs/accumulation.md."""
    lines = [["a parameter", *OPERATIONS], ["---"] * (1 + len(OPERATIONS))]
    lines += [[row.text, *(row.cell(operation).text for operation in OPERATIONS)] for row in ROWS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---------------------------------------------------------------- what a gradient is


@dataclass(frozen=True)
class Gradient:
    """What two gradients have in common that are the same."""

    kind: str
    dtype: str
    layout: str
    strides: tuple[int, ...] | None
    values: Any


@dataclass(frozen=True)
class Raised:
    error: str
    text: str = field(compare=False)


def values(g: Any) -> Any:
    if isinstance(g, Two):
        return values(g.a), values(g.b)
    if g.device.type == "meta" or type(g).__name__ == "FakeTensor":
        return None
    if type(g).__name__ == "MaskedTensor":
        g = g.to_tensor(0.0)
    if type(g).__name__ == "DTensor":
        g = g.to_local()
    if g.is_nested:
        return [values(one) for one in g.unbind()]
    if g.layout != torch.strided:
        g = g.to_dense()
    return g.detach().as_subclass(torch.Tensor).tolist()


def described(g: Any) -> Gradient | None:
    if g is None:
        return None
    strides = tuple(g.stride()) if g.layout == torch.strided and not g.is_nested else None
    return Gradient(type(g).__name__, str(g.dtype), str(g.layout), strides, values(g))


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as e:
        return Raised(type(e).__name__, str(e))


def by_torch(make: Callable[[], Made], steps: list[int]) -> Any:
    p, loss = make()

    def run() -> Gradient | None:
        for step in steps:
            loss(step).backward()
        return described(p.grad)

    return attempt(run)


# ---------------------------------------------------------------- operations


def collect(made: list[Made], **options: Any) -> None:
    [(p, loss)] = made
    with ft.accumulate([("odd", p)], **options):
        for step in range(STEPS):
            loss(step).backward()


def collect_in_main_grad(made: list[Made]) -> None:
    collect(made, into="main_grad")


def collect_over_ranks(made: list[Made]) -> None:
    def rank(group: Any) -> None:
        p, loss = made[group.rank]
        with ft.accumulate([("odd", p)], group=group):
            for step in range(group.rank, STEPS, len(made)):
                loss(step).backward()

    dist.threads(len(made), rank, timeout=None)


def reduce(made: list[Made]) -> None:
    def rank(group: Any) -> None:
        p, loss = made[group.rank]
        reducer = dist.Reducer([("odd", p)], group)
        for step in range(group.rank, STEPS, len(made)):
            reduced(loss(step), reducer)

    dist.threads(len(made), rank, timeout=None)


def run_passes(made: list[Made]) -> None:
    [(_, loss)] = made
    for step in range(STEPS):
        BACKWARD(loss(step))


#: The verdicts of the last audit about its parameter.
verdicts: list[str] = []


def audited(made: list[Made]) -> None:
    [(p, loss)] = made
    with ft.audit([("odd", p)], None, expect="sum", every=1) as audit:
        for step in range(STEPS):
            loss(step).backward()
        audit.read()
    verdicts[:] = [row.verdict for row in audit.rows if row.parameter == "odd"]


#: How each operation runs, and on how many ranks.
RUNS: dict[str, tuple[Callable[[list[Made]], None], int]] = {
    ACCUMULATE: (collect, 1),
    MAIN_GRAD: (collect_in_main_grad, 1),
    OVER_RANKS: (collect_over_ranks, 2),
    PASS: (run_passes, 1),
    REDUCER: (reduce, 2),
    AUDIT: (audited, 1),
}


@pytest.fixture
def process_group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A group of this process, for the kinds that need one."""
    needed = KINDS[request.getfixturevalue("kind")].group
    with group_alone(tmp_path) if needed else contextlib.nullcontext():
        yield


def check(kind: str, operation: str, earlier: bool) -> None:
    """AssertionError if an operation on a kind of parameter does something else than its cell in the table."""
    row, (run, ranks) = KINDS[kind], RUNS[operation]
    make, cell = row.kinds[kind], row.cell(operation)
    firsts = [0] if earlier and not isinstance(by_torch(make, [0]), Raised) else []
    made = [make() for _ in range(ranks)]
    for _, loss in made:
        for step in firsts:
            loss(step).backward()
    before = [(p.grad, described(p.grad)) for p, _ in made]
    # The sum in main_grad begins with the block.
    steps = [*range(STEPS)] if operation == MAIN_GRAD else firsts + [*range(STEPS)]
    torchs = by_torch(make, steps)
    outcome = attempt(lambda: run(made))
    if isinstance(cell, Refused):
        assert cell.refuses(outcome), outcome
        for (p, loss), (grad, was) in zip(made, before, strict=True):
            assert p.grad is grad and described(grad) == was and getattr(p, "main_grad", None) is None
            check_goes_on(make, p, loss, firsts)
        return
    if cell is NEITHER:
        assert isinstance(torchs, Raised)
    if cell.rule in (Rule.TORCHS, Rule.NEITHER) and isinstance(torchs, Raised):
        assert outcome == torchs
        return
    assert outcome is None, outcome
    if operation == AUDIT:  # an earlier gradient was not cleared
        assert verdicts in ([cell.text], ["fault"] if firsts else [])
    for (p, _), (grad, was) in zip(made, before, strict=True):
        total = p.main_grad if operation == MAIN_GRAD else p.grad
        assert described(total) == expected(row, cell, operation, p, torchs, steps)
        if operation == MAIN_GRAD:
            assert p.grad is grad and described(grad) == was


def check_goes_on(make: Callable[[], Made], p: Any, loss: Callable[[int], Any], firsts: list[int]) -> None:
    """A refusal changes nothing: torch's own loop sums as before."""
    torchs = by_torch(make, firsts + [*range(STEPS)])
    if isinstance(torchs, Raised):
        return
    for step in range(STEPS):
        loss(step).backward()
    assert described(p.grad) == torchs


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "added"])
@pytest.mark.parametrize("operation", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_summed_as_torch_does_or_refused_by_name(
    kind: str, operation: str, earlier: bool, process_group: None
) -> None:
    check(kind, operation, earlier)


#: Parameters of 16 bits, of every kind that has more than one rounding in torch.
NARROW: dict[str, Callable[[Any], Any]] = {
    "Parameter": nn.Parameter,
    "subclass": lambda x: x.as_subclass(Plain).requires_grad_(),
    "subclass of Parameter": Wrapped,
    "without the function": Disabled,
    "transposed": lambda x: nn.Parameter(x.t().contiguous().t()),
    "gaps": lambda x: nn.Parameter(torch.cat([x, x], 1)[:, ::2]),
    "expanded": lambda x: nn.Parameter(x[:1].expand(SHAPE)),
    "inference": lambda x: inferred(lambda: nn.Parameter(x.clone())),
}
TERMS = (1.0, 1.0, 256.0)  # torch's engine begins with the last use, and loses the others


@pytest.mark.parametrize("operation", [ACCUMULATE, OVER_RANKS, PASS, REDUCER])
@pytest.mark.parametrize("kind", NARROW)
def test_every_kind_of_16_bits_has_one_rounding(kind: str, operation: str) -> None:
    def use(p: Any, c: float) -> Any:
        return torch.full((1, 2), c, dtype=torch.bfloat16).mm(p).float().sum()

    def make() -> Any:
        return NARROW[kind](torch.zeros(SHAPE, dtype=torch.bfloat16))

    def rank(group: Any) -> None:
        p, loss = made[group.rank], use(made[group.rank], TERMS[group.rank])
        if operation == REDUCER:
            reduced(loss, dist.Reducer([p], group))
            return
        with ft.accumulate([p], group=group):
            loss.backward()

    made = [make() for _ in range(3 if operation in TRAVELS else 1)]
    if operation == ACCUMULATE:
        with ft.accumulate(made):
            for c in TERMS:
                use(made[0], c).backward()
    elif operation == PASS:
        torchs = make()
        sum(use(torchs, c) for c in TERMS).backward()
        assert torchs.grad.unique().tolist() == [256.0]
        BACKWARD(sum(use(made[0], c) for c in TERMS))
    else:
        dist.threads(3, rank, timeout=None)
    for p in made:
        assert p.grad.dtype == torch.bfloat16 and p.grad.unique().tolist() == [258.0]


@pytest.mark.parametrize(("own", "dtype"), [("bfloat16", "float32"), ("float32", "float64"), ("float32", "exact")])
def test_a_wider_sum_of_a_wrapper_subclass_is_refused_and_its_own_is_torchs(own: str, dtype: str) -> None:
    p = nn.Parameter(Two(torch.zeros(2, dtype=getattr(torch, own)), torch.zeros(2, dtype=getattr(torch, own))))
    q = nn.Parameter(torch.zeros(2, dtype=getattr(torch, own)))
    with pytest.raises(TypeError, match=f"^accumulate: odd: a sum in (torch.)?{dtype} .* give dtype=torch.{own}"):
        ft.accumulate([q, ("odd", p)], dtype=dtype)
    with ft.accumulate([q, ("odd", p)], dtype=own):
        for c in TERMS:
            (p * c).sum().backward()
    assert values(p.grad) == ([258.0] * 2,) * 2


def test_the_check_finds_an_earlier_gradient_without_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulation = pytest.importorskip("fanin.torch.accumulation")
    monkeypatch.setattr(accumulation, "_lies_in", lambda total, first: True)
    with pytest.raises(AssertionError):
        check("wrapper", ACCUMULATE, True)


def test_the_check_finds_a_sum_with_other_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_leaves, "laid_out", lambda total, p: total)
    with pytest.raises(AssertionError):
        check("channels_last", REDUCER, False)


def test_the_check_finds_a_gradient_that_nothing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_leaves, "accumulator", lambda leaf: leaf.view_as(leaf).grad_fn)
    with pytest.raises(AssertionError):
        check("subclass", REDUCER, True)


def test_the_check_finds_a_kind_that_is_not_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_leaves, "check_leaf", lambda *_: None)
    for kind in ("csr", "nested", "lazy"):
        with pytest.raises(AssertionError):
            check(kind, ACCUMULATE, False)


def test_the_check_finds_a_lost_gradient_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(made: list[Made]) -> None:
        made[0][0].grad = None
        collect(made)

    monkeypatch.setitem(RUNS, ACCUMULATE, (lose, 1))
    with pytest.raises(AssertionError):
        check("coo", ACCUMULATE, True)


def test_the_check_finds_another_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def unjudged(made: list[Made]) -> None:
        audited(made)
        verdicts[:] = ["not judged"]

    monkeypatch.setitem(RUNS, AUDIT, (unjudged, 1))
    for earlier in (False, True):
        with pytest.raises(AssertionError):
            check("parameter", AUDIT, earlier)


def test_every_cell_of_the_table_is_tried() -> None:
    cells = {row.cell(operation) for row in ROWS for operation in RUNS}
    assert any(isinstance(cell, Refused) for cell in cells)
    assert {cell.rule for cell in cells if isinstance(cell, Taken)} == {*Rule} - {Rule.UNTRIED}
    assert {operation for row in ROWS for operation in row.cells} <= {*OPERATIONS}
    assert [*RUNS, HOOK] == [*OPERATIONS]
    assert sum(len(row.kinds) for row in ROWS) == len(KINDS)


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "accumulation.md").read_text()


def expected(row: Row, cell: Cell, operation: str, p: Any, torchs: Any, steps: list[int]) -> Gradient:
    """What a sum is like."""
    if cell is RIGHT:
        assert isinstance(torchs, Raised) and row.reference is not None
        torchs = by_torch(row.reference, steps)
        torchs = Gradient("Tensor", str(p.dtype), torchs.layout, torchs.strides, torchs.values)
    if cell is DENSE:
        assert torchs.layout == "torch.sparse_coo"
        torchs = Gradient("Tensor", torchs.dtype, "torch.strided", tuple(p.stride()), torchs.values)
    dtype = "torch.float32" if operation == MAIN_GRAD and p.dtype.itemsize < 4 else torchs.dtype
    made: Gradient = Gradient(torchs.kind, dtype, torchs.layout, torchs.strides, torchs.values)
    return made


# ---------------------------------------------------------------- replicas


class Replicated(nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self, p: Any, loss: Callable[[int], Any]) -> None:
        super().__init__()
        self.layer = getattr(loss, "layer", None) or nn.ParameterList([p])  # DDP expects sparse gradients by the class
        self.loss = loss

    def forward(self, step: int) -> Any:
        return self.loss(step)


def replica(make: Callable[[], Made], group: Any, hooked: bool) -> list[Gradient | None]:
    p, loss = make()
    model = nn.parallel.DistributedDataParallel(Replicated(p, loss))
    if hooked:
        model.register_comm_hook(None, ft.ddp_hook())
    found = []
    for step in range(group.rank, STEPS, group.size):
        p.grad = None
        model(step).backward()
        found.append(described(p.grad))
    return found


def of_replicas(group: Any) -> dict[str, tuple[Any, Any]]:
    """For each kind that a module can have: what DDP makes, alone and with the hook."""
    found = {}
    for kind, row in KINDS.items():
        make = row.kinds[kind]
        if isinstance(make()[0], nn.Parameter):
            found[kind] = (
                attempt(lambda make=make: replica(make, group, False)),
                attempt(lambda make=make: replica(make, group, True)),
            )
    return found


def test_a_replica_with_the_hook_has_the_gradients_that_it_has_without_it(tmp_path: Path) -> None:
    every = on_processes(2, of_replicas, tmp_path)
    tried = {KINDS[kind].text for kind in every[0]}
    assert tried == {row.text for row in ROWS if row.cell(HOOK) is not UNTRIED}
    wrong = []
    for found in every:
        for kind, (alone, hooked) in found.items():
            cell = KINDS[kind].cell(HOOK)
            good = cell.refuses(hooked) if isinstance(cell, Refused) else hooked == alone
            if not good or (cell is NEITHER) > isinstance(alone, Raised):
                wrong.append((kind, alone, hooked))
    assert not wrong, "\n".join(map(str, wrong))
