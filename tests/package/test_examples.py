"""The examples run, and print what they should."""

from __future__ import annotations

import importlib.util
import re
import subprocess

import pytest

from kit.prepared import run_prepared
from kit.ranks import NO_MPI, under_mpiexec
from kit.support import ROOT, compiler, run_python

EXAMPLES = ROOT / "examples"

#: The output of each: `...` matches any text.
PRINTED = {
    "01_add_n.py": (
        """\
float16, 64 terms: a chain of + is off by 1.2e-03, add_n by 2.1e-04
in another order, with keys, the same bits: True
the mean, in float32: float32 True
"""
    ),
    "02_buffer.py": (
        """\
ready: False | so far: [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
ready: True
linear: slot 0: 2 contributions of 2 expected (A16) came...
[[1.5, 1.5, 1.5], [1.5, 1.5, 1.5]] [4.0, 4.0, 4.0]
ValueError: linear: slot 0, key 1: expected ...(2, 3)...got (3, 2)...
ValueError: linear: slot 0, key 0: ...already...
ValueError: linear: slot 1 (bias), key 0: ...complex128...
IndexError: linear: ...
"""
    ),
    "03_streams_and_a_race.py": (
        """\
seeded: [30. 30. 30. 30.]
lifo: [30. 30. 30. 30.]
round robin: [30. 30. 30. 30.]
RaceError: race on 32 bytes of sim:0: 'sum gradients[0]' (stream 4 of sim:0, 03_streams_and_a_race.py:16) reads what \
'make 2.0' (stream 3 of sim:0, 03_streams_and_a_race.py:14) wrote: nothing orders them; \
missing: stream 4 of sim:0 must wait for stream 3 of sim:0 ...
"""
    ),
    "04_tape.py": (
        """\
step   0: loss 1.0055
step  50: loss 0.5501
step 100: loss 0.3200
curvature, and by a finite difference: True
the same gradient on two streams: True | races: 0
"""
    ),
    "16_recorded_step.py": (
        """\
step  0: warmed: it had not run with operands of these dtypes and shapes
step  1: recorded: it was never recorded here
step 40: warmed: it had not run with operands of these dtypes and shapes
step 41: recorded: it was never recorded here
the same bits: True
2 recordings, 56 replays
"""
    ),
    "05_custom_objects.py": (
        """\
Interval(low=1.0, high=4.0)
{'b': 2.0, 'w': 1.5}
[[1.25, 1.25], [0.25, 0.25], [0.25, 0.25], [1.25, 1.25]]
Zero(shape=(1000, 1000), dtype=...float32...)
"""
    ),
    "06_check_me.py": "",
    "17_graph_trees.py": (
        """\
#96693, the leaf adopts: RuntimeError: <lambda>: a reference keeps 16 bytes that the function allocated and did not \
return, ...the next replay overwrites them: ...pass its gradient)
#126938, accumulate: replayed, [1. 1.]
a handle of an ended step: RuntimeError: this is an output of times_2, made at 17_graph_trees.py:... in step ..., \
which ended at 17_graph_trees.py:...: ...
#160281, g(f(x)): replayed, replayed, [6. 6.]
#170604, all of them kept: replayed, [0.0, 5.0, 10.0, 15.0]; times_5 runs again and again in one step while outputs \
of earlier calls are alive, so each call is recorded anew
#188161, an operand that moves: warmed, recorded, recorded, recorded, recorded, replayed, replayed; \
times_7 copies operand 0 from now on
#180396, a join forgotten: CaptureError: forgets cannot be recorded: ...was not joined back...904...: stream ...
#123177, another thread: [2. 2.], replayed
#83490, ten shapes: 10 recordings in 10240 bytes, the largest's
on the CPU: warmed, recorded, replayed, replayed, ..: loss ..., w [1. 2. 3.]
a loss of an ended step: RuntimeError: this is an output of train, ...step 100, which ended at ...
"""
    ),
    "18_own_engine.py": (
        """\
first: [2.23732812 3.75604923 3.64391738]
second: [ 2.89377807  2.93738788 -6.14986464] = [ 2.89377807  2.93738788 -6.14986464]
"""
    ),
    "20_mpi.py": (
        """\
4 ranks (4 threads): the weights of one rank: True
PeerError: add_n, pass 51, bucket 0: rank 3 brings float64 of shape (4,), rank 0 float64 of shape (3,)
"""
    ),
    "08_upstream_holes.py": "torch...\n",  # with torch: tests/analysis/partners/test_analysis_torch.py
    "09_functionalized_optimizer.py": (
        """\
components: [['weight', 'bias', 'flat']]
  weight: MUTATED_OUT_GRAPH
  bias: MUTATED_OUT_GRAPH
  flat: MUTATED_OUT_GRAPH
  moment_w: MUTATED_OUT_GRAPH
  moment_b: MUTATED_OUT_GRAPH
  grad_w: NOT_MUTATED
  grad_b: NOT_MUTATED
outputs: [('alias_of_input', 0), ('is_input', 2), ('non_alias', None)]
pure takes:
  __make_synthetic_base(args[0])
  args[3]
  args[4]
  args[5]
  args[6]
and returns:
  __input_mutation(__make_synthetic_base(args[0]))
  __input_mutation(args[3])
  __input_mutation(args[4])
  output[0]
  output[1]
  output[2]
new values: {'__input_mutation(__make_synthetic_base(args[0]))': '__make_synthetic_base(args[0])', \
'__input_mutation(args[3])': 'args[3]', '__input_mutation(args[4])': 'args[4]'}
[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.25] [0.25, 0.25] 0.354
True True [0.0, 0.0]
graph memory {
  subgraph cluster_0 { label="80 bytes"; n0 [label="weight"]; n1 [label="bias"]; n2 [label="flat"]; }
...
  n0 -- n2;
  n1 -- n2;
}
picture: ...
"""
    ),
    "22_pipeline.py": (
        """\
step  0: loss 11.0132: gradient warmed, norm warmed, update warmed
step  1: loss 9.2952: gradient recorded, norm recorded, update recorded
step  2: loss 6.4168: gradient replayed, norm replayed, update replayed
step  3: loss skipped: gradient replayed
step  4: loss 7.9094: gradient replayed, norm replayed, update replayed
step 59: loss 0.0000: gradient replayed, norm replayed, update replayed
w [1. 2. 3.]
train: 3 pieces
piece 0: gradient was replayed [T11, T12, T17]
piece 1: norm was replayed [T11, T17]
piece 2: update was replayed [T11, T17]
gradient: 58 replays of 1 recording
norm: 57 replays of 1 recording
update: 57 replays of 1 recording
"""
    ),
}

