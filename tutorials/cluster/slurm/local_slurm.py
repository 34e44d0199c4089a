"""Start a Slurm cluster of two nodes on this machine, or stop it.

python local_slurm.py up      # prints the variable that sbatch, srun and squeue need
python local_slurm.py down    # cancels all jobs

All processes are those of a real cluster: munged authenticates, slurmctld schedules, and one slurmd
per node starts the jobs. The nodes are named like their addresses, so that scripts can connect to
them. There are two partitions: jobs in `urgent` preempt jobs in `main`. These get their signal, and
have a minute to save before Slurm requeues them.

It needs Linux, and the packages `slurm-wlm` and `munge` of Debian or Ubuntu. All its files are in
FOLDER.

Source: https://slurm.schedmd.com/slurm.conf.html
"""

import getpass
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser

NODES = ["127.0.0.1", "127.0.0.2"]
DAEMONS = ["munged", "slurmctld", *NODES]  # the names of their .pid and .log files
CONFIG = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log

# The nodes share a machine, so no control groups keep their jobs apart.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2

PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL OverSubscribe=EXCLUSIVE Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL OverSubscribe=EXCLUSIVE PriorityTier=2
"""
TIME_LIMIT = 60  # seconds, to start or to stop the cluster


def up(folder: Path, port: int) -> None:
    """Start the cluster, wait until all nodes are idle, and print its variable.

    If it runs already, only print the variable, for example for a second terminal.
    """
    for program in ("munged", "slurmctld", "slurmd"):
        if shutil.which(program) is None:
            raise UserError(
                f"{program} is not installed; in Debian or Ubuntu: apt-get install slurm-wlm munge"
            )
    if not folder.exists():
        try:
            start(folder, port)
        except UserError:
            down(folder)
            raise
    elif len(running(folder)) < len(DAEMONS):
        raise UserError(f"{folder} exists, but its cluster doesn't run. Delete it with `down`.")
    print(f"export SLURM_CONF={folder / 'slurm.conf'}")


def start(folder: Path, port: int) -> None:
    folder.mkdir(0o755, parents=True)
    for name in ("state", *NODES):
        (folder / name).mkdir()
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    host, user = socket.gethostname(), getpass.getuser()
    first = random.randrange(1, 9000)  # ports depend on it, and another cluster may run
    lines = [CONFIG.format(folder=folder, host=host, user=user, port=port, first=first)]
    for number, node in enumerate(NODES, start=1):
        lines.append(f"NodeName={node} NodeHostname={host} Port={port + number} CPUs=2\n")
    (folder / "slurm.conf").write_text("".join(lines), encoding="utf-8")

    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
    # --force: also if only this user may enter the folder
    run("munged", "--force", *(f"--{option}={folder / name}" for option, name in files.items()))
    run("slurmctld")
    for node in NODES:
        run("slurmd", "-N", node)
    wait(nodes_are_idle, "the nodes are not ready")


def nodes_are_idle() -> bool:
    """Return False also if the controller doesn't answer yet."""
    command = "sinfo --noheader --Node --format=%T".split()
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    return set(result.stdout.split()) == {"idle"}


def down(folder: Path) -> None:
    """Cancel all jobs, wait until they have ended, stop the cluster, and delete its files."""
    if not folder.exists():
        raise UserError(f"{folder} does not exist, so there is no cluster to stop")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    processes = running(folder)
    if len(processes) == len(DAEMONS):
        run("scancel", "--user", getpass.getuser())
        wait(lambda: not run("squeue", "--noheader"), "some jobs have not ended")
    for process in reversed(processes):
        process.terminate()
    wait(lambda: not running(folder), "the cluster still runs")
    shutil.rmtree(folder)


def running(folder: Path) -> list[psutil.Process]:
    """Return the daemons that run, without zombies: they have ended, but not for their parents."""
    found = []
    for name in DAEMONS:
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int((folder / f"{name}.pid").read_text(encoding="utf-8")))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    if result.returncode != 0:
        reason = (result.stderr or result.stdout).strip().replace("\n", "; ")
        raise UserError(f"{command[0]} failed: {reason}")
    return result.stdout


def wait(is_done, otherwise: str) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not is_done():
        if time.monotonic() > deadline:
            raise UserError(f"{otherwise} after {TIME_LIMIT} s")
        time.sleep(0.1)


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("command", choices=["up", "down"])
    default = Path(tempfile.gettempdir(), f"local_slurm_{getpass.getuser()}")
    parser.add_argument("--folder", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--port", type=int, default=16817, help="the first of three (%(default)s)")
    args = parser.parse_args()
    with one_line_errors():
        folder = args.folder.absolute()
        up(folder, args.port) if args.command == "up" else down(folder)
