"""Submit the script of exercise 47 to Slurm, or run it with replacements for Slurm's commands.

`Slurm` and `StandIn` have the same methods. A job trains in `folder`, in which train_47.py is
train.py.
"""

import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from grading import Wrong
from stand_in_47 import COMMANDS, expanded, signal_named, signal_steps

from accel_demo.errors import UserError
from accel_demo.lab.nodes.launches import Plan, slurm_variables
from accel_demo.processes.cleanup import has_ended, kill_tree
from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.processes.launch import run_to_end, start

COMMAND_LIMIT = 20  # seconds for one of Slurm's commands
ANSWER_LIMIT = 5  # seconds until a cluster has answered
JOB_MINUTES = 5  # time limit of a job that is really submitted, so that none is left behind
RESTART_DELAY = 3  # seconds; a node refuses a job again in the second in which it has ended
KILL_WAIT = 30  # seconds from SIGTERM to SIGKILL, as in Slurm
# Linux has all addresses that begin with 127. Other systems have the first one, at which jobs meet.
NODES = [["127.0.0.1", "127.0.0.2"], ["127.0.0.3", "127.0.0.4"]]
OF_STEPS = {"STEP_NUM_TASKS", "STEP_NODELIST", "STEP_ID", "LAUNCH_NODE_IPADDR"}  # variables
WAITING, RUNNING, REQUEUED, ENDED = "waiting", "running", "requeued", "ended"


@dataclass(frozen=True)
class Status:
    state: str
    exit_code: int = 0
    signal: int = 0  # the signal that has ended the script
    steps: bool = True  # whether a step was started


@dataclass(frozen=True)
class Script:
    """A batch script, and its options for `sbatch`."""

    file: Path
    text: str
    options: dict[str, str]

    @property
    def signal(self) -> tuple[str, int, bool] | None:
        """The signal before the time limit, how many seconds before, and if it is to the script."""
        match = re.fullmatch(r"(?:([BR]+):)?(\w+)(?:@(\d+))?", self.options.get("signal", ""))
        return match and (match[2], int(match[3] or 60), "B" in (match[1] or ""))


def has_cluster() -> bool:
    """Return True if there is a Slurm cluster that answers."""
    if not (shutil.which("sbatch") and shutil.which("sinfo")):
        return False
    return run_to_end(["sinfo"], ANSWER_LIMIT, environment=dict(os.environ)).returncode == 0


