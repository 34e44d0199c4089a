"""Exercise 47 under a real Slurm cluster, and what its replacements for Slurm's commands do."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import slurm_47
import stand_in_47

from accel_demo.lab.course.exercises import Exercise
from accel_demo.processes.environment import environment_for
from accel_demo.processes.launch import free_port
from tests.conftest import BIN, REPOSITORY
from tests.exercises.wrong_answers import ANSWERS, wrong_answers
from tests.pages.pages import load_grader

LOCAL_SLURM = [sys.executable, str(REPOSITORY / "tutorials/cluster/slurm/local_slurm.py")]
NUMBER = "47"
SCRIPTS = [Exercise(NUMBER).answer, *sorted((ANSWERS / NUMBER).glob("*.sbatch"))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The variables with which commands use a cluster of two nodes on this machine."""
    if not all(shutil.which(name) for name in ("munged", "slurmctld", "slurmd")):
        pytest.skip("needs the packages slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    words = ["--folder", str(folder), "--port", str(three_free_ports())]
    run([*LOCAL_SLURM, "up", *words])
    # Every process imports torch, which takes long on a busy machine.
    yield {"SLURM_CONF": str(folder / "slurm.conf"), "ACCEL_DEMO_PATIENCE": "300"}
    run([*LOCAL_SLURM, "down", "--folder", str(folder)])


def three_free_ports() -> int:
    """Return a port that is free, like the two after it."""
    while True:
        port = free_port()
        with suppress(OSError, OverflowError):
            for number in (port + 1, port + 2):
                with socket.socket() as probe:
                    probe.bind(("", number))
            return port


def run(command, returncode: int = 0, **variables: str) -> str:
    environment = environment_for(variables)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert result.returncode == returncode, result.stdout + result.stderr
    return result.stdout


def queue(cluster) -> list[str]:
    states = run(["squeue", "--noheader", "--format=%T"], **cluster).split()
    return [state for state in states if state not in ("COMPLETED", "FAILED", "CANCELLED")]


@pytest.mark.system
@pytest.mark.timeout(900)
def test_slurm_runs_a_right_answer(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = shutil.copy(Exercise(NUMBER).answer, tmp_path)
    printed = run([BIN / "accel-demo", "check", NUMBER, "--file", answer], **cluster)
    assert printed.startswith("right: four processes on two nodes trained together")
    assert printed.endswith("without the warning (checked with Slurm)\n")
    assert queue(cluster) == [] and os.listdir(tmp_path) == [Exercise(NUMBER).answer.name]


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["fills_in_the_ranks_on_the_first_node", "has_no_srun"])
def test_slurm_runs_a_wrong_answer(cluster, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    answer, wrong = tmp_path / "answer.sbatch", wrong_answers(NUMBER)[name]
    answer.write_text(wrong.text)
    check = [BIN / "accel-demo", "check", NUMBER, "--file", answer]
    printed = run(check, returncode=1, **cluster)
    assert wrong.message in printed and "(Checked with Slurm.)" in printed
    assert queue(cluster) == [] and os.listdir(tmp_path) == ["answer.sbatch"]


@pytest.mark.system
def test_slurm_rejects_a_script_with_an_unknown_option(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = tmp_path / "answer.sbatch"
    answer.write_text("#!/bin/bash\n#SBATCH --nodez=2 --signal=USR1\nsrun python train.py\n")
    check = [BIN / "accel-demo", "check", NUMBER, "--file", answer]
    printed = run(check, returncode=1, **cluster)
    assert "sbatch rejects the script: sbatch: unrecognized option '--nodez=2'" in printed


@pytest.mark.system
def test_the_replacement_of_srun_sets_the_variables_of_slurm(cluster, tmp_path):
    """Only the names of the nodes and the numbers of the job and of processes differ."""
    script = tmp_path / "variables.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n"
        "env > script.txt; srun bash -c 'env > $SLURM_PROCID.txt'\n"
    )
    seen = []
    for kind in ("slurm", "stand-in"):
        (tmp_path / kind).mkdir()
        submit(kind, script, tmp_path / kind, cluster)
        seen.append(
            {
                name: variables_in(tmp_path / kind / f"{name}.txt")
                for name in ("script", "0", "1", "2", "3")
            }
        )
    for name, ours in seen[1].items():
        slurms, same = seen[0][name], set(ours) - DIFFERENT
        assert set(ours) <= set(slurms), (name, set(ours) - set(slurms))
        assert {key: ours[key] for key in same} == {key: slurms[key] for key in same}, name


DIFFERENT = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}
DIFFERENT |= {"SLURM_STEP_NODELIST", "SLURMD_NODENAME", "SLURM_LAUNCH_NODE_IPADDR"}
DIFFERENT |= {"SLURM_JOB_NAME", "SLURM_SUBMIT_DIR"}


def submit(kind, script, folder, cluster) -> None:
    if kind == "slurm":
        output = ["--output", str(folder / "output.txt")]
        command = ["sbatch", "--wait", "--chdir", str(folder), *output, str(script)]
        run(command, **cluster)
        return
    stand_in = stand_in_for(script, folder)
    end_of(stand_in, stand_in.submit())


def variables_in(file) -> dict[str, str]:
    lines = [line.partition("=") for line in file.read_text().splitlines()]
    return {name: value for name, _, value in lines if name.startswith("SLURM")}


def stand_in_for(script, folder) -> slurm_47.StandIn:
    text = script.read_text()
    return slurm_47.StandIn(
        slurm_47.Script(script, text, load_grader(NUMBER).directives(text)), folder
    )


def end_of(stand_in, job) -> slurm_47.Status:
    """Wait until a job is not running any more, and return its status."""
    deadline = time.monotonic() + 60
    while (status := stand_in.status(job)).state == slurm_47.RUNNING:
        assert time.monotonic() < deadline, stand_in.output(job)
        time.sleep(0.05)
    stand_in.close()
    return status


TASK = "trap 'echo $SLURM_PROCID saved; exit 0' {}; echo $SLURM_PROCID started; sleep 60 & wait"


@pytest.mark.parametrize(
    ("directive", "lines", "state"),
    [
        # Without B:, only the tasks get the signal.
        ("USR1", ["srun bash task.sh USR1"], slurm_47.ENDED),
        (
            "B:USR1",
            ["srun bash task.sh USR1 &", "trap 'kill -USR1 $!' USR1", "wait; wait"],
            slurm_47.ENDED,
        ),
        # A requeued job ends with SIGTERM to its tasks.
        (
            "B:USR1@60",
            ["trap 'scontrol requeue $SLURM_JOB_ID' USR1", "srun bash task.sh TERM &", "wait"],
            slurm_47.REQUEUED,
        ),
        # A signal that isn't trapped ends the script, and Slurm ends its tasks.
        ("B:USR1", ["srun bash task.sh TERM"], slurm_47.ENDED),
    ],
)
def test_the_warning_reaches_what_it_reaches_under_slurm(tmp_path, directive, lines, state):
    script = tmp_path / "job.sbatch"
    head = ["#!/bin/bash", "#SBATCH -N 2 --ntasks-per-node=2", f"#SBATCH --signal={directive}"]
    script.write_text("\n".join([*head, *lines]) + "\n")
    (tmp_path / "task.sh").write_text(TASK.format("$1") + "\n")
    stand_in = stand_in_for(script, tmp_path)
    job = stand_in.submit()
    deadline = time.monotonic() + 60
    while stand_in.output(job).count("started") < 4:
        assert stand_in.status(job).state == slurm_47.RUNNING and time.monotonic() < deadline
        time.sleep(0.05)
    stand_in.warn(job)
    status = end_of(stand_in, job)
    assert stand_in.output(job).count("saved") == 4
    assert status.state == state
    assert (status.signal == signal.SIGUSR1) == (lines == ["srun bash task.sh TERM"])


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("gpu1", ["gpu1"]),
        ("a,b[2,4-5],c", ["a", "b2", "b4", "b5", "c"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
    ],
)
def test_a_list_of_nodes_is_expanded(nodes, names):
    assert stand_in_47.expanded(nodes) == names


def test_the_options_of_a_script_end_at_its_first_command():
    text = "#!/bin/bash\n\n#SBATCH -N 2  # x\n#SBATCH --time 5 --requeue\nx=1\n#SBATCH --a=1\n"
    options = load_grader(NUMBER).directives(text)
    assert options == {"nodes": "2", "time": "5", "requeue": ""}


@pytest.mark.system
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("needs the package shellcheck")
    run(["shellcheck", str(script)])
