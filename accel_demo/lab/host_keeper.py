"""Keep the namespaces of one host alive until stdin is closed, then kill the processes on the host.

`hosts.limited_hosts` starts this program in new namespaces, once per host. The operating system
closes stdin even if the command is killed with SIGKILL. Without the network, the processes of the
command would wait for each other until a collective times out.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from accel_demo.lab.cables import replace_hosts_file


def main() -> None:
    own_network = os.readlink("/proc/self/ns/net")
    if network_of(os.getppid()) in (own_network, None):
        # Outside new namespaces, this program would kill all processes on the machine.
        print("error: only start this program with unshare, as hosts.py does", file=sys.stderr)
        sys.exit(2)
    replace_hosts_file(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
    while processes := processes_in(own_network):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def network_of(pid: int) -> str | None:
    """Return the network namespace of a process, or None if it has exited or cannot be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")  # zombies have no namespace
    except OSError:
        return None


def processes_in(network: str) -> list[int]:
    """Return the IDs of the other processes in this network namespace that can be killed."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and network_of(pid) == network]


if __name__ == "__main__":
    main()
