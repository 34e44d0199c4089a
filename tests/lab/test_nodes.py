"""Test `accel-demo nodes`, which runs a launch on several nodes of its own making."""

import ast
import errno
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import psutil
import pytest

from accel_demo.errors import UserError
from accel_demo.lab import cables
from accel_demo.lab.course.folder import Course
from accel_demo.lab.nodes import command, supervisor
from accel_demo.lab.nodes.node import Node, environment_for_nodes
from accel_demo.processes import launch
from tests.conftest import (
    GRACE,
    REPOSITORY,
    left_behind,
    processes_below_this_one,
    run_to_end,
    start_process,
)

missing = cables.why_not()
in_namespaces = pytest.mark.skipif(missing is not None, reason=str(missing))
STEP = "tutorials/44_step.py"  # a plain script that imports nothing from accel_demo
# Print how many processes are connected.
CONNECT = """
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, dist.get_rank())
if dist.get_rank() == 0:
    print("connected:", *ranks)
dist.destroy_process_group()
"""
ON_LOOPBACK = ["accel-demo", "nodes", "--network", "loopback"]
IN_NAMESPACES = ["accel-demo", "nodes", "--network", "namespaces"]
IMPORTS = (ast.Import, ast.ImportFrom)
# Print the line with a single write, so that the lines of two processes do not interleave.
SLEEP = ["--", sys.executable, "-c", "import os, time; os.write(1, b'started\\n'); time.sleep(300)"]


# --- options


RATE = "--rate must be like 100mbit, from 100kbit to 100gbit, got "
DELAY = "--delay must be like 5ms, from 100us to 1s, got "
WHEN = "after takes seconds without a unit, or a text that a node prints, got "
ELASTIC = "cannot change the number of nodes. Use --elastic -- torchrun SCRIPT."
BAD = {
    "--nodes 0": "--nodes must be from 1 to 8, got 0",
    "--nodes 9": "--nodes must be from 1 to 8, got 9",
    "--nodes two": "argument --nodes: invalid int value: 'two'",
    "--processes-per-node 0": "--processes-per-node must be from 1 to ",
    "--processes-per-node 5000": "--processes-per-node must be from 1 to ",
    "--rate 100": f"{RATE}100",
    "--rate 1kbit": f"{RATE}1kbit",
    "--rate=": RATE,
    "--rate -5mbit": "argument --rate: expected one argument",
    "--rate 10mbit": "--rate needs network namespaces. Leave --network loopback out.",
    "--delay 5": f"{DELAY}5",
    "--delay=": DELAY,
    "--delay -5ms": "argument --delay: expected one argument",
    "--delay 5ms": "--delay needs network namespaces. Leave --network loopback out.",
    "--cut-after 5": "--cut-after needs network namespaces. Leave --network loopback out.",
    "--cut-after -1": "--cut-after must be from 0 to 86400 seconds, got -1",
    "--cut-after nan": "--cut-after must be from 0 to 86400 seconds, got nan",
    "--kill-after=": f"--kill-{WHEN}",
    "--cut-after 10s": f"--cut-{WHEN}10s",
    "--kill-after 5ms": f"--kill-{WHEN}5ms",
    "--cut-after 2min": f"--cut-{WHEN}2min",
    "--cut-for 5": "--cut-for needs --cut-after",
    "--restart-after 5": "--restart-after needs --kill-after",
    "--nodes 1 --kill-after 5": "--kill-after needs at least two nodes",
    "--port 70000": "--port must be from 0 (any free port) to 65535, got 70000",
    "--": "there is no command after --",
    "train.py": "put -- before a command: accel-demo nodes -- train.py",
    "torchrun --tee 3 x.py": "put -- before a command: accel-demo nodes -- torchrun --tee 3 x.py",
    "--node 2": "unrecognized arguments: --node 2",
    "-- torchrun --standalone x.py": "--standalone connects only the processes of one node.",
    "--elastic -- accelerate launch x.py": f"accelerate launch {ELASTIC}",
    "--elastic -- python x.py": f"python {ELASTIC}",
    "--elastic -- sh x.sh": f"sh {ELASTIC}",
}


