"""Another compiler in between: a function that writes views of one buffer, as a pure function that torch.fx traces,
with gradients. Needs torch.
"""

import sys
import warnings

try:
    import torch
except ImportError:
    print("this example needs torch, which is not installed")
    sys.exit(0)

from fanin.analysis import functionalize

warnings.simplefilter("ignore")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402  (it warns of itself)


def step(head, tail, w):
    head.mul_(w)  # tail shares two elements with head
    return tail[1:], (head * w).sum()


def compiler(pure):
    """Called once for each layout; what it gives runs in the function's place."""
    print("pure:", *(d.expr() for d in pure.input_descs), "->", *(d.expr() for d in pure.output_descs))
    graphs = []

    def run(*inner):
        if not graphs:
            graphs.append(make_fx(pure)(*[x.detach() for x in inner]))
            print("graph:", *dict.fromkeys(n.target.__name__ for n in graphs[0].graph.nodes if n.op == "call_function"))
        return graphs[0](*inner)

    return run


def run(f):
    leaf = torch.arange(6.0, requires_grad=True)
    w = torch.full((4,), 2.0, requires_grad=True)
    flat = leaf * 1
    tail, total = f(flat[:4], flat[2:], w)
    (total + flat.sum()).backward()
    return flat.tolist(), tail.tolist(), tail._base is flat, leaf.grad.tolist(), w.grad.tolist()


native, between = run(step), run(functionalize(step, compiler=compiler))
print(native)
print("the same, views and gradients:", native == between)
by_dynamo = functionalize(step, compiler=lambda pure: torch.compile(pure, backend="eager"))
print("by torch.compile:", run(by_dynamo) == native)
