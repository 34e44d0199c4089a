"""How many bytes a training step holds on each device, from the shapes alone: nothing is run.

P is the number of parameters, N the number of devices; a float32 has four bytes.
"""

import torch
from torch import nn

from accel_demo.config import TrainConfig
from accel_demo.models import CLASSES, make_model

KINDS = ["parameters", "gradients", "optimizer state", "buckets", "copies", "activations"]
STRATEGIES = ["nn.DataParallel", "DDP", "FSDP2"]
# Tensors of a parameter's size that the optimizer keeps: AdamW two averages, SGD its momentum.
# https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
STATES = {"adamw": 2, "sgd": 1}
FLOAT, INT64 = 4, 8
Bytes = dict[str, int]

# The formulas in words. DataParallel has them for all devices together, where they are one process.
FORMULAS = {
    "nn.DataParallel": {
        "parameters": "4P",
        "gradients": "4P",
        "copies": "4P for each further device",
        "activations": "of all layers, for all images",
    },
    "DDP": {
        "parameters": "4P",
        "gradients": "4P",
        "buckets": "4P",
        "activations": "of all layers, for a rank's images",
    },
    "FSDP2": {
        "parameters": "4P / N",
        "gradients": "4P / N",
        "copies": "the largest layer, gathered",
        "activations": "of all layers, for a rank's images",
    },
}
STATE_FORMULAS = {"adamw": "8P", "sgd": "4P"}


def formula_of(strategy: str, kind: str, optimizer: str) -> str:
    """The formula behind a number of `predict`, in words; empty where the strategy has none."""
    if kind == "optimizer state":
        return STATE_FORMULAS[optimizer] + (" / N" if strategy == "FSDP2" else "")
    return FORMULAS[strategy].get(kind, "")


def predict(
    strategy: str, model: str, optimizer: str, processes: int, batch_size: int
) -> list[Bytes]:
    """The bytes of each kind on each device (`processes` of them), with `batch_size` images each.

    Left out are BatchNorm's buffers, the images, single numbers, and what is there for a part of
    forward or backward only, other than "copies".
    """
    network, states = on_meta(model), STATES[optimizer]
    if strategy == "FSDP2":
        kept = _activations(network, batch_size)
        return [fsdp(network, states, rank, processes) | kept for rank in range(processes)]
    everything = FLOAT * sum(parameter.numel() for parameter in network.parameters())
    first = {
        "parameters": everything,
        "gradients": everything,
        "optimizer state": states * everything,
    }
    if strategy == "DDP":
        # A copy of all gradients, in buckets: gradient_as_bucket_view=True would do without it.
        # https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
        here = _bytes(**first, buckets=everything) | _activations(network, batch_size)
        return [here] * processes
    # The first device keeps everything, and takes the loss of all images; the others get a copy of
    # the parameters in each step. Source: torch/nn/parallel/replicate.py
    layers = activations(network, batch_size)
    loss = activations_of_the_loss(processes * batch_size)
    others = [_bytes(copies=everything, activations=layers) for _ in range(processes - 1)]
    return [_bytes(**first, activations=layers + loss), *others]


def fsdp(network: nn.Module, states: int, rank: int, processes: int) -> Bytes:
    """A share of everything, and the largest layer's parameters while they are gathered.

    Each parameter is cut along its first dimension into pieces of the same length. A rank whose
    piece is shorter has memory for a whole one all the same, but not in its optimizer.
    Source: FSDPParam._init_sharded_param in torch/distributed/fsdp/_fully_shard/_fsdp_param.py
    """
    share = state = 0
    for parameter in network.parameters():
        piece = -(-len(parameter) // processes)
        own = min(piece, max(0, len(parameter) - rank * piece))
        share += FLOAT * piece * parameter[0].numel()
        state += FLOAT * own * parameter[0].numel() * states
    copies = max(gathered_bytes(layer, processes) for layer in network.modules())
    return _bytes(**{"parameters": share, "gradients": share, "optimizer state": state}) | {
        "copies": copies
    }


def gathered_bytes(layer: nn.Module, processes: int) -> int:
    """A layer's own parameters in one piece, each filled up to `processes` pieces."""
    total = 0
    for parameter in layer.parameters(recurse=False):
        rows = -(-len(parameter) // processes) * processes
        total += FLOAT * rows * parameter[0].numel()
    return total


@torch.no_grad()
def activations(network: nn.Module, batch_size: int) -> int:
    """What the layers keep in forward because their backward needs it.

    A convolution and a linear layer keep their input, BatchNorm its input and the mean and spread
    of each channel, ReLU its output, max pooling its input and the place of each maximum. What two
    layers keep is there once; the images are not counted. Raises ValueError for other layers.
    Source: tools/autograd/derivatives.yaml in https://github.com/pytorch/pytorch
    """
    images = torch.empty(batch_size, 1, 28, 28, device="meta")
    kept = {}  # by their storage, which is held, so that no other one gets its number

    def keep(layer, inputs, output):
        tensors = []
        if isinstance(layer, nn.Conv2d | nn.Linear):
            tensors = [inputs[0]]
        elif isinstance(layer, nn.BatchNorm2d):
            tensors = [inputs[0], torch.empty(2 * layer.num_features, device="meta")]
        elif isinstance(layer, nn.ReLU):
            tensors = [output]
        elif isinstance(layer, nn.MaxPool2d):
            tensors = [inputs[0], torch.empty_like(output, dtype=torch.int64)]
        elif not isinstance(layer, nn.AdaptiveAvgPool2d | nn.Flatten | nn.Dropout):
            raise ValueError(f"no formula for what {type(layer).__name__} keeps")
        for tensor in tensors:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage

    layers = [layer for layer in network.modules() if not [*layer.children()]]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    network(images)
    for handle in handles:
        handle.remove()
    kept.pop(images.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def activations_of_the_loss(images: int) -> int:
    """cross_entropy keeps the logarithms of all probabilities, and the sum of the weights."""
    return FLOAT * images * CLASSES + FLOAT


def on_meta(model: str) -> nn.Module:
    """The network without memory: its tensors have a shape and no content."""
    with torch.device("meta"):
        network = make_model(TrainConfig(model=model))
    return network.to(memory_format=torch.contiguous_format)


def _activations(network: nn.Module, batch_size: int) -> Bytes:
    here = activations(network, batch_size) + activations_of_the_loss(batch_size)
    return {"activations": here}


def _bytes(**sizes: int) -> Bytes:
    return {**dict.fromkeys(KINDS, 0), **sizes}
