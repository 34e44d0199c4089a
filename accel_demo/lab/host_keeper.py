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

from accel_demo.lab.networks import replace_hosts_file


def main() -> None:
    replace_hosts_file(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
    own_network = os.readlink("/proc/self/ns/net")
    while processes := processes_in(own_network):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes_in(network: str) -> list[int]:
    """Return the IDs of the other processes in this network namespace that can be killed."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has exited; zombies have no namespace
            if os.readlink(folder / "ns/net") == network and int(folder.name) != os.getpid():
                pids.append(int(folder.name))
    return pids


if __name__ == "__main__":
    main()
