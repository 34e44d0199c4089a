"""Train a model of six equal blocks with DDP, with FSDP by hand, and with FSDP2.

torchrun --nproc-per-node 2 tutorials/43_fsdp.py

All methods begin with the same weights and read the same batches. The bytes are those of all
tensors that exist, counted after each operation. They are printed in blocks, that is, divided by
the bytes of one block's weights.
"""

import copy

import torch
import torch.distributed as dist
from sharded import Sharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.live import LiveBytes
from accel_demo.show import table

BLOCKS, WIDTH, STEPS = 6, 128, 3
ROWS = 2  # per rank and step: few, so that activations are small


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, inputs):
        return inputs + self.layers(inputs)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def by_hand(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(Sharded(block) for block in model))


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, batches: torch.Tensor) -> dict[str, int]:
    """Train for some steps. Return the bytes that exist between and inside the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with LiveBytes(model.parameters()) as live:
        for batch in batches:
            live.peak = 0
            loss = model(batch).square().mean()
            forward, live.peak = live.peak, 0
            loss.backward()
            backward = live.peak
            optimizer.step()
            held = live.now()
            optimizer.zero_grad()
    return {"after the optimizer": held, "forward": forward, "backward": backward}


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # so that rounding is not a question
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    batches = torch.randn(STEPS, dist.get_world_size() * ROWS, WIDTH)
    size = sum(weight.nbytes for weight in model[0].parameters())
    reference = copy.deepcopy(model)
    rows = [["one process", *train(reference, batches).values(), "–"]]
    own = batches[:, dist.get_rank() * ROWS :][:, :ROWS]
    for name, wrap in (("DDP", ddp), ("FSDP by hand", by_hand), ("FSDP2", fsdp2)):
        trained = wrap(copy.deepcopy(model))
        held = train(trained, own)
        is_equal = difference(trained, reference) < 1e-10
        verdict = "those of one process, but for rounding" if is_equal else "different"
        rows.append([name, *held.values(), verdict])
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} connected processes; {BLOCKS} blocks of {size:,} bytes\n")
        head = [
            "bytes in blocks",
            "after the optimizer",
            "forward",
            "backward",
            "final weights",
        ]
        cells = [[n, *(f"{each / size:.1f}" for each in held), last] for n, *held, last in rows]
        print(table(head, cells))
    dist.destroy_process_group()


def difference(trained: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference between any two weights."""
    trained = getattr(trained, "module", trained)
    pairs = []
    for block, expected in zip(trained, reference, strict=True):
        if isinstance(block, Sharded):
            weights = block.weights(block.gather())
        else:
            weights = dict(block.named_parameters())
        for name, weight in expected.named_parameters():
            own = weights[name]
            own = own.full_tensor() if hasattr(own, "full_tensor") else own
            pairs.append((own.detach() - weight.detach()).abs().max().item())
    return max(pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
