"""Signatures of graphs of torch.fx beside PyTorch's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fanin import analysis

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.__version__ < (2, 13):
    pytest.skip(f"compared with torch 2.13 and newer, this is {torch.__version__}", allow_module_level=True)

import logging  # noqa: E402

from examples.upstream import from_torch  # noqa: E402
from torch._functorch._aot_autograd import input_output_analysis as ioa  # noqa: E402

from kit.upstream_torch import upstream_meta  # noqa: E402

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def test_the_signature_of_a_graph_of_torch_fx_is_pytorchs() -> None:
    from torch._functorch._aot_autograd.schemas import GraphSignature

    def fn(w: Any, b: Any, x: Any) -> Any:
        b.mul_(2)
        return [x @ w + b]

    w, b, x = torch.ones(3, 2, requires_grad=True), torch.ones(2), torch.ones(4, 3)
    meta = upstream_meta(fn, [w, b, x])
    graph = torch.fx.Graph()
    p = [graph.placeholder(name) for name in ("w_1", "b_1", "x_1")]
    new, y = graph.call_function(torch.mul, (p[1], 2)), graph.call_function(torch.matmul, (p[2], p[0]))
    grad = graph.call_function(torch.neg, (p[0],))
    how: dict[str, Any] = {
        "user_args_flat": [x],
        "params_and_buffers_flat": [w, b],
        "param_names": ["fc.w"],
        "buffer_names": ["fc.b"],
    }
    for joint in (False, True):
        g = torch.fx.Graph()
        g.graph_copy(graph, {})
        found = {n.name: n for n in g.nodes}
        g.output([found[new.name], found[y.name], *([found[grad.name]] if joint else [])])
        module = torch.fx.GraphModule(torch.nn.Module(), g)
        asked = {"trace_joint": joint, "num_user_fw_outs": 1 if joint else None, "loss_index": 0 if joint else None}
        theirs = ioa.create_graph_signature(module, meta, None, None, **how, **asked)
        ours = analysis.create_graph_signature(module, from_torch(meta), **how, **asked)
        for f in dataclasses.fields(GraphSignature):
            u, v = getattr(theirs, f.name), getattr(ours, f.name)
            if f.name == "backward_signature" and joint:
                assert v.gradients_to_parameters == u.gradients_to_parameters == {"neg": "fc.w"}
                assert v.gradients_to_user_inputs == u.gradients_to_user_inputs == {}
                assert (u.loss_output, v.loss_output) == (
                    "mul",
                    "matmul",
                )  # PyTorch counts new values as the user's outputs
            else:
                assert (list(u) if isinstance(u, list) else u) == (list(v) if isinstance(v, tuple) else v), f.name