@pytest.mark.parametrize("options", BAD)
def test_invalid_options_get_one_line_before_anything_starts(options, monkeypatch, capfd):
    monkeypatch.setattr(command, "Node", None)
    with pytest.raises(UserError) as error:
        command.main([*ON_LOOPBACK[2:], *options.split()])
    assert str(error.value).startswith(BAD[options]) and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_an_invalid_option_exits_with_code_2(start):
    ended = start(["accel-demo", "nodes", "--nodes", "0"])
    expected = (2, "", "error: --nodes must be from 1 to 8, got 0\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == expected


def test_a_port_that_cannot_be_used_is_refused_with_its_reason(monkeypatch):
    class ForbiddenSocket(socket.socket):
        def bind(self, address):
            raise PermissionError(errno.EACCES, "Permission denied")

    advice = "Choose another --port, or leave it out."
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError) as error:
            command.main([*ON_LOOPBACK[2:], "--port", str(port), "--", "true"])
    assert str(error.value) == f"port {port} is in use. {advice}"
    monkeypatch.setattr(launch.socket, "socket", ForbiddenSocket)
    for function, text in (
        (lambda: command.meeting_port(80, cables.Loopback()), advice),
        (lambda: launch.free_port(80), "Set MASTER_PORT to a free port, or leave it unset."),
    ):
        with pytest.raises(UserError) as error:
            function()
        assert str(error.value) == f"port 80 cannot be used (Permission denied). {text}"


def test_a_text_that_begins_with_a_number_is_not_a_time():
    options = command.read(["--kill-after", "5 steps", "--cut-after", " 2 ", "--", "true"])
    assert (options.kill_after, options.cut_after) == ("5 steps", 2.0)


def test_without_a_command_the_train_file_of_a_course_starts_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, _, config, train, *_, run = command.read([]).command
    for file in (config, train):
        assert Path(file).is_file() and Path(file).is_absolute()
    assert run == "runs/nodes-1"
    Course(tmp_path).update()
    words = command.read([]).command
    assert "train.py" in words and "accelerate_configs/multi_node_cpu.yaml" in words
    assert command.read(["--elastic"]).command[:2] == ["torchrun", "train.py"]


# --- loopback


def test_a_plain_torchrun_script_runs_on_two_nodes_of_one_loopback(start):
    ended = start([*ON_LOOPBACK, "--", "torchrun", STEP])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    commands = [line for line in ended.stdout.splitlines() if re.match(r"node \d \(127", line)]
    assert len(commands) == 2 and all("torchrun --nnodes 2 --node-rank" in it for it in commands)
    assert "node 0 | processes 4, gradient bytes 2097152, seconds per step " in ended.stdout
    imports = ast.walk(ast.parse((REPOSITORY / STEP).read_text()))
    assert "accel_demo" not in str([ast.dump(it) for it in imports if isinstance(it, IMPORTS)])


def test_every_kind_of_launch_connects_all_processes(start, tmp_path):
    """Without a command, train.py is launched with the config for several machines.

    `accelerate launch` does not use the user's default config. A torchrun inside a shell reads its
    flags from the environment.
    """
    Course(tmp_path).update()
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: NO\n")
    script = tmp_path / "train.py"
    script.write_text(CONNECT)
    for per_node, words, connected in (
        (2, [], "0 1 2 3"),
        (1, ["--", "accelerate", "launch", script], "0 1"),
        (1, ["--", "sh", "-c", f"torchrun {script}"], "0 1"),
    ):
        flags = ["--processes-per-node", per_node, *words]
        ended = start([*ON_LOOPBACK, *flags], cwd=tmp_path, HF_HOME=str(tmp_path))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert f"node 0 | connected: {connected}\n" in ended.stdout
        if not words:
            config = "--config_file accelerate_configs/multi_node_cpu.yaml train.py"
            assert "accelerate launch --num_machines 2 --machine_rank 1" in ended.stdout
            assert config in ended.stdout


