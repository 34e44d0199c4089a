"""Test `accel-demo nodes`, which runs a launch on several nodes of its own making."""

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

import psutil
import pytest

from accel_demo.errors import UserError
from accel_demo.lab import networks
from accel_demo.lab.nodes import command, launches
from tests.conftest import (
    REPOSITORY,
    left_behind,
    processes_below_this_one,
    run_to_end,
    start_process,
)

missing = networks.why_not()
in_namespaces = pytest.mark.skipif(missing is not None, reason=str(missing))
STEP = "tutorials/44_step.py"  # a plain script that imports nothing from accel_demo
ON_LOOPBACK = ["accel-demo", "nodes", "--network", "loopback"]
# Print the line with a single write, so that the lines of two processes do not interleave.
SLEEP = ["--", sys.executable, "-c", "import os, time; os.write(1, b'started\\n'); time.sleep(300)"]


# --- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nodes 0", "--nodes must be from 1 to 8, got 0"),
        ("--nodes 9", "--nodes must be from 1 to 8, got 9"),
        ("--nodes two", "argument --nodes: invalid int value: 'two'"),
        ("--processes-per-node 0", "--processes-per-node must be from 1 to "),
        ("--processes-per-node 5000", "--processes-per-node must be from 1 to "),
        ("--rate 100", "--rate must be like 100mbit, from 100kbit to 100gbit, got 100"),
        ("--rate 1kbit", "--rate must be like 100mbit, from 100kbit to 100gbit, got 1kbit"),
        ("--rate -5mbit", "argument --rate: expected one argument"),
        ("--rate 10mbit --network loopback", "--rate needs network namespaces. Leave --network"),
        ("--cut-after 5 --network loopback", "--cut-after needs network namespaces. Leave"),
        ("--cut-after -1", "--cut-after must be from 0 to 86400 seconds, got -1"),
        ("--cut-after nan", "--cut-after must be from 0 to 86400 seconds, got nan"),
        ("--kill-after=", "--kill-after needs a number of seconds, or a text that a node prints"),
        ("--cut-for 5", "--cut-for needs --cut-after"),
        ("--restart-after 5", "--restart-after needs --kill-after"),
        ("--nodes 1 --kill-after 5", "--kill-after needs at least two nodes"),
        ("--port 70000", "--port must be from 0 (any free port) to 65535, got 70000"),
        ("--", "there is no command after --"),
        ("train.py", "unrecognized arguments: train.py"),
        ("-- torchrun --standalone x.py", "--standalone connects only the processes of one node."),
        ("--elastic -- accelerate launch x.py", "accelerate launch cannot change the number of"),
        ("--elastic -- python x.py", "python cannot change the number of nodes. Use --elastic --"),
        ("--elastic -- sh x.sh", "sh cannot change the number of nodes. Use --elastic -- torchrun"),
    ],
)
def test_invalid_options_get_one_line_before_anything_starts(options, message, start):
    ended = start(["accel-demo", "nodes", *options.split()])
    assert (ended.returncode, ended.stdout) == (2, "")
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("using loopback")]
    assert len(lines) == 1 and lines[0].startswith(f"error: {message}")


def test_a_port_in_use_is_refused(start):
    with port_in_use() as port:
        ended = start([*ON_LOOPBACK, "--port", port, *SLEEP])
    expected = f"error: port {port} is in use. Choose another --port, or leave it out.\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", expected)


