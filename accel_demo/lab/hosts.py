"""Hosts for the processes of one command: each process has its own network, with a limited rate.

`limited_hosts` creates a network namespace for each process and connects them with virtual cables.
A process moves to its host with `Hosts.enter`, or is started there with `Hosts.wrapped`. From then
on, all that it sends to another process crosses its cable.

Only the network is separate. The processes still share the CPU, the files and the host name.
"""

import ctypes
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab import cables
from accel_demo.options import Parser
from accel_demo.processes.cleanup import sigterm_raises
from accel_demo.wording import byte_size, duration

MOST_HOSTS = 100
MOST_ALL_REDUCE_SECONDS = 20  # so that no collective times out
CLONE_FS = 0x200  # from linux/sched.h
UNSHARE = ["unshare", "--net", "--mount"]


@dataclass(frozen=True)
class Hosts:
    """The hosts that exist, by the rank of their process."""

    address: str  # of rank 0's host
    interface: str
    pids: list[int]  # of each host's keeper
    networks: list[str]  # the network namespace of each host

    def enter(self) -> None:
        """Move this process to the host of its rank. Call this before it connects."""
        libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
        pid = self.pids[int(os.environ["RANK"])]
        # The kernel refuses to change the mounts of a thread that shares its working directory.
        _check_succeeded(libc.unshare(CLONE_FS))
        for namespace in ("net", "mnt"):
            with open(f"/proc/{pid}/ns/{namespace}", "rb") as file:
                _check_succeeded(libc.setns(file.fileno(), 0))
        os.chdir(folder)
        os.environ.update(self.variables())
        threading.Thread(target=_die_with, args=[os.pidfd_open(pid)], daemon=True).start()

    def wrapped(self, rank: int, command: list[str]) -> list[str]:
        """Return the command that runs `command` on the host of this rank.

        The command is killed if this process dies, as in `enter`.
        """
        own = f"/proc/{self.pids[rank]}/ns"
        namespaces = [f"--net={own}/net", f"--mount={own}/mnt", f"--wd={os.getcwd()}"]
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", *namespaces, *command]

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the processes.

        GPUs are hidden, because NCCL would notice that the processes are on the same machine, and
        would send data through its memory instead of the network.
        """
        return {
            "MASTER_ADDR": self.address,
            "GLOO_SOCKET_IFNAME": self.interface,
            "CUDA_VISIBLE_DEVICES": "-1",
        }

    def check(self, networks_by_rank: list[str]) -> None:
        """Raise `RuntimeError` unless each process was on its own host.

        `networks_by_rank` contains what `own_network` returned in each process.
        """
        expected = self.networks[: len(networks_by_rank)]
        if networks_by_rank != expected or len(set(expected)) < len(expected):
            raise RuntimeError(f"the processes were in {networks_by_rank} instead of {expected}")


@contextmanager
def limited_hosts(processes: int, rate: str | None) -> Iterator[Hosts | None]:
    """Create the hosts. Yields None if `rate` is None.

    When the `with` statement ends, or if this process dies, the hosts are removed. In the meantime,
    SIGTERM is handled like Ctrl-C. Raises `UserError` if this machine cannot create hosts.
    """
    if rate is None:
        yield None
        return
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises(KeyboardInterrupt))
        problem = "a network namespace could not be prepared"
        try:
            network = stack.enter_context(cables.open_cables(processes, rate))
            with cables.hosts_file(network) as file:
                mount = f"mount --bind {shlex.quote(file)} /etc/hosts"
                pids = [
                    stack.enter_context(cables.kept_namespaces(UNSHARE, problem, mount))
                    for _ in range(processes)
                ]
        except cables.Unavailable as reason:
            raise UserError(f"--rate does not work here: {reason}") from None
        for rank, pid in enumerate(pids):
            network.connect(rank, pid)
        names = [os.readlink(f"/proc/{pid}/ns/net") for pid in pids]
        yield Hosts(network.address(0), network.interface, pids, names)


def own_network() -> str:
    """Return the name of this process's network namespace, or "" if the system has none."""
    return os.readlink("/proc/self/ns/net") if sys.platform == "linux" else ""


def add_rate(parser: Parser) -> None:
    """Add the flag `--rate RATE`."""
    help = "limit what each process can send, such as 100mbit (needs root and Linux)"
    parser.add_argument("--rate", metavar="RATE", help=help)


def check_rate(rate: str | None, processes: int, config: TrainConfig) -> None:
    """Raise `UserError` if the value of --rate is invalid, or too slow to train this model."""
    if rate is None:
        return
    cables.check("--rate", rate)
    if processes < 2:
        raise UserError("--rate needs at least 2 processes, because a single process sends nothing")
    if processes > MOST_HOSTS:
        raise UserError(f"--rate allows at most {MOST_HOSTS} processes, got {processes}")
    seconds = sending_seconds(gradient_bytes(config), processes, rate)
    if seconds > MOST_ALL_REDUCE_SECONDS:
        raise UserError(
            f"at {rate_text(rate)}, each all-reduce would take {duration(seconds)}, and at most "
            f"{MOST_ALL_REDUCE_SECONDS} s are allowed. Choose a higher --rate or a smaller --model."
        )


def gradient_bytes(config: TrainConfig) -> int:
    """Return the size of the gradients that DDP sends in each step."""
    from accel_demo.models import make_model  # slow: imports torch

    return sum(p.numel() * p.element_size() for p in make_model(config).parameters())


def sending_time(size: int, processes: int, rate: str) -> str:
    """Return a sentence on how long each process sends if it has `size` bytes of gradients."""
    sent, seconds = byte_size(bytes_sent(size, processes)), sending_seconds(size, processes, rate)
    return (
        f"with {processes} processes, each of them sends {sent} in each step, "
        f"which takes about {duration(seconds)} at {rate_text(rate)}"
    )


def sending_seconds(size: int, processes: int, rate: str) -> float:
    """Return how long each process must send in an all-reduce of `size` bytes."""
    kilobits_per_second = cables.in_first_unit(rate, cables.RATE_UNITS)
    return bytes_sent(size, processes) * 8 / (1000 * kilobits_per_second)


def bytes_sent(size: int, processes: int) -> float:
    """Return how many bytes each process sends in a ring all-reduce of `size` bytes.

    No algorithm sends less. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms,
    2009, https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    return 2 * (processes - 1) / processes * size


def rate_text(rate: str) -> str:
    """Format a rate: "100mbit" becomes "100 Mbit/s"."""
    number, unit = float(rate[:-4]), rate[-4:]  # all units have four letters
    return f"{number:g} {unit if unit == 'kbit' else unit.capitalize()}/s"


def _die_with(keeper: int) -> None:
    """Kill this process as soon as the keeper of its host exits, because the command has died.

    Without the network, the processes would wait for each other until a collective times out.
    """
    select.select([keeper], [], [])  # a pidfd is readable once its process has exited
    os.kill(os.getpid(), signal.SIGKILL)


def _check_succeeded(result: int) -> None:
    """Raise `OSError` if a function of the C library has failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
