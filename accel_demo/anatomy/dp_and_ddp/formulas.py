"""Predict the bytes that each device receives and holds, and compare them with the counts."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from accel_demo.anatomy import memory
from accel_demo.anatomy.dp_and_ddp.counting import (
    BACKWARD,
    CONSTRUCTOR,
    DP,
    FORWARD,
    STEP,
    DeviceCounts,
)
from accel_demo.models import CLASSES

FORMULAS = {  # the keys of `DeviceCounts.received` and `memory.KINDS`: (DataParallel, DDP)
    CONSTRUCTOR: ("0", "rank 0: 8·(N−1), others: P + B + M"),
    FORWARD: ("device 0: Y·(N−1)/N, others: P + B + X/N", "rank 0: 0, others: B"),
    BACKWARD: ("device 0: P·(N−1), others: Y/N", "2·P·(N−1)/N"),
    STEP: ("0", "0"),
    "parameters": ("device 0: P, others: 0", "P"),
    "gradients": ("device 0: P, others: 0", "P"),
    "optimizer state": ("device 0: 2·P, others: 0", "2·P"),
    "buckets": ("0", "P"),
    "gathered": ("device 0: Y, others: 0", "0"),
}


@dataclass
class Sizes:
    """Sizes in bytes that the formulas depend on."""

    parameters: int  # P in the formulas
    buffers: int  # B
    inputs: int  # X: the images of the global batch
    outputs: int  # Y: the logits of the global batch
    metadata: int  # M: what DDP sends to check that all parameters have the same shapes


@dataclass
class ByteCount:
    """A counted number of bytes, and the number that the formula predicts."""

    name: str  # one of the keys of `FORMULAS`
    actual: int
    expected: float
    # The ring sends whole elements. If N does not divide the length of a bucket, a rank receives up
    # to two elements more or less per bucket than the formula predicts.
    tolerance: int = 0

    @property
    def difference(self) -> float:
        return abs(self.actual - self.expected)


def sizes_of(model_name: str) -> Sizes:
    model = memory.make_contiguous_model(model_name, torch.device("cpu"))
    images, _ = memory.batch(torch.device("cpu"))
    dimensions = sum(parameter.dim() for parameter in model.parameters())
    return Sizes(
        parameters=sum(parameter.nbytes for parameter in model.parameters()),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        inputs=images.nbytes,
        outputs=len(images) * CLASSES * 4,  # float32
        # One int64 from each rank, then the shape and the strides of each parameter from rank 0.
        # Source: verify_params_across_processes in torch/csrc/distributed/c10d/reducer.cpp
        metadata=8 * (dist.get_world_size() - 1) + 16 * dimensions,
    )


def expected_counts(method: str, index: int, devices: int, sizes: Sizes) -> dict[str, float]:
    """Return the bytes that the formulas predict for one device, with the keys of `FORMULAS`."""
    is_first, others = index == 0, devices - 1
    weights, buffers = sizes.parameters, sizes.buffers
    if method == DP:
        received = [0, weights + buffers + sizes.inputs // devices, sizes.outputs // devices, 0]
        if is_first:
            received = [0, sizes.outputs * others // devices, weights * others, 0]
        own, gathered = (weights, sizes.outputs) if is_first else (0, 0)
        held = [own, own, 2 * own, 0, gathered]
    else:
        in_backward = 2 * weights * others / devices
        received = [weights + buffers + sizes.metadata, buffers, in_backward, 0]
        if is_first:
            received = [8 * others, 0, in_backward, 0]
        held = [weights, weights, 2 * weights, weights, 0]
    return dict(zip(FORMULAS, [*received, *held], strict=True))


def byte_counts(counts: dict[str, list[DeviceCounts]], sizes: Sizes) -> list[ByteCount]:
    """Return all counted numbers of bytes of every device."""
    found = []
    for method, devices in counts.items():
        for index, device in enumerate(devices):
            expected = expected_counts(method, index, len(devices), sizes)
            actual = device.received | device.held.by_kind
            for name in FORMULAS:
                tolerance = 8 * len(device.buckets) if name == BACKWARD else 0  # float32
                found.append(ByteCount(name, actual[name], expected[name], tolerance))
    return found


def comparison(found: list[ByteCount]) -> str:
    """Return a sentence on how many counts equal their formulas.

    Raises `RuntimeError` if a count differs by more than its tolerance.
    """
    wrong = [count for count in found if count.difference > count.tolerance]
    if wrong:
        raise RuntimeError(f"counts that differ from their formulas: {wrong}")
    equal = sum(count.difference == 0 for count in found)
    text = f"{equal} of {len(found)} byte counts equal their formulas."
    if equal < len(found):
        most = math.ceil(max(count.difference for count in found))
        text += f"\nThe others differ by at most {most} bytes, "
        text += "because the ring divides buckets into whole elements."
    return text