#: The output of those that need torch, with torch; without it they report that.
WITH_TORCH = {
    "21_audit.py": (
        """\
parameter ... verdict  what happened
0.weight ... fault    arrival 3 is lost (after arrival 3), steps 0 .. 1  [+ + + rewritten +]
the loss ... right    weights of 4 micro-batches: as expected, steps 0 .. 1
0.bias and 2 others  right    as it should be, steps 0 .. 1  [+ + + +]
"""
    ),
    "07_torch_micro_batches.py": (
        "".join(
            f"{name:9} torch is off by ..., fanin by 1...; rounded once: True\n"
            for name in ("0.weight", "0.bias", "2.weight")
        )
        + "2.bias    torch is off by ..., fanin by ...\n"
    ),
    "10_torch_streams.py": "".join(
        f"{name:9} close to torch's engine: True; the same bits again: True\n"
        for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    ),
    "11_compiled_in_between.py": (
        """\
pure: __make_synthetic_base(args[0]) args[2] -> __input_mutation(__make_synthetic_base(args[0])) output[0] output[1]
graph: clone.default as_strided.default mul_.Tensor ...
([0.0, 2.0, 4.0, 6.0, 4.0, 5.0], [6.0, 4.0, 5.0], True, [6.0, 6.0, 6.0, 6.0, 1.0, 1.0], [0.0, 5.0, 10.0, 15.0])
the same, views and gradients: True
by torch.compile: True
"""
    ),
}

#: What those print that put another engine's graph on ours, by the package that they need.
WITH_ENGINE = {
    "12_hips_autograd.py": (
        "autograd",
        """\
gradients: {'b': True, 'v': True, 'w': True}
second derivatives: True
20,000 operations deep: True
""",
    ),
    "13_micrograd.py": (
        "micrograd",
        """\
105 parameters, as micrograd has them: True
20,000 operations in a row: 7.3883
""",
    ),
    "14_mygrad.py": ("mygrad", "w: True\nb: True\nhidden: True\nrows: True\n"),
}

#: The output of those that run on ranks: in one process they print the command.
WITH_RANKS = {
    "19_ddp.py": """\
DDP alone is close to fanin's sums: True
the same bits with small buckets: True
the same bits with the ranks' parts exchanged: True
the bits of one process: True
""",
}

WITH_A_COMPILER = {
    "15_c_nodes.py": """\
C behind C: [10. 20.  0.]
and Python before them: [31. 62.  3.]
ValueError: by b: expected 3 float64 in C order | in by b
""",
}