def test_the_cache_of_the_hugging_face_libraries_stays_where_it_is(monkeypatch):
    monkeypatch.setenv("HF_HOME", "/cache")
    assert environment_for_nodes(cables.Loopback())["HF_HOME"] == "/cache"


def test_gpus_are_hidden_and_accelerate_uses_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    environment = environment_for_nodes(cables.Loopback())
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
    assert environment["ACCELERATE_USE_CPU"] == "true"


def test_lines_are_copied_whatever_their_ends_and_signals_have_their_defaults(start, tmp_path):
    """A file in the working directory does not shadow a module that `nodes` imports."""
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    script = "printf 'hello\\r\\nworld\\n'; printf '50%%\\r100%%\\n'; yes | head -1"
    ended = start([*ON_LOOPBACK, "--", "sh", "-c", script], cwd=tmp_path)
    # yes would complain about its broken pipe
    assert (ended.returncode, ended.stderr) == (0, f"{command.ON_THE_CPU}\n")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("node 1 |")]
    assert lines == [f"node 1 | {text}" for text in ("hello", "world", "100%", "y")]


class BrokenNetwork(cables.Loopback):
    def connect(self, node: int, pid: int) -> None:
        raise KeyboardInterrupt


def test_a_failure_while_a_node_starts_leaves_no_process_behind(monkeypatch):
    with nothing_is_left(), pytest.raises(KeyboardInterrupt):
        with Node(0, BrokenNetwork(), SimpleQueue(), set()):
            pass
    monkeypatch.setattr("accel_demo.lab.nodes.node.KEEPER", [sys.executable, "-c", "pass"])
    # There is no advice to use loopback, because it is used already.
    with nothing_is_left(), pytest.raises(UserError, match="^node 0 could not be started$"):
        with Node(0, cables.Loopback(), SimpleQueue(), set()):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no subreapers")
def test_processes_that_start_others_while_they_are_killed_leave_none_behind(start, tmp_path):
    code = "import os, time; end = time.monotonic() + 60\n"
    code += "if os.fork(): os.write(1, b'started\\n'); os.kill(os.getpid(), 9)\n"
    code += "while time.monotonic() < end:\n"
    code += "    if os.fork(): time.sleep(0.1); os._exit(0)\n"  # the child goes on
    sleep = ["--processes-per-node", 2, "--", sys.executable, "-c", code]
    with nothing_is_left():
        ended = start([*ON_LOOPBACK, *sleep])
    assert ended.returncode == 1 and "node 0 has failed (exit code -9)" in ended.stderr


def test_each_line_of_output_names_its_node_and_goes_to_the_same_stream(start):
    code = "import os, sys; n = os.environ['RANK']; print('out', n); sys.exit(f'err {n}')"
    one_each = ["--nodes", 3, "--processes-per-node", 1, "--", "python", "-c", code]
    ended = start([*ON_LOOPBACK, *one_each])
    assert ended.returncode == 1
    for node in range(3):
        assert f"node {node} | out {node}\n" in ended.stdout
        assert f"node {node} | err {node}\n" in ended.stderr
        assert f"node {node} has failed (exit code 1)\n" in ended.stderr


def test_a_missing_program_gets_one_line_per_node(capfd):
    assert command.main([*ON_LOOPBACK[2:], "--", "no-such-program"]) == 1
    printed = capfd.readouterr().err
    for node in (0, 1):
        line = f"node {node} | error: cannot start no-such-program (No such file or directory)\n"
        assert line in printed
    assert "Traceback" not in printed


def test_nodes_that_wait_for_a_failed_node_are_killed(start, monkeypatch):
    code = "import os, sys, time; n = int(os.environ['RANK']); sys.exit(3) if n else time.sleep(60)"
    monkeypatch.setattr(supervisor, "FAILURE_TIMEOUT", 1)
    with nothing_is_left():
        started = time.monotonic()
        options = ["--network", "loopback", "--processes-per-node", "1"]
        assert command.main([*options, "--", sys.executable, "-c", code]) == 1
    assert time.monotonic() - started < 20


