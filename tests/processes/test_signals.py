"""Test which signals are caught, and which step the processes stop after if one gets a signal."""

import os
import signal

import pytest
import torch.distributed as dist

from accel_demo.processes.cleanup import SIGNALS, signals_to_catch, sigterm_raises
from accel_demo.processes.signals import StopSignals


@pytest.fixture
def handlers():
    """`handlers(number, handler)` sets a signal's handler until the end of the test."""
    earlier = {number: signal.getsignal(number) for number in SIGNALS}
    yield signal.signal
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_only_signals_of_a_terminal_remain_ignored(number, handlers):
    """Slurm's signal is also caught if it is ignored, because the launcher has to ignore it."""
    assert number in signals_to_catch()
    handlers(number, signal.SIG_IGN)
    from_terminal = (signal.SIGINT, signal.SIGHUP)
    assert set(SIGNALS) - set(signals_to_catch()) == ({number} & set(from_terminal))


def test_a_command_cleans_up_once_if_its_terminal_is_closed(handlers):
    handlers(signal.SIGHUP, signal.SIG_DFL)
    cleaned_up = []
    with pytest.raises(KeyboardInterrupt), sigterm_raises(KeyboardInterrupt):
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)  # from the shell, after that of the system
            cleaned_up.append(True)
    assert cleaned_up == [True] and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    handlers(signal.SIGHUP, signal.SIG_IGN)
    with sigterm_raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)


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
