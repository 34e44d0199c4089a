"""Send, receive and log messages. `collectives` and `ring` are built on this module."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from accel_demo.processes.connect import gather_objects

# Real dtypes that torch can add, multiply and compare. Float8 and uint16 to uint64 are excluded.
SUMMABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


@dataclass(frozen=True)
class Message:
    """One tensor sent from rank `source` to rank `target`."""

    step: int  # round of the algorithm
    source: int
    target: int
    size: int  # in bytes
    label: str = ""  # which part of the data was sent


@dataclass(frozen=True)
class PlannedCall:
    """A collective that a rank is about to call."""

    mistake: str  # error in this rank's arguments, or an empty string
    call: str
    sends: list[tuple[str, str]]  # (argument name, description of the tensor) for each rank
    receives: list[tuple[str, str]]


class Wire:
    """Sends, receives and logs messages between the ranks of the default process group.

    `sent` lists this rank's messages in the order in which they were sent. Tensors must be dense,
    with any strides. Received data overwrites the receiver's tensor. The sender and the receiver of
    a message must use the same shape and dtype, as in torch.distributed. Only `agree` checks this.
    """

    def __init__(self):
        self.sent: list[Message] = []
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def send(self, tensor: torch.Tensor, target: int, step: int = 0, label: str = "") -> None:
        """Send a tensor. The caller may overwrite it as soon as `send` returns."""
        self._log(tensor, target, step, label)
        dist.send(tensor.contiguous(), target)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Wait for a message, and write it into this tensor."""
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
        label: str = "",
    ) -> None:
        """Send one tensor and receive another at the same time.

        If every rank called `send` before `receive`, all ranks could wait forever. If `target` and
        `source` are this rank itself, the tensor is copied and no message is sent.
        """
        if target == source == self.rank:
            incoming.copy_(outgoing.detach())
            return
        self._log(outgoing, target, step, label)
        buffer = incoming if incoming.is_contiguous() else torch.empty_like(incoming).contiguous()
        transfers = [
            dist.P2POp(dist.isend, outgoing.contiguous(), target),
            dist.P2POp(dist.irecv, buffer, source),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        if buffer is not incoming:
            incoming.copy_(buffer)

    def agree(self, name: str, sends: dict, receives: dict, mistake: str = "", **arguments) -> None:
        """Raise the same `ValueError` on all ranks if their arguments are invalid or do not match.

        `sends` and `receives` map an argument's name to the data that this rank sends or
        overwrites: one `tensor` for all ranks, or a list with one tensor per rank. An empty dict
        means no data. `mistake` is an error that this rank has already detected. The check costs
        one all_gather_object, which is not logged. torch.distributed has a similar check, at a
        similar cost, if TORCH_DISTRIBUTED_DEBUG is DETAIL.
        Source: https://docs.pytorch.org/docs/stable/distributed.html#torch-distributed-debug
        """
        sent, received = [], []
        try:
            for argument in {"source", "target"} & set(arguments):
                rank = arguments[argument]
                if type(rank) is not int or rank not in range(self.world_size):
                    ranks = f"a rank from 0 to {self.world_size - 1}"
                    raise ValueError(f"{argument} must be {ranks}, got {rank!r}")
            sent, received = self._described(sends), self._described(receives, is_overwritten=True)
        except ValueError as error:
            mistake = mistake or str(error)
        listed = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        calls = gather_objects(PlannedCall(mistake, f"{name}({listed})", sent, received))
        for rank, planned in enumerate(calls):
            if planned.mistake:
                raise ValueError(f"{planned.mistake} (on rank {rank})")
        for rank, planned in enumerate(calls):
            if planned.call != (first := calls[0].call):
                raise ValueError(f"rank 0 calls {first}, but rank {rank} calls {planned.call}")
        for source, sender in enumerate(calls):
            for target, receiver in enumerate(calls):
                if not (sender.sends and receiver.receives):
                    continue
                (outgoing, what), (incoming, room) = sender.sends[target], receiver.receives[source]
                if what != room:
                    why = f"rank {source} sends {what}, but rank {target} has room for {room}"
                    raise ValueError(f"{outgoing} must match {incoming}: {why}")

    def messages(self) -> list[Message]:
        """Return all ranks' messages, sorted by step and sender. Every rank must call this."""
        messages = [message for sent in gather_objects(self.sent) for message in sent]
        return sorted(messages, key=lambda message: (message.step, message.source))

    def bytes_sent(self) -> int:
        """Return the number of bytes that this rank has sent."""
        return sum(message.size for message in self.sent)

    def _log(self, tensor: torch.Tensor, target: int, step: int, label: str) -> None:
        self.sent.append(Message(step, self.rank, target, tensor.nbytes, label))

    def _described(self, argument: dict, is_overwritten: bool = False) -> list[tuple[str, str]]:
        """Return one pair (argument name, description of the tensor) for each rank."""
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
        return []


def _check(name: str, tensor: torch.Tensor, is_overwritten: bool) -> None:
    """Raise `ValueError` if the argument is not a tensor, or is overwritten but requires grad."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if is_overwritten and tensor.requires_grad and torch.is_grad_enabled():
        why = "it is overwritten: use torch.no_grad()"
        raise ValueError(f"{name} must not require grad, because {why}")