@contextmanager
def port_in_use():
    """Yield a port on which a server listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_folder_without_the_train_file_needs_a_command(tmp_path, start):
    ended = start(["accel-demo", "nodes"], cwd=tmp_path)
    advice = "Go to the repository, or add a command."
    assert ended.returncode == 2
    assert ended.stderr == f"error: accel_demo/train.py is not in this folder. {advice}\n"


# --- commands

PLAN = launches.Plan(2, processes_per_node=3, addresses=["10.0.0.1", "10.0.0.2"], port=2000)


@pytest.mark.parametrize("launcher", ["torchrun", "python -m torch.distributed.run"])
def test_torchrun_gets_the_flags_of_its_node_before_the_readers_own(launcher):
    [(words, variables)] = launches.commands_for([*launcher.split(), "--tee", "3", "x.py"], PLAN, 1)
    assert " ".join(words) == (
        f"{launcher} --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 2000 "
        "--rdzv-conf timeout=60 --nproc-per-node 3 --tee 3 x.py"
    )
    assert variables["NODE_RANK"] == "1" and "RANK" not in variables


def test_accelerate_launch_starts_several_processes_even_without_a_config():
    for config, added in ((["--config_file", "x.yaml"], []), ([], ["--multi_gpu"])):
        [(words, _)] = launches.commands_for(["accelerate", "launch", *config, "x.py"], PLAN, 0)
        flags = "--num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 "
        flags += "--main_process_port 2000 --num_processes 6 --rdzv_conf timeout=60"
        assert words == ["accelerate", "launch", *added, *flags.split(), *config, "x.py"]


def test_a_python_script_is_started_once_per_process_with_its_ranks():
    commands = launches.commands_for(["python", "x.py", "--log", "{node}.txt"], PLAN, 1)
    assert [words for words, _ in commands] == [["python", "x.py", "--log", "1.txt"]] * 3
    assert [variables["RANK"] for _, variables in commands] == ["3", "4", "5"]
    assert [variables["LOCAL_RANK"] for _, variables in commands] == ["0", "1", "2"]
    assert {variables["WORLD_SIZE"] for _, variables in commands} == {"6"}


def test_an_elastic_launch_accepts_one_node_or_two():
    plan = launches.Plan(2, 1, ["10.0.0.1", "10.0.0.2"], 2000, elastic=True)
    for node in (0, 1):
        [(words, variables)] = launches.commands_for(["torchrun", "x.py"], plan, node)
        flags = " ".join(words)
        assert "--nnodes 1:2" in flags and "--rdzv-endpoint 10.0.0.1:2000 " in flags
        assert f"--local-addr 10.0.0.{node + 1} --rdzv-conf is_host={1 - node}," in flags
        assert words[-1] == "x.py" and variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


# --- loopback


def test_a_plain_torchrun_script_runs_on_two_nodes_of_one_loopback(start):
    ended = start([*ON_LOOPBACK, "--", "torchrun", STEP])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    commands = [line for line in ended.stdout.splitlines() if re.match(r"node \d \(127", line)]
    assert len(commands) == 2 and all("torchrun --nnodes 2 --node-rank" in it for it in commands)
    assert "node 0 | processes 4, gradient bytes 2097152, seconds per step " in ended.stdout
    assert (
        "accel_demo"
        not in (REPOSITORY / STEP).read_text().replace("imports nothing from", "")[400:]
    )


def test_each_line_of_output_names_its_node_and_goes_to_the_same_stream(start):
    code = "import os, sys; n = os.environ['RANK']; print('out', n); sys.exit(f'err {n}')"
    ended = start(
        [*ON_LOOPBACK, "--nodes", 3, "--processes-per-node", 1, "--", "python", "-c", code]
    )
    assert ended.returncode == 1
    for node in range(3):
        assert f"node {node} | out {node}\n" in ended.stdout
        assert f"node {node} | err {node}\n" in ended.stderr
        assert f"node {node} has failed (exit code 1)\n" in ended.stderr


def test_a_missing_program_gets_one_line_per_node(start):
    ended = start([*ON_LOOPBACK, "--", "no-such-program"])
    assert ended.returncode == 1
    for node in (0, 1):
        line = f"node {node} | error: cannot start no-such-program (No such file or directory)\n"
        assert line in ended.stderr
    assert "Traceback" not in ended.stderr


def test_nodes_that_wait_for_a_failed_node_are_killed(start, monkeypatch):
    code = "import os, sys, time; n = int(os.environ['RANK']); sys.exit(3) if n else time.sleep(60)"
    monkeypatch.setattr(command, "FAILURE_TIMEOUT", 1)
    with nothing_is_left():
        started = time.monotonic()
        options = ["--network", "loopback", "--processes-per-node", "1"]
        assert command.main([*options, "--", sys.executable, "-c", code]) == 1
    assert time.monotonic() - started < 20


class RecordedNode:
    """Stands in for a node, and records its orders."""

    def __init__(self, rank: int):
        self.rank, self.orders = rank, []

    def send_order(self, what: str) -> None:
        self.orders.append(what)


def supervise(
    exits: list, events: list, elastic: bool, printed: dict | None = None
) -> tuple[int, list]:
    """Return the exit code, and the orders of node 1, if the nodes exit as in `exits`."""
    nodes = [RecordedNode(0), RecordedNode(1)]
    queue = SimpleQueue()
    for report in exits:
        queue.put(report)
    supervisor = command.Supervisor(nodes, networks.Loopback(2), elastic)
    return supervisor.wait_for_all(queue, events, printed or {}), nodes[1].orders


def test_an_elastic_launch_goes_on_without_a_node_that_is_killed(capsys):
    kill = command.Event("kill", after=0)
    assert supervise([(0, 0)], [kill], elastic=True) == (0, ["kill"])
    assert capsys.readouterr().out == "--- node 1 is killed\n"
    assert supervise([(1, 1), (0, 0)], [], elastic=True) == (0, [])
    assert supervise([(1, 0), (0, 1)], [], elastic=True) == (1, [])


def test_an_event_waits_until_a_node_has_printed_its_text(capsys):
    events = [command.Event("kill", "step 5:"), command.Event("start again", "step 5:", 0.2)]
    exits = [(0, 0), (1, 0)]
    orders = ["kill", "start again"]
    printed = {"step 5:": time.monotonic() - 1}
    assert supervise(exits, events, elastic=True, printed=printed) == (0, orders)
    assert supervise(exits, events, elastic=True, printed={"step 5:": float("inf")}) == (0, [])
    assert capsys.readouterr().err == '--kill-after had no effect: no node printed "step 5:"\n'
    assert supervise(exits, [command.Event("cut", 99)], elastic=False) == (0, [])
    assert capsys.readouterr().err == "--cut-after had no effect: the launch ended earlier\n"


def test_a_node_that_has_exited_is_neither_killed_nor_started_again(capsys):
    nodes, queue = [RecordedNode(0), RecordedNode(1)], SimpleQueue()
    supervisor = command.Supervisor(nodes, networks.Loopback(2), elastic=False)
    supervisor.codes[1] = 0
    supervisor.apply_event("kill", will_restart=True)
    supervisor.apply_event("start again", will_restart=False)
    assert nodes[1].orders == [] and capsys.readouterr().out == ""
    queue.put((0, 0))
    assert supervisor.wait_for_all(queue, [], {}) == 0


def test_ctrl_c_waits_only_for_nodes_that_still_run():
    nodes, queue = [RecordedNode(0), RecordedNode(1)], SimpleQueue()
    supervisor = command.Supervisor(nodes, networks.Loopback(2), elastic=True)
    supervisor.codes[1] = 0
    queue.put((0, 0))
    started = time.monotonic()
    assert supervisor.stop(queue) == 130 and time.monotonic() - started < command.STOP_TIMEOUT / 2
    assert nodes[0].orders == ["stop"] and nodes[1].orders == []


def test_the_default_command_continues_an_interrupted_run_or_starts_a_new_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for elastic in (False, True):
        assert launches.default_command(elastic)[-1] == "runs/nodes-1"
    Path("runs/nodes-1/checkpoints").mkdir(parents=True)
    assert launches.default_command(False)[-1] == "runs/nodes-1"
    Path("runs/nodes-1/summary.json").touch()
    assert launches.default_command(False)[-1] == "runs/nodes-2"


def test_a_killed_node_starts_again(start, tmp_path):
    code = "import os, pathlib, sys, time; n = os.environ['RANK']; "
    code += f"seen = pathlib.Path({str(tmp_path)!r}, n); "
    code += (
        "again = seen.exists(); seen.touch(); print('again' if again else 'first', flush=True); "
    )
    code += "time.sleep(0 if again else 60)"
    events = ["--kill-after", "first", "--restart-after", 0.5]
    one_each = ["--processes-per-node", 1]
    ended = start([*ON_LOOPBACK, *one_each, *events, "--", "python", "-c", code])
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("node 0")]
    assert lines[1:] == [
        "node 1 | first",
        "--- node 1 is killed",
        "--- node 1 is started again",
        "node 1 | again",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_behind(number, tmp_path):
    code = exit_code_after_a_signal(number, ON_LOOPBACK, tmp_path)
    assert code == (-number if number == signal.SIGKILL else 130)


def exit_code_after_a_signal(number: int, options: list, folder: Path) -> int:
    """Start four sleeping processes, send a signal to `accel-demo nodes`, and wait.

    Assert that the processes are gone, and so are the network namespaces in which they ran.
    """
    with running([*options, *SLEEP], folder) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        own = {namespace_of(child.pid) for child in children} - {namespace_of(os.getpid())}
        assert len(own) == (3 if options == IN_NAMESPACES else 0)  # one per node, and the switch's
        process.send_signal(number)
        code = process.wait(30)
    assert not own.intersection(map(namespace_of, psutil.pids()))
    assert "Traceback" not in (folder / "stderr").read_text()
    return code


@contextmanager
def running(words: list, folder: Path):
    """Start a command, and yield it once `SLEEP` has started on both nodes."""
    with (
        nothing_is_left(),
        (folder / "stdout").open("w") as out,
        (folder / "stderr").open("w") as err,
    ):
        process = start_process(words, out, err, real=True)
        wait_until(lambda: (folder / "stdout").read_text().count("| started") == 4)
        yield process


@contextmanager
def nothing_is_left():
    """Assert that the processes that were started inside the `with` statement are gone after it.

    A network namespace is gone as soon as no process runs in it, and its interfaces with it. So it
    only remains to check that this machine's own network has the same interfaces as before.
    """
    before, interfaces = processes_below_this_one(), socket.if_nameindex()
    yield
    assert not left_behind(before)
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

IN_NAMESPACES = ["accel-demo", "nodes", "--network", "namespaces"]


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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_namespace_or_interface_behind(number, tmp_path):
    code = exit_code_after_a_signal(number, IN_NAMESPACES, tmp_path)
    assert code == (-number if number == signal.SIGKILL else 130)


@pytest.mark.system
@in_namespaces
def test_a_cut_cable_separates_the_nodes_until_it_is_plugged_in_again(start):
    code = (
        "import socket, os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    server = socket.create_server(('10.77.0.1', 5000))\n"
        "    server.settimeout(0.5)\n"
        "    accepted = [False] * 16\n"
        "    end = time.monotonic() + 8\n"
        "    begin = time.monotonic()\n"
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
    assert float(match[2]) == pytest.approx(8 * int(match[1]) / 50e6, rel=0.25)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@in_namespaces
def test_two_nodes_of_two_processes_train_to_the_bits_of_four_processes(start, tmp_path):
    flags = ["accel_demo/train.py", "--run-dir"]
    ours = start([*IN_NAMESPACES, "--", "torchrun", *flags, tmp_path / "nodes"], timeout=280)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    one_machine = ["torchrun", "--standalone", "--nproc-per-node", 4]
    ended = start([*one_machine, *flags, tmp_path / "one"], timeout=280)
    assert ended.returncode == 0, ended.stderr
    for text in (ours.stdout, ended.stdout):
        assert "4 processes on cpu (distributed_type MULTI_CPU, gloo)" in text
    first, second = (tmp_path / name / "model.safetensors" for name in ("nodes", "one"))
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
    """Return the bytes of the trained model."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    printed = train_on_nodes(run_to_end, [], folder)
    assert "4 processes on cpu (distributed_type MULTI_CPU, gloo)" in printed
    assert "epoch 6/6, step 137:" in printed and "step 139:" not in printed
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
@in_namespaces
def test_a_run_whose_cable_was_cut_resumes_to_the_same_bits(seed, undisturbed, start, tmp_path):
    step = random_step(seed)
    printed = train_on_nodes(start, ["--cut-after", f"step {step}:"], tmp_path / "run", code=1)
    assert "--- the cable of node 1 is pulled out" in printed
    for node in (0, 1):
        assert len(re.findall(rf"^node {node} \| error: ", printed, re.MULTILINE)) == 1
    resumed_after(train_on_nodes(start, [], tmp_path / "run"), step)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == undisturbed


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
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == undisturbed


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@in_namespaces
def test_an_elastic_run_goes_on_without_the_node_whose_cable_was_cut(start, tmp_path):
    printed = train_on_nodes(start, ["--elastic", "--cut-after", "step 50:"], tmp_path / "run")
    assert "--- the cable of node 1 is pulled out" in printed
    resumed_after(printed, 50)
    assert "saved with 4 processes, resuming with 2" in printed


