"""Grade exercise 47: submit the batch script, send it Slurm's warning, and compare the weights.

If there is no cluster, slurm_47.py runs the script on this machine. The first job trains to the
end. The second one gets the warning in the middle, and has to end with the same weights.
"""

import ipaddress
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grading
from grading import NotFinished, Wrong, limit
from slurm_47 import ENDED, REQUEUED, WAITING, Script, Slurm, StandIn, Status, has_cluster
from train_47 import UNKNOWN

from accel_demo.lab.course.originals import CONFIGS
from accel_demo.processes.launch import run_to_end

PROCESSES, NODES = 4, 2
TRAINING = "--train-samples 480 --test-samples 100 --epochs 1 --batch-size 4 --log-every 1"
WHOLE, STOPPED = "runs/whole", "runs/stopped"
WARN_AFTER = 2  # steps
POLL_INTERVAL = 0.2  # seconds
STEP_LIMIT = 15  # seconds until the script's first `srun`
VARIABLES = {"rank": "RANK", "address": "MASTER_ADDR", "port": "MASTER_PORT"}
TASKS = "One task per process"
LAUNCHERS = "What runs where"
OPTIONS = {"N": "nodes", "n": "ntasks"}  # short names
RIGHT = (
    "four processes on two nodes trained together. After the warning, they saved, the job was "
    "requeued, continued from step {}, and ended with the same weights as without the warning "
    "(checked with {})"
)


def judge(answer: Path) -> str:
    script = read_script(answer)
    is_real = has_cluster()
    # The nodes of a cluster may not share /tmp, but they share this folder.
    where = tempfile.mkdtemp(prefix="check-47-", dir=Path.cwd() if is_real else None)
    folder = Path(where).resolve()
    shutil.copy(Path(__file__).with_name("train_47.py"), folder / "train.py")
    shutil.copytree(CONFIGS, folder / "accelerate_configs")
    slurm = (Slurm if is_real else StandIn)(script, folder)
    try:
        return Check(script, folder, slurm).run()
    except Wrong as mistake:
        remark = f"(Checked with {slurm.name}.)"
        end = "" if re.search(r"[?\n]", str(mistake)[-1:]) else "."
        raise type(mistake)(f"{mistake}{end} {remark}", mistake.read) from None
    finally:
        slurm.close()
        shutil.rmtree(folder, ignore_errors=True)


def read_script(answer: Path) -> Script:
    """Return the script, if `sbatch` would accept it."""
    text = answer.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("#!"):
        raise Wrong("the first line must begin with #!, such as #!/bin/bash")
    parsed = run_to_end(["bash", "-n", str(answer)], 20)
    if parsed.returncode != 0:
        raise Wrong(
            f"bash can't read the script: {parsed.stderr.replace(f'{answer}: ', '')}".strip()
        )
    options = directives(text)
    if not options:
        raise Wrong("there is no line that begins with #SBATCH above the first command")
    script = Script(answer, text, options)
    if script.signal is None:
        raise Wrong("no #SBATCH line asks for a signal before the time limit")
    return script


def directives(text: str) -> dict[str, str]:
    """Return {long name of the option: value} of all #SBATCH lines above the first command."""
    options = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            for word, following in zip(words, [*words[1:], ""], strict=True):
                if word.startswith("-"):
                    name, equals, value = word.lstrip("-").partition("=")
                    options[OPTIONS.get(name, name)] = value if equals else following
    return options


