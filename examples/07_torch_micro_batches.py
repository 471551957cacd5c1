"""Gradients of 64 micro-batches of a bfloat16 model: torch rounds every sum, fanin.torch.accumulate rounds once. Needs
torch.
"""

import sys

import fanin

try:
    import torch
except ImportError:
    print("this example needs torch, which is not installed")
    sys.exit(0)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(torch.bfloat16)
micro_batches = torch.randn(64, 16, 32, dtype=torch.bfloat16)


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gradients() -> list[torch.Tensor]:
    """The values of .grad, which is emptied."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


alone = []  # each micro-batch by itself, for the sum that is not rounded on its way
for x in micro_batches:
    loss(x).backward()
    alone.append([g.double() for g in gradients()])
true = [torch.stack(gs).sum(0) for gs in zip(*alone, strict=True)]

for x in micro_batches:  # torch's own way
    loss(x).backward()
theirs = gradients()

with fanin.torch.accumulate(model.parameters(), dtype=torch.float32):
    for x in micro_batches:
        loss(x).backward()
ours = gradients()

for (name, _), t, a, b in zip(model.named_parameters(), true, theirs, ours, strict=True):
    off = [float((g.double() - t).norm() / t.norm()) for g in (a, b)]
    print(
        f"{name:9} torch is off by {off[0]:.1e}, fanin by {off[1]:.1e}; rounded once:"
        f" {torch.equal(b, t.to(torch.bfloat16))}"
    )