def test_a_killed_node_starts_again(start, tmp_path):
    code = "import os, pathlib, sys, time; n = os.environ['RANK']; "
    code += f"seen = pathlib.Path({str(tmp_path)!r}, n); "
    code += "again = seen.exists(); seen.touch(); "
    code += "print('again' if again else 'first', n, flush=True); "
    code += "time.sleep(0 if again else 5)"
    events = ["--kill-after", "first 1", "--restart-after", 0.5]
    one_each = ["--processes-per-node", 1]
    ended = start([*ON_LOOPBACK, *one_each, *events, "--", "python", "-c", code])
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("node 0")]
    assert lines[1:] == [
        "node 1 | first 1",
        "--- node 1 is killed",
        "--- node 1 is started again",
        "node 1 | again 1",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    "options",
    [ON_LOOPBACK, pytest.param(IN_NAMESPACES, marks=[pytest.mark.system, in_namespaces])],
    ids=["loopback", "namespaces"],
)
def test_a_signal_leaves_no_process_namespace_or_interface_behind(number, options, tmp_path):
    """A namespace is gone as soon as no process runs in it, and its interfaces with it."""
    seconds = GRACE if number == signal.SIGKILL else 0.5  # a killed command waits for nothing
    with running([*options, *SLEEP], tmp_path, seconds) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        own = {namespace_of(child.pid) for child in children} - {namespace_of(os.getpid())}
        assert len(own) == (3 if options == IN_NAMESPACES else 0)  # one per node, and the switch's
        process.send_signal(number)
        assert process.wait(30) == (-number if number == signal.SIGKILL else 130)
    assert not own.intersection(map(namespace_of, psutil.pids()))
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@contextmanager
def running(words: list, folder: Path, seconds: float = 0.5):
    """Start a command, and yield it once `SLEEP` has started on both nodes."""
    with (
        nothing_is_left(seconds),
        (folder / "stdout").open("w") as out,
        (folder / "stderr").open("w") as err,
    ):
        process = start_process(words, out, err, real=True)
        wait_until(lambda: (folder / "stdout").read_text().count("| started") == 4)
        yield process


@contextmanager
def nothing_is_left(seconds: float = 0.5):
    """Assert that the processes that are started inside the `with` statement are gone after it.

    They have `seconds` to exit. This machine's own network has the same interfaces as before.
    """
    before, interfaces = processes_below_this_one(), socket.if_nameindex()
    yield
    ended_at = time.monotonic()
    assert not left_behind(before) and time.monotonic() < ended_at + seconds
    assert socket.if_nameindex() == interfaces


def namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""  # not Linux, or the process has exited


def wait_until(is_true, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "this took too long"
        time.sleep(0.05)


# --- namespaces


@pytest.mark.system
@in_namespaces
def test_each_node_has_its_own_address_host_name_and_interface(start):
    code = "import os, socket; name = socket.gethostname(); "
    code += "words = [os.environ['RANK'], name, socket.gethostbyname(name)]; "
    code += "words += sorted(name for _, name in socket.if_nameindex()); "
    code += "os.write(1, (' '.join(words) + '\\n').encode())"
    with nothing_is_left():
        ended = start([*IN_NAMESPACES, "--nodes", 3, "--", "python", "-c", code])
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line for line in ended.stdout.splitlines() if " | " in line)
    assert lines == [
        f"node {rank // 2} | {rank} node-{rank // 2} 10.77.0.{rank // 2 + 1} eth0 lo"
        for rank in range(6)
    ]


@pytest.mark.system
@in_namespaces
def test_two_simulations_at_once_do_not_see_each_other(start, tmp_path):
    with running([*IN_NAMESPACES, *SLEEP], tmp_path) as other:
        ended = start([*IN_NAMESPACES, "--", "torchrun", STEP])
        other.send_signal(signal.SIGINT)
        assert other.wait(30) == 130
    assert "processes 4" in ended.stdout and ended.returncode == 0


