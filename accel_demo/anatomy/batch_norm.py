"""Rebuild SyncBatchNorm by hand, and compare it and BatchNorm with the whole batch on one process.

python -m accel_demo.anatomy.batch_norm

`nn.SyncBatchNorm` refuses tensors on the CPU. The `SyncBatchNorm` of this module accepts them.
"""

from copy import deepcopy
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.group import results_by_rank
from accel_demo.show import table

SPLITS = ((12,), (6, 6), (8, 4), (4, 4, 4), (7, 4, 1))  # how many of 12 samples each rank has
LAYERS = ("`BatchNorm1d`", "by hand")
# The option that stops DDP from sending buffers in forward. PyTorch before 2.13 has the older name.
IS_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
NO_BROADCAST = {"forward_sync_buffers" if IS_RENAMED else "broadcast_buffers": False}
EQUAL = 1e-10  # float64 results of sums in another order differ by less than this share


class AllReduce(torch.autograd.Function):
    """Sum a tensor over all ranks. Each rank's gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return AllReduce.apply(gradient)


class SyncBatchNorm(_BatchNorm):
    """Normalize with the mean and variance of all ranks' samples, on any device.

    Like `nn.SyncBatchNorm`, for inputs [B, C, ...]. B may be different on each rank, but not 0.
    Every rank must call forward and backward. In evaluation, this is a plain BatchNorm. The outputs
    have the inputs' type. Raise ValueError if the ranks together have one value per channel.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        # In 16 bits, a count above 256 or 2,048 is rounded, and a sum may be infinite.
        inputs = input.movedim(1, -1).to(torch.promote_types(input.dtype, torch.float32))
        rows = inputs.flatten(0, -2)  # [B × height × width, C]
        total = AllReduce.apply(torch.cat([rows.sum(0), rows.new_tensor([len(rows)])]))
        count, mean = total[-1], total[:-1] / total[-1]
        variance = AllReduce.apply((rows - mean).square().sum(0)) / count
        if count < 2:  # on all ranks, so none waits for the others
            message = "Expected more than 1 value per channel when training, got 1 on all ranks"
            raise ValueError(message)
        self.update_running_statistics(mean.detach(), variance.detach(), count.detach())
        outputs = (inputs - mean) * torch.rsqrt(variance + self.eps)
        outputs = outputs if self.weight is None else outputs * self.weight
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.movedim(-1, 1).to(input.dtype)

    @torch.no_grad()
    def update_running_statistics(self, mean, variance, count) -> None:
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return  # they are not tracked
        self.num_batches_tracked += 1
        # Without a momentum, the statistics are plain averages over all batches.
        factor = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean += factor * (mean - self.running_mean)
        self.running_var += factor * (variance * count / (count - 1) - self.running_var)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Accept inputs with any number of dimensions, instead of those of one BatchNorm class."""


def convert(model: nn.Module) -> nn.Module:
    """Turn each BatchNorm layer of a model into a `SyncBatchNorm`, in place."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SyncBatchNorm  # keeps the parameters and buffers
    return model


def compare(device: torch.device, split: tuple[int, ...], layer: str) -> dict[str, float]:
    """Run one forward and backward. Return the largest difference from the whole batch, by tensor.

    Differences are relative to the largest value. The gradients of parameters are DDP's averages.
    """
    torch.manual_seed(0)
    inputs = torch.randn(sum(split), 3, 4, dtype=torch.float64, device=device) + 2
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
    model = model.double().to(device)
    whole = deepcopy(model)
    all_inputs = inputs.clone().requires_grad_()
    all_outputs = whole(all_inputs)
    all_outputs.square().mean().backward()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(convert(model) if layer == "by hand" else model)
    own_inputs = inputs.split(split)[rank].clone().requires_grad_()
    outputs = replica(own_inputs)
    # DDP averages over the ranks, so a rank with more samples needs a larger weight.
    (outputs.square().mean() * len(own_inputs) * ranks / len(inputs)).backward()
    pairs = {
        "output": (outputs, all_outputs.split(split)[rank]),
        "gradient of the input": (
            gradient(own_inputs) / ranks,
            gradient(all_inputs).split(split)[rank],
        ),
        "gradient of the weight": (gradient(model[0].weight), gradient(whole[0].weight)),
        "gradient of the bias": (gradient(model[0].bias), gradient(whole[0].bias)),
        "running mean": (model[0].running_mean, whole[0].running_mean),
        "running variance": (model[0].running_var, whole[0].running_var),
    }
    return {name: difference(own, expected) for name, (own, expected) in pairs.items()}


def gradient(tensor):
    assert isinstance(tensor.grad, torch.Tensor), "backward has not reached the tensor"
    return tensor.grad


def difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    return ((tensor - expected).abs().max() / expected.abs().max()).item()


def compare_all(device: torch.device) -> list[dict[str, float]]:
    """Compare both layers, for each way to divide the samples among this number of ranks."""
    splits = [split for split in SPLITS if len(split) == dist.get_world_size()]
    return [compare(device, split, layer) for split in splits for layer in LAYERS]


def print_comparison() -> None:
    rows, names = [], []
    for processes in sorted({len(split) for split in SPLITS}):
        by_rank = results_by_rank(compare_all, processes)
        assert len(by_rank) == processes
        keys = [(split, layer) for split in SPLITS if len(split) == processes for layer in LAYERS]
        for (split, layer), of_ranks in zip(keys, zip(*by_rank, strict=True), strict=True):
            names = [*of_ranks[0]]
            worst = [max(differences[name] for differences in of_ranks) for name in names]
            cells = ["equal" if each < EQUAL else f"off by {each:.0%}" for each in worst]
            rows.append([", ".join(map(str, split)), layer, *cells])
    print(table(["samples of each rank", "layer", *names], rows))


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        print_comparison()
