"""Graph trees: functions that are recorded once, memory included, and replayed on a device or on the CPU.

    tree = fanin.GraphTree("cuda:0")
    step = tree.function(fn)
    with tree.step():
        out = step(x)

docs/graph-trees.md is their page. Steps of `fanin.tape` that are recorded are `fanin.tape.compiled`.
"""

from __future__ import annotations

from .._core import GraphFunction, GraphStep, GraphTree
from .pipelines import Pipeline, Stop
from .trees import FunctionStats, GraphStats, Outcome, Recording

__all__ = [
    "FunctionStats",
    "GraphFunction",
    "GraphStats",
    "GraphStep",
    "GraphTree",
    "Outcome",
    "Pipeline",
    "Recording",
    "Stop",
]
