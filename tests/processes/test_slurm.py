"""The batch scripts, under a real Slurm cluster on this machine."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accel_demo.lab.nodes import launches
from accel_demo.processes.environment import environment_for
from tests.conftest import BIN, REPOSITORY

FOLDER = REPOSITORY / "tutorials/cluster/slurm"
LOCAL_SLURM = [sys.executable, str(FOLDER / "local_slurm.py")]
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sbatch"))
SMALL = "--train-samples 512 --test-samples 200 --epochs 1".split()


def run(command, **environment) -> str:
    """Run a command that must succeed, and return what it prints."""
    result = subprocess.run(
        command, env=environment_for(environment), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def processes_of(config: str) -> list[psutil.Process]:
    """Return the processes of a cluster: its daemons, and all that its jobs started."""
    running = psutil.process_iter(["environ"])
    return [each for each in running if (each.info["environ"] or {}).get("SLURM_CONF") == config]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two nodes, and a written course in which its jobs run."""
    if not all(shutil.which(name) for name in ("munged", "slurmctld", "slurmd")):
        pytest.skip("needs the packages slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    printed = run([*LOCAL_SLURM, "up", "--folder", str(folder)])
    variables = {"SLURM_CONF": printed.strip().removeprefix("export SLURM_CONF=")}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    course = folder.parent / "course"
    run([BIN / "accel-demo", "init", str(course)])
    assert len(processes_of(variables["SLURM_CONF"])) == 4  # munged, slurmctld, and two slurmd
    yield Cluster(course, variables)
    run([*LOCAL_SLURM, "down", "--folder", str(folder)])
    assert not processes_of(variables["SLURM_CONF"]) and not folder.exists()


class Cluster:
    def __init__(self, course: Path, variables: dict[str, str]):
        self.course, self.variables = course, variables

    def run(self, *command: str) -> str:
        return run(command, **self.variables)

    def submit(self, script: str, *arguments: str) -> str:
        """Submit a batch script in the course's folder, and return the job's number."""
        flags = ["--parsable", f"--chdir={self.course}", f"--output={self.course}/%j.txt"]
        return self.run("sbatch", *flags, str(FOLDER / script), *arguments).strip()

    def printed(self, job: str) -> str:
        file = self.course / f"{job}.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def wait(self, job: str, text: str | None = None, seconds: float = 300) -> str:
        """Wait until the job has printed a text or has ended. Return what it printed."""
        deadline = time.monotonic() + seconds
        while text is None or text not in self.printed(job):
            state = self.run("squeue", "--noheader", "--format=%T", "--jobs", job).strip()
            if state in ("", "COMPLETED", "FAILED"):
                break
            assert time.monotonic() < deadline, f"job {job} is {state}: {self.printed(job)}"
            time.sleep(0.2)
        printed = self.printed(job)
        assert text is None or text in printed, printed
        return printed

    def state(self, job: str, name: str) -> str:
        """Return a value of `scontrol show job`."""
        shown = self.run("scontrol", "show", "job", job)
        [value] = re.findall(rf"\b{name}=(\S+)", shown)
        return value

    def weights(self, run: str) -> str:
        return hashlib.sha256((self.course / run / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["nodes", "accelerate", "tasks"])
def test_two_nodes_train_together_with_each_launcher(script, cluster):
    job = cluster.submit(f"{script}.sbatch", *SMALL, "--run-dir", f"runs/{script}")
    printed = cluster.wait(job)
    assert "4 processes on cpu" in printed and "done: " in printed, printed
    assert cluster.state(job, "NodeList") == "127.0.0.[1-2]"


@pytest.mark.system
@pytest.mark.timeout(900)
def test_one_node_trains_with_two_processes(cluster):
    printed = cluster.wait(cluster.submit("one_node.sbatch", *SMALL, "--run-dir", "runs/one"))
    assert "2 processes on cpu" in printed and "done: " in printed, printed


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_preempted_job_is_requeued_and_ends_with_the_bits_of_an_uninterrupted_one(cluster):
    """A requeued job would wait two minutes, so its start time is changed."""
    arguments = "--train-samples 2048 --test-samples 200 --epochs 3 --print-every 1".split()
    expected = cluster.submit("nodes.sbatch", *arguments, "--run-dir", "runs/whole")
    assert "4 processes on cpu" in cluster.wait(expected)
    job = cluster.submit("requeue.sbatch", *arguments, "--run-dir", "runs/preempted")
    cluster.wait(job, "step 2:")
    flags = "--parsable --partition=urgent --nodes=2 --output=/dev/null --wrap=true".split()
    urgent = cluster.run("sbatch", *flags).strip()
    cluster.wait(urgent)
    assert cluster.state(job, "Restarts") == "1" and cluster.state(job, "JobState") == "PENDING"
    time.sleep(3)  # a node may refuse a job again in the second in which it has ended
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    printed = cluster.wait(job)
    assert "stopped after step" in printed and "resumed from" in printed and "done: " in printed
    assert printed.count("4 processes on cpu (distributed_type MULTI_CPU, gloo)") == 2
    assert cluster.weights("runs/preempted") == cluster.weights("runs/whole")


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_job_near_its_time_limit_gets_the_signal_and_is_requeued(cluster):
    """`scancel --batch` sends what Slurm sends to the script before the limit."""
    arguments = "--train-samples 2048 --test-samples 200 --epochs 9 --print-every 1".split()
    job = cluster.submit("requeue.sbatch", *arguments, "--run-dir", "runs/limit")
    cluster.wait(job, "step 2:")
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    deadline = time.monotonic() + 300
    while cluster.state(job, "JobState") != "PENDING":
        assert time.monotonic() < deadline, cluster.printed(job)
        time.sleep(0.2)
    assert cluster.state(job, "Restarts") == "1"
    assert len(re.findall("stopped after step", cluster.printed(job))) == 1
    cluster.run("scancel", job)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_accel_demo_nodes_sets_the_variables_of_srun(cluster):
    """Only the numbers of the job and the names of the nodes differ."""
    srun = "srun --nodes=2 --ntasks-per-node=2 --label env".split()
    of_tasks = {rank: {} for rank in range(4)}
    for line in cluster.run(*srun).splitlines():
        rank, name, value = re.fullmatch(r"(\d): (\w+)=(.*)", line).groups()
        of_tasks[int(rank)][name] = value
    plan = launches.Plan(2, 2, ["127.0.0.1", "127.0.0.2"], port=2000, slurm=True)
    commands = [each for n in range(2) for each in launches.commands_for(["python", "x"], plan, n)]
    lists = {"SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"}
    for rank, (_, ours) in enumerate(commands):
        ours = {name: value for name, value in ours.items() if name.startswith("SLURM")}
        theirs = of_tasks[rank]
        assert all(theirs[name] == "127.0.0.[1-2]" for name in lists)
        same = {name for name in ours if ours[name] == theirs[name]}
        assert set(ours) - same - {"SLURM_JOB_ID", "SLURM_JOBID"} == lists


@pytest.mark.system
def test_up_prints_the_variable_again_if_the_cluster_runs(cluster):
    folder = Path(cluster.variables["SLURM_CONF"]).parent
    printed = run([*LOCAL_SLURM, "up", "--folder", str(folder)])
    assert printed == f"export SLURM_CONF={cluster.variables['SLURM_CONF']}\n"


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_folder_without_a_cluster_gets_one_line(command, tmp_path):
    folder = tmp_path / "cluster"
    if command == "up":
        folder.mkdir()
        if shutil.which("slurmd") is None:
            pytest.skip("needs the packages slurm-wlm and munge")
    arguments = [*LOCAL_SLURM, command, "--folder", str(folder)]
    result = subprocess.run(arguments, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert str(folder) in result.stderr


def test_without_slurm_there_is_one_line(tmp_path):
    result = subprocess.run(
        [*LOCAL_SLURM, "up", "--folder", str(tmp_path / "x")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "apt-get install slurm-wlm munge" in result.stderr
    assert result.stderr.count("\n") == 1 and not (tmp_path / "x").exists()


@pytest.mark.system
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("needs the package shellcheck")
    run(["shellcheck", str(FOLDER / script)])