@pytest.mark.system
@in_namespaces
def test_a_cut_cable_separates_the_nodes_until_it_is_plugged_in_again(start):
    code = (
        "import socket, os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    server = socket.create_server(('10.77.0.1', 5000))\n"
        "    server.settimeout(0.5)\n"
        "    end = time.monotonic() + 8\n"
        "    while time.monotonic() < end:\n"
        "        try: server.accept(); print('met', flush=True)\n"
        "        except OSError: print('alone', flush=True)\n"
        "else:\n"
        "    end = time.monotonic() + 7\n"
        "    while time.monotonic() < end:\n"
        "        try: socket.create_connection(('10.77.0.1', 5000), 0.3).close()\n"
        "        except OSError: pass\n"
        "        time.sleep(0.2)\n"
    )
    events = ["--processes-per-node", 1, "--cut-after", 2, "--cut-for", 3]
    ended = start([*IN_NAMESPACES, *events, "--", "python", "-c", code])
    assert ended.returncode == 0, ended.stderr
    [before, rest] = ended.stdout.split("--- the cable of node 1 is pulled out\n")
    [during, after] = rest.split("--- the cable of node 1 is plugged in again\n")
    assert "met" in before and "met" in after
    assert during.count("alone") >= 2 and during.count("met") <= 1


@pytest.mark.system
@in_namespaces
def test_the_time_of_a_step_is_the_bytes_over_the_rate(start):
    options = ["--processes-per-node", 1, "--rate", "50mbit"]
    ended = start([*IN_NAMESPACES, *options, "--", "torchrun", STEP])
    match = re.search(r"processes 2, gradient bytes (\d+), seconds per step (\S+)", ended.stdout)
    assert match, ended.stdout + ended.stderr
    at_the_rate = 8 * int(match[1]) / 50e6  # seconds
    # Other work on the machine only makes a step longer. At half the rate it takes twice as long.
    assert 0.9 * at_the_rate < float(match[2]) < 1.6 * at_the_rate


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@in_namespaces
def test_two_nodes_of_two_processes_train_to_the_bits_of_four_processes(start, tmp_path):
    """The two nodes run the default command, which uses `accelerate launch`."""
    ours = start(IN_NAMESPACES, timeout=280, cwd=tmp_path)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    one_machine = "torchrun --standalone --nproc-per-node 4 accel_demo/train.py --run-dir".split()
    ended = start([*one_machine, tmp_path / "one"], timeout=280)
    assert ended.returncode == 0, ended.stderr
    for text in (ours.stdout, ended.stdout):
        assert "4 processes on cpu (distributed_type MULTI_CPU, gloo)" in text
    first, second = (tmp_path / name / "model.safetensors" for name in ("runs/nodes-1", "one"))
    assert first.read_bytes() == second.read_bytes()


def train_on_nodes(start, options: list, folder: Path, code: int = 0) -> str:
    """Train the default model for six epochs on two nodes. Return what was printed."""
    train = "torchrun accel_demo/train.py --epochs 6 --checkpoint-every 5 --print-every 1"
    words = [*IN_NAMESPACES, *options, "--", *train.split(), "--collective-timeout", "10"]
    with nothing_is_left():
        ended = start([*words, "--resume", "auto", "--run-dir", folder], timeout=300)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == code, printed
    return printed


def random_step(seed: int) -> int:
    """Return a step after the first checkpoint, well before the last of the 138 steps."""
    return random.Random(seed).randint(6, 120)


