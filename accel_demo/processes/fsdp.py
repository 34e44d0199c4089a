"""Whether the model is sharded with FSDP2, and what a model needs for that."""

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.errors import UserError


def uses_fsdp() -> bool:
    """Return True if this process has created an `Accelerator` that shards models with FSDP."""
    from accelerate.state import AcceleratorState, DistributedType

    state = AcceleratorState._shared_state  # empty if there is no Accelerator
    return state.get("distributed_type") == DistributedType.FSDP


def is_sharded(model: nn.Module) -> bool:
    """Return True if each process holds only a part of each parameter."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def prepare_for_fsdp(model: nn.Module, device: torch.device) -> None:
    """Make it possible to shard the model, and make all processes start with rank 0's weights.

    Without FSDP, this function does nothing. Call it before `accelerator.prepare`.

    - FSDP2 does not accept weights in channels-last memory format.
    - DDP copies rank 0's weights to all processes. FSDP2 does not: each process would keep a part
      of its own weights, which differ, because each process has its own seed.
    - DDP copies rank 0's buffers before each forward pass. They are the running averages of the
      batch norms. Here, each process copies them after each forward pass in training. Otherwise an
      evaluation would depend on which process sees which image, and a checkpoint would contain the
      buffers of an arbitrary process.

    Accelerate's option fsdp_cpu_ram_efficient_loading also copies the weights, but fails if a model
    has buffers. Raises `UserError` if the model is compiled, or if it has buffers and computes in
    bfloat16: FSDP2 converts the parameters of a batch norm to bfloat16, but not its buffers.
    """
    if not uses_fsdp():
        return
    from accelerate.state import AcceleratorState

    if model._compiled_call_impl is not None:
        raise UserError("--compile is not supported with FSDP2. Leave it out.")
    precision, has_buffers = AcceleratorState().mixed_precision, any(True for _ in model.buffers())
    if has_buffers and precision != "no":
        raise UserError(
            f"FSDP2 with mixed_precision {precision} is not supported for models with batch norm. "
            "Set it to no, or use --model tiny_cnn."
        )
    model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    for tensor in model.state_dict().values():
        on_device = tensor.to(device)  # one tensor at a time, because the model may not fit
        dist.broadcast(on_device, src=0)
        tensor.copy_(on_device)
    if has_buffers:
        model.register_forward_hook(_copy_buffers_of_rank_0)


def _copy_buffers_of_rank_0(model: nn.Module, inputs, output) -> None:
    if model.training:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
