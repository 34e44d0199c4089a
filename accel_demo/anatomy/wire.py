"""Messages between two processes, each noted down: all that the collectives here are made of."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from accel_demo.processes.connect import gather_objects

# Real numbers that torch adds, multiplies and compares. (Not float8, nor the wider unsigned ones.)
SUMMABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


@dataclass(frozen=True)
class Message:
    """One tensor on its way. `step` counts the rounds of an algorithm; `what` names the part."""

    step: int
    source: int
    target: int
    size: int  # in bytes
    what: str = ""


class Wire:
    """`send` and `receive` between the ranks of the default process group.

    `sent` holds what this rank has sent, in order; a message is noted by its sender alone. The
    tensors are dense and may have any strides; a received one is written in place. Both sides have
    to agree on shape and dtype, as torch.distributed's own send and recv ask. `send`, `receive` and
    `exchange` do not look: that is what `agree` is for.
    """

    def __init__(self):
        self.sent: list[Message] = []
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def send(self, tensor: torch.Tensor, target: int, step: int = 0, what: str = "") -> None:
        """Send a tensor, and wait until it may be overwritten."""
        self._note(tensor, target, step, what)
        dist.send(tensor.contiguous(), target)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Wait for a tensor, and write it into this one."""
        buffer = tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
        dist.recv(buffer, source)
        if buffer is not tensor:
            tensor.copy_(buffer)

    def exchange(
        self,
        outgoing: torch.Tensor,
        target: int,
        incoming: torch.Tensor,
        source: int,
        step: int = 0,
        what: str = "",
    ) -> None:
        """Send one tensor and receive another at the same time.

        Where every rank first sends and then receives, all can wait for each other for ever. What
        a rank would exchange with itself is copied, and is no message.
        """
        if target == source == self.rank:
            incoming.copy_(outgoing.detach())
            return
        self._note(outgoing, target, step, what)
        buffer = incoming if incoming.is_contiguous() else torch.empty_like(incoming).contiguous()
        both = [
            dist.P2POp(dist.isend, outgoing.contiguous(), target),
            dist.P2POp(dist.irecv, buffer, source),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if buffer is not incoming:
            incoming.copy_(buffer)

    def agree(self, name: str, gives: dict, gets: dict, mistake: str = "", **arguments) -> None:
        """Raise the same `ValueError` on all ranks where what they are about to do cannot be.

        Every rank says what it calls with which arguments, and its `mistake` where it has found
        one. `gives` and `gets` are empty, or have what this rank sends or overwrites by the name of
        its argument: one `tensor` for all, or else a list with a tensor for each rank. None of this
        is noted. The price is an all_gather_object; torch.distributed compares at a like price
        where TORCH_DISTRIBUTED_DEBUG is DETAIL.
        Source: https://docs.pytorch.org/docs/stable/distributed.html#torch-distributed-debug
        """
        given = gotten = None
        try:
            for argument in {"source", "target"} & set(arguments):
                rank = arguments[argument]
                if type(rank) is not int or rank not in range(self.world_size):
                    ranks = f"a rank from 0 to {self.world_size - 1}"
                    raise ValueError(f"{argument} must be {ranks}, got {rank!r}")
            given, gotten = self._described(gives), self._described(gets, is_overwritten=True)
        except ValueError as error:
            mistake = mistake or str(error)
        listed = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        everyone = gather_objects((mistake, f"{name}({listed})", given, gotten))
        for rank, (mistake, *_) in enumerate(everyone):
            if mistake:
                raise ValueError(f"{mistake} (on rank {rank})")
        calls = [call for _, call, _, _ in everyone]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise ValueError(f"rank 0 calls {calls[0]}, but rank {rank} calls {call}")
        for source, (_, _, given, _) in enumerate(everyone):
            for target, (_, _, _, gotten) in enumerate(everyone):
                if given and gotten and given[target][1] != gotten[source][1]:
                    (theirs, what), (mine, room) = given[target], gotten[source]
                    both = f"{what} of rank {source} for rank {target}, which has room for {room}"
                    raise ValueError(f"{theirs} must match {mine}, got {both}")

    def messages(self) -> list[Message]:
        """What all ranks have sent so far, by step, then by sender. Every rank has to ask."""
        sent = gather_objects(self.sent)
        everything = [message for one in sent for message in one]
        return sorted(everything, key=lambda message: (message.step, message.source))

    def bytes_sent(self) -> int:
        """How many bytes this rank has sent."""
        return sum(message.size for message in self.sent)

    def _note(self, tensor: torch.Tensor, target: int, step: int, what: str) -> None:
        size = tensor.numel() * tensor.element_size()
        self.sent.append(Message(step, self.rank, target, size, what))

    def _described(self, argument: dict, is_overwritten: bool = False) -> list[tuple] | None:
        """For each rank: the argument's name, and dtype, shape and device of the tensor in it."""
        for name, tensors in argument.items():
            if name == "tensor":
                tensors = [tensors] * self.world_size
            if not isinstance(tensors, list) or len(tensors) != self.world_size:
                got = len(tensors) if isinstance(tensors, list) else type(tensors).__name__
                raise ValueError(f"{name} must be a list of {self.world_size} tensors, got {got}")
            for tensor in tensors:
                _check(name, tensor, is_overwritten)
            return [
                (name, f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device.type}")
                for tensor in tensors
            ]
        return None


def _check(name: str, tensor: torch.Tensor, is_overwritten: bool) -> None:
    """Raise `ValueError` where the values of this tensor cannot be sent or written as bytes."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} takes torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be dense, got {layout}")
    if tensor.is_meta:
        raise ValueError(f"{name} must hold values, got a tensor on the device meta")
    if tensor.is_conj() or tensor.is_neg():  # views that change the sign only when they are read
        why = "its memory holds other signs: use resolve_conj() and resolve_neg()"
        raise ValueError(f"{name} must be no view of a conjugate, because {why}")
    if not is_overwritten:
        return
    if tensor.requires_grad and torch.is_grad_enabled():
        why = "it is overwritten: use torch.no_grad()"
        raise ValueError(f"{name} must not require grad, because {why}")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        why = "it is overwritten: clone it"
        raise ValueError(f"{name} must not be from torch.inference_mode(), because {why}")
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in steps):
        why = "it is overwritten: clone it"
        raise ValueError(f"{name} must have memory for each element, because {why}")
