"""DistributedDataParallel with one rounding: the order of the ranks' gradients and the size of buckets change no bit of
an exact sum. Needs torch. Run it on two ranks:

    torchrun --nproc-per-node 2 examples/19_ddp.py
"""

import os
import sys

import fanin

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # before the process group is made: it keeps the default group that it finds
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    print("this example needs torch, which is not installed")
    sys.exit(0)
if "RANK" not in os.environ:
    print("this example needs ranks: torchrun --nproc-per-node 2 examples/19_ddp.py")
    sys.exit(0)

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(torch.bfloat16)


def batch(step: int, part: int) -> torch.Tensor:
    """The rows of one rank."""
    torch.manual_seed(1000 * step + part)
    return torch.randn(16, 32).to(torch.bfloat16)


def train(hook: bool, part: int, bucket_cap_mb: float = 25) -> torch.Tensor:
    """The weights after 5 steps on this rank's part of each batch."""
    model = DistributedDataParallel(network(), bucket_cap_mb=bucket_cap_mb)
    if hook:
        model.register_comm_hook(None, fanin.torch.ddp_hook(order="exact"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(batch(step, part)).float().square().mean().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def one_process() -> torch.Tensor:
    """The weights of one process that sums the gradients of all parts exactly."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        parts = []
        for part in range(size):
            loss = model(batch(step, part)).float().square().mean()
            parts.append(torch.autograd.grad(loss, list(model.parameters())))
        for p, *gradients in zip(model.parameters(), *parts, strict=True):
            p.grad = fanin.add_n(gradients, accumulate="exact", scale=1 / size)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


theirs, ours = train(False, rank), train(True, rank)
results = {
    "DDP alone is close to fanin's sums": torch.allclose(theirs, ours, atol=1e-2),
    "the same bits with small buckets": torch.equal(ours, train(True, rank, 1e-3)),
    "the same bits with the ranks' parts exchanged": torch.equal(ours, train(True, size - 1 - rank)),
    "the bits of one process": torch.equal(ours, one_process()),
}
every = [results] * size
dist.all_gather_object(every, results)
if rank == 0:
    for text in results:
        print(f"{text}: {all(r[text] for r in every)}")
dist.destroy_process_group()
