"""Messages between two processes, each noted down: all that the collectives here are made of."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


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
    tensors may lie in memory in any way; a received one is written in place. Both sides have to
    agree on shape and dtype, as torch.distributed's own send and recv ask.
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
            incoming.copy_(outgoing)
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

    def messages(self) -> list[Message]:
        """What all ranks have sent so far, by step, then by sender. Every rank has to ask."""
        sent = [None] * self.world_size
        dist.all_gather_object(sent, self.sent)
        everything = [message for one in sent for message in one]
        return sorted(everything, key=lambda message: (message.step, message.source))

    def bytes_sent(self) -> int:
        """How many bytes this rank has sent."""
        return sum(message.size for message in self.sent)

    def _note(self, tensor: torch.Tensor, target: int, step: int, what: str) -> None:
        size = tensor.numel() * tensor.element_size()
        self.sent.append(Message(step, self.rank, target, size, what))