class Check:
    """Two jobs of a script. `folder` contains what they write."""

    def __init__(self, script: Script, folder: Path, slurm: Slurm | StandIn):
        self.script, self.folder, self.slurm = script, folder, slurm

    def run(self) -> str:
        first = self.submit(WHOLE)
        ports = [self.started(first)]
        self.ended(first, WHOLE, "the job")
        second = self.submit(STOPPED)
        ports.append(self.started(second))
        if ports[0] != UNKNOWN and ports[0] == ports[1]:
            raise Wrong(
                f"two jobs both meet at port {ports[0]}. If they run on the same node at the same "
                "time, one of them fails",
                LAUNCHERS,
            )
        self.warned(second)
        step = self.continued(second)
        weights = [
            (self.folder / run / "model.safetensors").read_bytes() for run in (WHOLE, STOPPED)
        ]
        if weights[0] != weights[1]:
            raise Wrong("the weights differ from those of a run without the warning")
        return RIGHT.format(step, self.slurm.name)

    def submit(self, run: str) -> str:
        return self.slurm.submit(*TRAINING.split(), "--run-dir", run)

    def started(self, job: str) -> str:
        """Check all processes as soon as they have started. Return the port at which they meet."""
        begin = None

        def look(status: Status) -> bool:
            nonlocal begin
            if status.state == WAITING:
                return False
            begin = begin or time.monotonic()
            reports = self.reports(job)
            self.check_processes(job, reports)
            if not status.steps and not reports and time.monotonic() - begin > STEP_LIMIT:
                raise Wrong(
                    f"{STEP_LIMIT} s after its start, the script has started nothing on the second "
                    "node: it runs on the first one only",
                    LAUNCHERS,
                )
            if len(reports) < PROCESSES and status.state in (ENDED, REQUEUED):
                started = f"only {len(reports)} of {PROCESSES} processes had started train.py"
                raise self.failure(job, status, f"the job has ended when {started}", LAUNCHERS)
            return len(reports) == PROCESSES

        self.wait(job, look, f"not all {PROCESSES} processes have started train.py")
        return self.reports(job)[0]["port"]

    def check_processes(self, job: str, reports: list[dict]) -> None:
        """Raise `Wrong` if the processes, of which some may not have started yet, can't connect."""
        for each in reports:
            if each["has_launcher"] and each["tasks"] > each["nodes"]:
                raise Wrong(
                    f"there are {each['tasks']} launchers on {each['nodes']} nodes, and each of "
                    "them starts processes",
                    LAUNCHERS,
                )
            for name, variable in VARIABLES.items():
                if not each[name]:
                    raise Wrong(f"a process has no {variable}, so it can't connect", TASKS)
            if each["world_size"] != str(PROCESSES):
                raise Wrong(
                    f"a process has WORLD_SIZE {each['world_size'] or 'unset'}, not {PROCESSES}",
                    TASKS,
                )
        ranks = Counter(each["rank"] for each in reports)
        if twice := [rank for rank, count in ranks.items() if count > 1]:
            raise Wrong(f"{ranks[twice[0]]} processes have RANK {twice[0]}", TASKS)
        addresses = sorted({each["address"] for each in reports})
        if len(addresses) > 1:
            raise Wrong(
                f"the processes would meet at different addresses: {', '.join(addresses)}", TASKS
            )
        if addresses and self.is_fixed(addresses[0], self.slurm.nodes(job)):
            raise Wrong(
                f"the processes would meet at {addresses[0]}, whichever nodes the "
                "job gets: what if there are several machines?",
                LAUNCHERS,
            )
        if len(reports) >= PROCESSES and len({each["node"] for each in reports}) != NODES:
            raise Wrong(f"the processes are not on {NODES} nodes", LAUNCHERS)

    def is_fixed(self, address: str, nodes: list[str]) -> bool:
        """Return True if the address doesn't depend on the job's nodes."""
        if address == UNKNOWN:
            return False
        lines = [line for line in self.script.text.splitlines() if not line.startswith("#")]
        named = rf"(?<![\w.-]){re.escape(address)}(?![\w.-])"
        if re.search(named, "\n".join(lines)):
            return True
        return is_loopback(address) and address not in nodes

    def ended(self, job: str, run: str, subject: str) -> None:
        """Wait until the job has ended, and check that its training is complete."""

        def look(status: Status) -> bool:
            if (
                status.state in (REQUEUED, WAITING)
                and (self.folder / run / "summary.json").exists()
            ):
                raise Wrong(f"{subject} is back in the queue although its training is complete")
            if status.state not in (ENDED, REQUEUED):
                return False
            if status.exit_code or status.signal or status.state == REQUEUED:
                raise self.failure(job, status, f"{subject} has failed")
            if not (self.folder / run / "model.safetensors").exists():
                raise self.failure(job, status, f"{subject} has ended without weights")
            return True

        self.wait(job, look, f"{subject} has not ended")
        environment = json.loads(
            (self.folder / run / "environment.json").read_text(encoding="utf-8")
        )
        if environment["processes"] != PROCESSES:
            raise Wrong(f"only {environment['processes']} of {PROCESSES} processes were connected")

    def warned(self, job: str) -> None:
        """Send the warning in the middle of the training, and check that the job is requeued."""
        run = self.folder / STOPPED

        def is_training(status: Status) -> bool:
            if status.state in (ENDED, REQUEUED):
                raise self.failure(job, status, "the second job has failed")
            file = run / "metrics.jsonl"
            return file.exists() and file.read_bytes().count(b"\n") >= WARN_AFTER

        self.wait(job, is_training, "the second job has not made a step")
        self.slurm.warn(job)

        def look(status: Status) -> bool:
            if (run / "summary.json").exists():
                raise Wrong(
                    "after the warning, the processes trained to the end, but the time limit would "
                    "have killed them before. Did they receive the signal at once?"
                )
            if status.state not in (ENDED, REQUEUED):
                return False
            is_saved = any(
                not file.name.endswith("-000000") for file in (run / "checkpoints").glob("e*")
            )
            if status.signal:
                raise Wrong("the warning ended the script, and the processes with it")
            if not is_saved:
                raise self.failure(job, status, "after the warning, no checkpoint was saved")
            if status.state == ENDED:
                raise Wrong(
                    "after the warning, the processes saved, but the job has ended and is not in "
                    "the queue. Did the script receive the signal?"
                )
            return True

        self.wait(job, look, "after the warning, the job has not ended")

    def continued(self, job: str) -> int:
        """Start the requeued job, and wait for its end. Return the step from which it continued."""
        start = self.folder / STOPPED / "start.json"
        start.unlink()
        self.slurm.start_again(job)

        def look(status: Status) -> bool:
            if status.state == ENDED and not start.exists():
                raise self.failure(job, status, "the requeued job has failed")
            return start.exists()

        self.wait(job, look, "the requeued job has not begun to train")
        step = json.loads(start.read_text(encoding="utf-8"))["step"]
        if step == 0:
            raise Wrong("the requeued job started again from the first step")
        self.ended(job, STOPPED, "the requeued job")
        return step

    def reports(self, job: str) -> list[dict]:
        """Return what the processes of the job's first start have reported."""
        return list(grading.read_reports(self.folder / "reports" / job).values())

    def wait(self, job: str, look: Callable[[Status], bool], problem: str) -> None:
        """Wait until `look` returns True. Raise `NotFinished` if this takes too long."""
        seconds = limit("ACCEL_DEMO_PATIENCE", grading.TIME_LIMIT)
        deadline = time.monotonic() + seconds
        while not look(status := self.slurm.status(job)):
            if time.monotonic() > deadline:
                place = ": it still waits for nodes" if status.state == WAITING else self.tail(job)
                raise NotFinished(f"after {seconds:g} s, {problem}{place}")
            time.sleep(POLL_INTERVAL)

    def failure(self, job: str, status: Status, text: str, read: str = "") -> Wrong:
        """Return the error that describes why a job has failed."""
        if "EADDRINUSE" in self.slurm.output(job):
            return NotFinished(f"{text}, because another program uses its port")
        code = f" (exit code {status.exit_code})" if status.exit_code else ""
        return Wrong(f"{text}{code}{self.tail(job)}", read)

    def tail(self, job: str) -> str:
        """Return the last lines that the job has printed, as the end of a sentence."""
        lines = self.slurm.output(job).strip().splitlines()[-3:]
        return ". The last lines of its output:\n" + "\n".join(lines) if lines else ""


def is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    options = grading.read(grading.parser_of(__doc__))
    sys.exit(grading.verdict(__file__, lambda: judge(options.answer)))
