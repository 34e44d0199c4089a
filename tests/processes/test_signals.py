"""Test which step the processes stop after, if one of them gets a signal."""

import pytest
import torch.distributed as dist

from accel_demo.processes.signals import StopSignals


class Connection:
    """A process's connection to a store that is as slow as a `TCPStore` may be.

    `set` does not wait for the store. The store has the value for certain only after this process
    has read something through the same connection.
    """

    def __init__(self, values: dict):
        self.values, self.sent = values, {}

    def set(self, name: str, value: str) -> None:
        self.sent[name] = value

    def get(self, name: str) -> str:
        self.values |= self.sent
        return self.values[name]

    def check(self, names: list[str]) -> bool:
        self.values |= self.sent
        return all(name in self.values for name in names)


@pytest.mark.parametrize(("backend", "last"), [("gloo", 6), ("nccl", 9)])
def test_all_processes_stop_after_the_same_step_even_if_the_store_is_slow(
    backend, last, monkeypatch
):
    values, log_every = {}, 4
    ranks = [(StopSignals(log_every), Connection(values)) for _ in range(2)]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    ranks[1][0].is_asked_again()  # the signal
    stopped = []
    for step in range(5, 12):
        for rank in (0, 1):  # in this order, rank 0 reads before rank 1 chooses the last step
            signals, connection = ranks[rank]
            monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda c=connection: c)
            if signals.after(step):
                stopped.append((rank, step))
        if stopped:
            break
    assert stopped == [(0, last), (1, last)]
