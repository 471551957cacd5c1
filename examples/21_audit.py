"""A training loop into which a fault is planted, and what fanin.torch.audit says of it. Needs torch.

Argument: right, lost, cleared, twice, forgotten, kept or noise.
"""

import sys

import fanin

try:
    import torch
except ImportError:
    print("this example needs torch, which is not installed")
    sys.exit(0)

FAULTS = ("right", "lost", "cleared", "twice", "forgotten", "kept", "noise")
fault = sys.argv[1] if len(sys.argv) > 1 else "lost"
if fault not in FAULTS:
    sys.exit(f"expected one of {', '.join(FAULTS)}, got {fault}")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
micro_batches = torch.randn(4, 16, 32)
weight = model[0].weight


def add_again(p: torch.Tensor) -> None:
    """A hook that doubles what is there."""
    if p.grad is not None:
        p.grad.mul_(2)


if fault == "twice":
    weight.register_post_accumulate_grad_hook(add_again)

with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
    for _ in range(2):
        for i, x in enumerate(micro_batches):
            if fault == "cleared" and i == 2:
                optimizer.zero_grad()
            before = None if weight.grad is None else weight.grad.clone()
            loss = audit.loss(model(x).square().mean())
            (loss if fault == "forgotten" else loss / len(micro_batches)).backward()
            if fault == "lost" and i == 2:
                weight.grad = before  # a copy that is restored too late
        if fault == "noise" and weight.grad is not None:
            weight.grad += 1e-3 * torch.randn_like(weight)
        optimizer.step()
        if fault != "kept":
            optimizer.zero_grad()

print(audit)