# --- what a machine lacks


@pytest.mark.skipif(sys.platform != "linux", reason="the message is about Linux")
def test_without_root_only_loopback_is_used(monkeypatch, capfd):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    options = ["--processes-per-node", "1"]
    hello = ["--", sys.executable, "-c", "print('hello')"]
    assert command.main([*options, *hello]) == 0
    printed = capfd.readouterr()
    assert printed.err == "using loopback: network namespaces need root (sudo)\n"
    for node in (0, 1):
        assert f"node {node} | hello\n" in printed.out
    for flag in ("--rate=10mbit", "--cut-after=5", "--network=namespaces"):
        name = flag.replace("=namespaces", " namespaces").split("=")[0]
        with pytest.raises(UserError) as error:
            command.main([*options, flag, *hello])
        reason = "network namespaces need root (sudo)"
        assert str(error.value) == f"{name} does not work here: {reason}"
    assert capfd.readouterr() == ("", "")


@pytest.mark.system
@in_namespaces
@pytest.mark.parametrize("tool", ["ip", "tc", "unshare"])
def test_a_missing_tool_is_named_with_its_package(tool, start, tmp_path):
    for other in set(networks.TOOLS) - {tool}:
        (tmp_path / other).symlink_to(shutil.which(other))
    ended = start(["accel-demo", "nodes", "--rate", "10mbit", *SLEEP], PATH=str(tmp_path))
    package = "util-linux" if tool == "unshare" else "iproute2"
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: --rate does not work here: the program {tool} is missing (on Debian: apt-get "
        f"install {package})\n"
    )