def resumed_after(printed: str, step: int) -> None:
    """Check that a run went on from the last checkpoint before the step, or one step later."""
    [resumed] = set(re.findall(r"resumed from \S+, after step (\d+)", printed))
    # A few steps may follow before the node is lost, and a checkpoint may be interrupted.
    assert step - 6 <= int(resumed) <= step + 10


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the bytes of the trained model, and the duration of the launch."""
    folder, started = tmp_path_factory.mktemp("undisturbed") / "run", time.monotonic()
    printed = train_on_nodes(run_to_end, [], folder)
    assert "4 processes on cpu (distributed_type MULTI_CPU, gloo)" in printed
    assert "epoch 6/6, step 137:" in printed and "step 139:" not in printed
    model = (folder / "model.safetensors").read_bytes()
    return SimpleNamespace(model=model, seconds=time.monotonic() - started)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
@in_namespaces
def test_a_run_whose_cable_was_cut_resumes_to_the_same_bits(seed, undisturbed, start, tmp_path):
    step = random_step(seed)
    started = time.monotonic()
    printed = train_on_nodes(start, ["--cut-after", f"step {step}:"], tmp_path / "run", code=1)
    seconds = time.monotonic() - started
    assert "--- the cable of node 1 is pulled out" in printed
    [of_node_0] = re.findall(r"^node 0 \| error: (.*)", printed, re.MULTILINE)
    [of_node_1] = re.findall(r"^node 1 \| error: (.*)", printed, re.MULTILINE)
    assert of_node_0.startswith("ranks 2, 3 on node-1 have ")
    assert of_node_1.startswith("the launcher on node-0 has died, or cannot be reached")
    assert "killed node" not in printed  # both nodes have noticed it
    assert seconds < undisturbed.seconds + 10 + 15  # 10 s until the collective times out
    resumed_after(train_on_nodes(start, [], tmp_path / "run"), step)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == undisturbed.model


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@in_namespaces
def test_a_run_whose_agent_was_killed_goes_on_to_the_same_bits(seed, undisturbed, start, tmp_path):
    step = random_step(100 + seed)
    events = ["--elastic", "--kill-after", f"step {step}:", "--restart-after", 2]
    printed = train_on_nodes(start, events, tmp_path / "run")
    assert "--- node 1 is killed" in printed and "--- node 1 is started again" in printed
    resumed_after(printed, step)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == undisturbed.model


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@in_namespaces
def test_an_elastic_run_goes_on_without_the_node_whose_cable_was_cut(start, tmp_path):
    printed = train_on_nodes(start, ["--elastic", "--cut-after", "step 50:"], tmp_path / "run")
    assert "--- the cable of node 1 is pulled out" in printed
    resumed_after(printed, 50)
    assert "saved with 4 processes, resuming with 2" in printed


# On Debian, the name of a machine stands for 127.0.1.1 in its own /etc/hosts. Other names are
# unknown here. (Each node has an /etc/hosts of its own, so this changes nothing outside the nodes.)
DEBIAN = """
printf "127.0.0.1 localhost\\n127.0.1.1 $(hostname)\\n" > /etc/hosts
[ $NODE_RANK = 0 ] && is_host=,is_host=1
exec torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id test \\
    --rdzv-endpoint 10.77.0.1:29500 {flags} x.py