class Slurm:
    """The cluster on which this program's commands act."""

    name = "Slurm"

    def __init__(self, script: Script, folder: Path):
        self.script, self.folder, self.jobs = script, folder, []

    def submit(self, *arguments: str) -> str:
        name, seconds, _ = self.script.signal or ("", 0, False)
        output = self.folder / "output-%j.txt"
        flags = [f"--chdir={self.folder}", f"--output={output}", f"--error={output}"]
        flags += [f"--time={JOB_MINUTES + seconds // 60}", "--open-mode=append"]
        variables = {name: QUIET[name] for name in QUIET if name != "GLOO_SOCKET_IFNAME"}
        if all(node.startswith("127.") for node in self._run("sinfo", "-hNo", "%N").split()):
            variables = QUIET
        command = ["sbatch", "--parsable", *flags, str(self.script.file), *arguments]
        environment = environment_for(variables)
        result = run_to_end(command, COMMAND_LIMIT, environment=environment, cwd=self.folder)
        if result.returncode != 0:
            raise Wrong(f"sbatch rejects the script: {result.stderr.strip()}")
        job = result.stdout.strip().partition(";")[0]
        self.jobs.append(job)
        return job

    def status(self, job: str) -> Status:
        shown = self._show(job)
        state = shown["JobState"]
        if state == "PENDING":
            return Status(REQUEUED if shown["Restarts"] != "0" else WAITING)
        if state in ("RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED"):
            steps = self._run("squeue", "--steps", "--noheader", "--format=%i", f"--jobs={job}")
            names = [name.partition(".")[2] for name in steps.split()]
            return Status(RUNNING, steps=any(name.isdigit() for name in names))
        code, _, number = shown["ExitCode"].partition(":")
        return Status(ENDED, int(code), int(number))

    def nodes(self, job: str) -> list[str]:
        return expanded(self._show(job)["NodeList"])

    def warn(self, job: str) -> None:
        """Send what Slurm sends before the time limit."""
        assert self.script.signal
        name, _, to_script = self.script.signal
        self._run("scancel", f"--signal={name}", *(["--batch"] if to_script else []), job)

    def start_again(self, job: str) -> None:
        """Start a requeued job, which would wait for two minutes."""
        time.sleep(RESTART_DELAY)
        self._run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def output(self, job: str) -> str:
        file = self.folder / f"output-{job}.txt"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def close(self) -> None:
        for job in self.jobs:
            with suppress(UserError):
                if self.status(job).state != ENDED:
                    self._run("scancel", "--signal=KILL", "--full", job)
                    self._run("scancel", job)
        deadline = time.monotonic() + COMMAND_LIMIT
        while time.monotonic() < deadline and any(self._is_alive(job) for job in self.jobs):
            time.sleep(0.2)

    def _is_alive(self, job: str) -> bool:
        with suppress(UserError):
            return self.status(job).state != ENDED
        return False

    def _show(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(?<!\S)(\w+)=(\S*)", self._run("scontrol", "show", "job", job)))

    def _run(self, *command: str) -> str:
        result = run_to_end([*command], COMMAND_LIMIT, environment=dict(os.environ))
        if result.returncode != 0:
            raise UserError(f"{command[0]} failed: {result.stderr.strip() or 'it took too long'}")
        return result.stdout


class StandIn:
    """Jobs on this machine. Each has different nodes, which are addresses of this machine."""

    name = "replacements for Slurm's commands"

    def __init__(self, script: Script, folder: Path):
        self.script, self.folder = script, folder
        self.jobs: dict[str, Job] = {}
        self.first_job = random.randrange(10_000, 60_000)  # scripts compute ports from it
        stand_in = str(Path(__file__).with_name("stand_in_47.py"))
        commands = {name: [sys.executable, stand_in, name] for name in COMMANDS}
        if python := os.environ.get("PYTHON_EXEC"):  # torchrun starts its processes with it, too
            commands["python"] = [python]
        (folder / "programs").mkdir()
        for name, words in commands.items():
            file = folder / "programs" / name
            file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
            file.chmod(0o755)

    def submit(self, *arguments: str) -> str:
        name = str(self.first_job + len(self.jobs))
        nodes = NODES[len(self.jobs) % len(NODES)] if sys.platform == "linux" else NODES[0]
        job = Job(self.script, self.folder, name, nodes, arguments)
        self.jobs[job.name] = job
        job.start()
        return job.name

    def status(self, job: str) -> Status:
        return self.jobs[job].status()

    def nodes(self, job: str) -> list[str]:
        return self.jobs[job].nodes

    def warn(self, job: str) -> None:
        assert self.script.signal
        name, _, to_script = self.script.signal
        self.jobs[job].signal(signal_named(name), to_script)

    def start_again(self, job: str) -> None:
        self.jobs[job].start()

    def output(self, job: str) -> str:
        return self.jobs[job].output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        for job in self.jobs.values():
            job.kill()


class Job:
    """A job of `StandIn`. `status` must be called often, because it also ends the job's steps."""

    def __init__(self, script: Script, folder: Path, name: str, nodes: list[str], arguments):
        self.folder, self.own_folder, self.name = folder, folder / f"job-{name}", name
        self.options, self.nodes, self.arguments = script.options, nodes, arguments
        self.output, self.restarts = self.own_folder / "output.txt", -1
        self.has_steps, self.ends_at = False, float("inf")
        self.own_folder.mkdir()
        shutil.copy(script.file, self.own_folder / "slurm_script")

    def start(self) -> None:
        self.restarts, self.ends_at, self.has_steps = self.restarts + 1, float("inf"), False
        self.requeue_file.unlink(missing_ok=True)
        command = ["bash", str(self.own_folder / "slurm_script"), *self.arguments]
        with self.output.open("ab") as output:
            self.process = start(
                command, self.variables(), output, output, cwd=self.folder, new_session=True
            )

    def variables(self) -> dict[str, str]:
        per_node = int(self.options.get("ntasks-per-node", 0))
        tasks = int(self.options.get("ntasks", per_node * len(self.nodes)))
        plan = Plan(len(self.nodes), per_node or -(-tasks // len(self.nodes)), self.nodes, port=0)
        of_slurm = slurm_variables(plan, 0, 0)
        of_tasks = {"NTASKS", "NPROCS"} if not tasks else set()
        of_tasks |= {"NTASKS_PER_NODE"} if not per_node else set()
        for name in of_tasks | OF_STEPS:
            del of_slurm[f"SLURM_{name}"]
        first, *others = [node.rpartition(".") for node in self.nodes]
        nodes = f"{first[0]}.[{first[2]}-{others[-1][2]}]" if others else self.nodes[0]
        of_slurm |= {"SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes}
        of_slurm |= {"SLURM_JOB_ID": self.name, "SLURM_JOBID": self.name}
        of_slurm |= {"SLURM_JOB_NAME": "exercise", "SLURM_SUBMIT_DIR": str(self.folder)}
        of_slurm |= {"JOB_FOLDER": str(self.own_folder)}
        if self.restarts:
            of_slurm["SLURM_RESTART_COUNT"] = str(self.restarts)
        environment = environment_for(QUIET)
        path = f"{self.folder / 'programs'}{os.pathsep}{environment['PATH']}"
        ours = {name: value for name, value in environment.items() if not name.startswith("SLURM")}
        return ours | of_slurm | {"PATH": path}

    @property
    def requeue_file(self) -> Path:
        return self.own_folder / "requeue"

    def status(self) -> Status:
        steps, code = steps_of(self.own_folder), self.process.poll()
        self.has_steps = self.has_steps or bool(steps)
        if self.requeue_file.exists() or code is not None:
            if steps or code is None:
                self.end()
            elif self.requeue_file.exists():
                return Status(REQUEUED)
            else:
                return Status(ENDED, max(code, 0), max(-code, 0))
        return Status(RUNNING, steps=self.has_steps)

    def end(self) -> None:
        """End the steps and the script as Slurm does: with SIGTERM, and later with SIGKILL."""
        if self.ends_at == float("inf"):
            self.ends_at = time.monotonic() + KILL_WAIT
            self.signal(signal.SIGTERM, to_script=False)
            self.signal(signal.SIGTERM, to_script=True)
        elif time.monotonic() > self.ends_at:
            self.kill()

    def signal(self, number: int, to_script: bool) -> None:
        if not to_script:
            signal_steps(self.own_folder, number)
        elif self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        for process in steps_of(self.own_folder):
            kill_tree(process)
        kill_tree(self.process)
        self.process.wait()


def steps_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of `srun` in a job that are still running."""
    steps = []
    for file in folder.iterdir():
        with suppress(psutil.Error):
            if file.name.isdigit() and not has_ended(process := psutil.Process(int(file.name))):
                steps.append(process)
    return steps
