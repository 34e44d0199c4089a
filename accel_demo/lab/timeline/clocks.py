"""Measure how far the clocks of the ranks are apart."""

import time

import torch
import torch.distributed as dist

ROUND_TRIPS = 100


def clock_ahead(group: dist.ProcessGroup) -> int:
    """Return how many nanoseconds this rank's clock is ahead of rank 0's. All ranks must call this.

    Rank 0 repeatedly asks every other rank for its time, and assumes that the rank reads its clock
    halfway through the round trip. The error is at most half of the round trip, so rank 0 uses the
    answer with the shortest round trip. `group` must use gloo, as messages are CPU tensors.
    Source: section 8 of https://www.rfc-editor.org/rfc/rfc5905 (NTP)
    """
    rank = dist.get_rank()
    message = torch.zeros(1, dtype=torch.long)
    for other in range(1, dist.get_world_size()):
        if rank == other:
            for _ in range(ROUND_TRIPS):
                dist.recv(message, 0, group=group)
                dist.send(torch.tensor([time.time_ns()]), 0, group=group)
            dist.recv(message, 0, group=group)
        elif rank == 0:
            answers = []
            for _ in range(ROUND_TRIPS):
                sent_at = time.time_ns()
                dist.send(message, other, group=group)
                dist.recv(message, other, group=group)
                received_at = time.time_ns()
                ahead = int(message) - (sent_at + received_at) // 2
                answers.append((received_at - sent_at, ahead))
            dist.send(torch.tensor([min(answers)[1]]), other, group=group)
    return int(message) if rank > 0 else 0