"""


def launch_on_debian(start, folder: Path, flags: str) -> SimpleNamespace:
    """Launch `CONNECT` on two nodes. `flags` are those of torchrun."""
    (folder / "x.py").write_text(CONNECT)
    (folder / "launch.sh").write_text(DEBIAN.format(flags=flags))
    one_each = ["--processes-per-node", 1]
    return start([*IN_NAMESPACES, *one_each, "--", "bash", "launch.sh"], cwd=folder)


@pytest.mark.system
@in_namespaces
def test_with_debians_hosts_files_an_elastic_launch_needs_addresses_and_a_host(start, tmp_path):
    settings = "--rdzv-conf last_call_timeout=20$is_host"
    own_address = "--local-addr 10.77.0.$((NODE_RANK + 1))"
    ended = launch_on_debian(start, tmp_path, f"{own_address} {settings}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " | connected: 0 1\n" in ended.stdout
    ended = launch_on_debian(start, tmp_path, "--rdzv-conf timeout=5,read_timeout=3")
    assert ended.returncode == 1 and "connected:" not in ended.stdout, ended.stdout


# --- what a machine lacks


def path_with(folder: Path, tool: str, script: str) -> str:
    """Return the value of PATH with which `tool` is a shell script."""
    (folder / tool).write_text(f"#!/bin/sh\n{script}\n")
    (folder / tool).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.skipif(sys.platform != "linux", reason="the message is about Linux")
def test_without_root_only_loopback_is_used(monkeypatch, capfd):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    check_that_only_loopback_is_used("network namespaces need root (sudo)", capfd)


def check_that_only_loopback_is_used(reason: str, capfd) -> None:
    """Check that a launch uses loopback, and that the flags that need namespaces are refused."""
    options = ["--processes-per-node", "1", "--", "echo", "hello"]
    with nothing_is_left():
        assert command.main(options) == 0
    printed = capfd.readouterr()
    assert printed.err == f"using loopback: {reason}\n{command.ON_THE_CPU}\n"
    for node in (0, 1):
        assert f"node {node} | hello\n" in printed.out
    for flag in ("--rate=10mbit", "--delay=5ms", "--cut-after=5", "--network=namespaces"):
        name = flag.replace("=namespaces", " namespaces").split("=")[0]
        with pytest.raises(UserError) as error:
            command.main([flag, *options])
        assert str(error.value) == f"{name} does not work here: {reason}"
    assert capfd.readouterr() == ("", "")


@pytest.mark.system
@in_namespaces
@pytest.mark.parametrize(
    ("tool", "script", "reason"),
    [
        (
            "unshare",
            "echo 'unshare: not permitted' >&2; exit 1",
            "this machine does not allow network namespaces (unshare: not permitted)",
        ),
        (  # unshare has made the network namespace when it fails
            "unshare",
            f"exec {shutil.which('unshare')} --net sh -c 'echo mount /proc failed >&2; exit 1'",
            "this machine does not allow network namespaces (mount /proc failed)",
        ),
        (
            "ip",
            "echo 'Error: Unknown device type.' >&2; exit 2",
            "`ip link add bridge type bridge` failed (Error: Unknown device type.). This machine "
            "cannot connect network namespaces.",
        ),
    ],
)
def test_a_machine_without_namespaces_or_bridges_uses_loopback(
    tool, script, reason, monkeypatch, tmp_path, capfd
):
    monkeypatch.setenv("PATH", path_with(tmp_path, tool, script))
    check_that_only_loopback_is_used(reason, capfd)


@pytest.mark.system
@in_namespaces
def test_a_missing_tool_is_named_with_its_package(monkeypatch, tmp_path):
    for tool in cables.TOOLS:
        (tmp_path / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        (tmp_path / tool).rename(tmp_path / "hidden")
        with pytest.raises(UserError) as error:
            command.main(["--rate", "10mbit", *SLEEP])
        (tmp_path / "hidden").rename(tmp_path / tool)
        advice = f"(on Debian: apt-get install {package})"
        problem = f"--rate does not work here: the program {tool} is missing {advice}"
        assert str(error.value) == problem


@pytest.mark.system
@in_namespaces
@pytest.mark.parametrize(
    ("flag", "value", "purpose", "module"),
    [("--rate", "10mbit", "limit the rate", "tbf"), ("--delay", "5ms", "delay packets", "netem")],
)
def test_a_kernel_without_a_module_gets_one_line_and_nothing_is_left(
    flag, value, purpose, module, monkeypatch, tmp_path, capfd
):
    reason = "Error: Specified qdisc kind is unknown."
    monkeypatch.setenv("PATH", path_with(tmp_path, "tc", f"echo '{reason}' >&2; exit 2"))
    with nothing_is_left(), pytest.raises(UserError) as error:
        command.main([flag, value, *SLEEP])
    assert capfd.readouterr() == ("", "")
    assert str(error.value) == (
        f"{flag}: this kernel cannot {purpose}, because `tc … {module}` failed ({reason}). Leave "
        f"{flag} out, or use a kernel with the module sch_{module}."
    )