@pytest.mark.tools
def test_every_example_is_here() -> None:
    every = [*PRINTED, *WITH_TORCH, *WITH_ENGINE, *WITH_RANKS, *WITH_A_COMPILER]
    assert sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "upstream.py") == sorted(every)


#: examples/native: extensions built against fanin.h; without their compiler they print what they need.
NATIVE = {
    "two_threads.py": """\
2000 gradients of two threads: float32 (8,) 22.456404
the same bits as one after the other: True
whichever thread is faster: True
ValueError: two threads: slot 0: expect takes a count >= 0, got -2
""",
    "own_arrays.py": """\
a sum of 100 matrices: (2, 3) the same bits as one after the other: True
the sum of one is its own memory: True 42.0
ValueError: InputBuffer: slot 0: expected a gradient of shape (2, 3) as the first one, got (3, 2) (A9)
""",
    "cython_buffer.py": """\
2000 gradients of two threads: [1000. 1000. 1000. 1000.]
nothing is left: None
ValueError: InputBuffer: slot 0: expected a gradient of shape (3,) as the first one, got (4,) (A9)
""",
    "rust_buffer.py": """\
2000 gradients of two threads: 22.456404 the same bits as one after the other: True
ValueError: of two shapes: True
""",
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_example_is_built_and_prints_what_it_should(name: str) -> None:
    done = run_prepared(["-W", "error", str(EXAMPLES / "native" / name)])
    if done.stdout.startswith("this example needs "):
        pytest.skip(done.stdout.strip())
    is_printed(NATIVE[name], done)


@pytest.mark.tools
def test_every_native_example_is_here_and_is_short() -> None:
    files = [p for p in (EXAMPLES / "native").iterdir() if p.is_file()]
    assert sorted(p.name for p in files if p.suffix == ".py" and p.name != "building.py") == sorted(NATIVE)
    assert {p.name for p in files if len(p.read_text().splitlines()) > 150} == set()


@pytest.mark.parametrize("name", WITH_A_COMPILER)
def test_an_example_in_c_is_compiled_and_prints_what_it_should(name: str) -> None:
    if not compiler():
        pytest.skip("no C compiler: set CC")
    prints(name, WITH_A_COMPILER[name])


@pytest.mark.tools
@pytest.mark.parametrize("name", WITH_ENGINE)
def test_an_example_engine_has_at_most_a_hundred_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 100


def prints(name: str, text: str, *launcher: str) -> None:
    words = ["-W", "error", *launcher, str(EXAMPLES / name)]
    is_printed(text, run_python(words, env={"OMP_NUM_THREADS": "1"}) if launcher else run_prepared(words))


def is_printed(text: str, done: subprocess.CompletedProcess[str]) -> None:
    pattern = re.escape(text).replace(re.escape("..."), ".*?")
    assert re.fullmatch(pattern, done.stdout, re.DOTALL), done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_should(name: str) -> None:
    prints(name, PRINTED[name])


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
@pytest.mark.parametrize("name", [*WITH_TORCH, *WITH_RANKS])
def test_an_example_for_torch_reports_a_missing_torch(name: str) -> None:
    prints(name, "this example needs torch, which is not installed\n")


@pytest.mark.partners
@pytest.mark.parametrize("name", WITH_TORCH)
def test_an_example_for_torch_prints_what_it_should(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    prints(name, WITH_TORCH[name])


@pytest.mark.partners
@pytest.mark.parametrize("name", WITH_RANKS)
def test_an_example_for_ranks_prints_what_it_should(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    prints(name, f"this example needs ranks: torchrun --nproc-per-node 2 examples/{name}\n")
    prints(name, WITH_RANKS[name], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
def test_the_example_for_mpi_gives_the_same_weights_under_mpiexec() -> None:
    done = under_mpiexec(2, "-W", "error", str(EXAMPLES / "20_mpi.py"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 ranks (MPI_COMM_WORLD): the weights of one rank: True\nPeerError: add_n, pass 51")


@pytest.mark.parametrize("name", WITH_ENGINE)
def test_an_example_for_another_engine_reports_a_missing_library(name: str) -> None:
    package, _ = WITH_ENGINE[name]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    prints(name, f"this example needs {package}, which is not installed\n")


@pytest.mark.partners
@pytest.mark.parametrize("name", WITH_ENGINE)
def test_an_example_for_another_engine_prints_what_it_should(name: str) -> None:
    package, text = WITH_ENGINE[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    prints(name, text)
