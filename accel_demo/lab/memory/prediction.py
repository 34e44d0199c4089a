"""Predict the memory of a training step on each device, from tensor shapes alone."""

import torch
from torch import nn

from accel_demo.config import TrainConfig
from accel_demo.lab.memory.formula import FLOAT, KINDS, STATES, Bytes
from accel_demo.models import CLASSES, make_model


def predict(
    strategy: str, model_name: str, optimizer: str, processes: int, batch_size: int
) -> list[Bytes]:
    """Predict the bytes of each kind of memory on each device, which gets `batch_size` images.

    The prediction ignores images, scalars, BatchNorm's buffers, and all tensors that exist only
    during part of forward or backward, except "copies".
    """
    model, states = on_meta(model_name), STATES[optimizer]
    layers = activations(model, batch_size)
    kept = layers + activations_of_the_loss(batch_size)
    if strategy == "FSDP2":
        ranks = [fsdp(model, states, rank, processes) for rank in range(processes)]
        return [sizes | {"activations": kept} for sizes in ranks]
    size = FLOAT * sum(parameter.numel() for parameter in model.parameters())
    first = dict.fromkeys(KINDS, 0)
    first |= {"parameters": size, "gradients": size, "optimizer state": states * size}
    if strategy == "DDP":
        # The buckets contain a copy of all gradients. gradient_as_bucket_view=True avoids this.
        # https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
        return [first | {"buckets": size, "activations": kept}] * processes
    # Only the first device keeps gradients and optimizer state, and it computes the loss for all
    # images. The other devices get a copy of the parameters in each step.
    # Source: torch/nn/parallel/replicate.py
    loss = activations_of_the_loss(processes * batch_size)
    other = dict.fromkeys(KINDS, 0) | {"copies": size, "activations": layers}
    return [first | {"activations": layers + loss}, *[other] * (processes - 1)]


def fsdp(model: nn.Module, states: int, rank: int, processes: int) -> Bytes:
    """Return the bytes of a rank's shards, and of the largest layer after it has been gathered.

    FSDP2 splits each parameter along its first dimension into one chunk per rank. If a rank's
    chunk is shorter than the first, the parameter and the gradient are padded to the full length,
    but the optimizer state is not.
    Source: FSDPParam._init_sharded_param in torch/distributed/fsdp/_fully_shard/_fsdp_param.py
    """
    share = state = 0
    for parameter in model.parameters():
        piece = -(-len(parameter) // processes)
        own = min(piece, max(0, len(parameter) - rank * piece))
        share += FLOAT * piece * parameter[0].numel()
        state += FLOAT * own * parameter[0].numel() * states
    sizes = {"parameters": share, "gradients": share, "optimizer state": state}
    copies = max(gathered_bytes(layer, processes) for layer in model.modules())
    return dict.fromkeys(KINDS, 0) | sizes | {"copies": copies}


def gathered_bytes(layer: nn.Module, processes: int) -> int:
    """Return the bytes of a layer's own parameters after FSDP2 has gathered them.

    FSDP2 pads each parameter so that all `processes` chunks have equal lengths.
    """
    total = 0
    for parameter in layer.parameters(recurse=False):
        rows = -(-len(parameter) // processes) * processes
        total += FLOAT * rows * parameter[0].numel()
    return total


@torch.no_grad()
def activations(model: nn.Module, batch_size: int) -> int:
    """Return the bytes of the tensors that the layers save for backward.

    Convolutions and linear layers save their input. BatchNorm saves its input and each channel's
    mean and inverse standard deviation, ReLU saves its output, and max pooling saves its input and
    the index of each maximum. A tensor that two layers save is counted once. The images are not
    counted. Raises `ValueError` for a layer type without a formula.
    Source: tools/autograd/derivatives.yaml in https://github.com/pytorch/pytorch
    """
    images = torch.empty(batch_size, 1, 28, 28, device="meta")
    saved = {}  # {address: storage}; keeps storages alive, so that no address is reused

    def save(layer, inputs, output):
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
            raise ValueError(f"no formula for the activations of {type(layer).__name__}")
        for tensor in tensors:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage

    layers = [layer for layer in model.modules() if not [*layer.children()]]
    handles = [layer.register_forward_hook(save) for layer in layers]
    model(images)
    for handle in handles:
        handle.remove()
    saved.pop(images.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in saved.values())


def activations_of_the_loss(images: int) -> int:
    """Return the bytes that cross_entropy saves: the log-probabilities and one total weight."""
    return FLOAT * images * CLASSES + FLOAT


def on_meta(model_name: str) -> nn.Module:
    """Return a model on the meta device, where tensors have a shape but use no memory."""
    with torch.device("meta"):
        model = make_model(TrainConfig(model=model_name))
    return model.to(memory_format=torch.contiguous_format)