@pytest.mark.system
@in_namespaces
def test_a_kernel_without_tbf_gets_one_line_and_nothing_is_left(start, tmp_path):
    (tmp_path / "tc").write_text(
        "#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n"
    )
    (tmp_path / "tc").chmod(0o755)
    with nothing_is_left():
        path = f"{tmp_path}:{os.environ['PATH']}"
        ended = start(["accel-demo", "nodes", "--rate", "10mbit", *SLEEP], PATH=path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: --rate: this kernel cannot limit the rate, because `tc … tbf` failed (Error: "
        "Specified qdisc kind is unknown.). Leave --rate out, or use a kernel with the module "
        "sch_tbf.\n"
    )


@pytest.mark.system
@in_namespaces
def test_a_machine_that_does_not_allow_namespaces_uses_loopback(start, tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    hello = ["--processes-per-node", 1, "--", "python", "-c", "print('hello')"]
    ended = start(["accel-demo", "nodes", *hello], PATH=path)
    assert ended.returncode == 0, ended.stderr
    reason = "this machine does not allow it (unshare: not permitted)"
    assert ended.stderr == f"using loopback: {reason}\n"
    ended = start(["accel-demo", "nodes", "--rate", "10mbit", *hello], PATH=path)
    assert (ended.returncode, ended.stderr) == (2, f"error: --rate does not work here: {reason}\n")


def test_rates_are_checked_in_all_units():
    for rate in ("100kbit", "1.5mbit", "100gbit"):
        networks.check_rate(rate)
    for rate in ("", "mbit", "10MB", "10mbps", "1e3mbit", "101gbit"):
        with pytest.raises(UserError, match="--rate must be like 100mbit"):
            networks.check_rate(rate)
