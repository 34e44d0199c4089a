"""Test that a program forked from the fork server behaves like one that is started normally."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from accel_demo.observer import agent
from accel_demo.observer.events import FOLDER, read_events
from accel_demo.processes.cleanup import kill_all
from tests.conftest import (
    can_fork,
    fork_server,
    left_behind,
    processes_below_this_one,
    run_all,
    run_ranks,
    run_to_end,
    start_process,
)
from tests.support.fork_client import ADDRESS


@pytest.fixture(autouse=True)
def there_is_a_fork_server():
    if not can_fork():
        pytest.skip("there is no fork server with --real or on Windows")


WITH_OBSERVER = agent.inject(dict(os.environ), FOLDER, "")["PYTHONPATH"]
SHOW = """
import os, sys, torch, numpy, random, signal, threading
print(sys.argv, __name__, globals().get("__file__"), sys.path[0], os.getcwd(), sys.stdin.read())
print(os.environ.get("PLANTED"), os.environ.get("RANK"), os.environ.get("HOME"))
print(torch.get_num_threads(), torch.get_default_dtype())
print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)])
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, threading.active_count())
"""
ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('one line')": 1,
    "sys.exit(['a list'])": 1,
    "sys.exit()": 0,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "os._exit(7)": 7,
    "threading.Thread(target=lambda: (time.sleep(0.2), print('a thread'))).start()": 0,
    "atexit.register(print, 'at exit')": 0,
}


def program_that_ends(end: str) -> str:
    """Return a program that prints a text, and then ends with one of ENDS.

    The text is an unfinished line, unless the end would lose it in a forked program with `-u`.
    """
    unfinished = "" if "_exit" in end or "SIGKILL" in end else ", end=''"
    modules = "import atexit, os, signal, sys, threading, time"
    return f"{modules}\nprint('printed'{unfinished})\n{end}"


def forked_and_real(command, **options):
    """Run a command twice: forked, and started normally. Return both results."""
    forked = run_to_end(command, **options)
    return forked, run_to_end(command, real=True, **options)


@pytest.fixture
def program(tmp_path):
    """`program(text)` saves the text as a Python program, and returns its path."""

    def program(text: str):
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return program


def test_a_forked_program_gets_its_arguments_environment_folder_and_a_clean_state(
    program, tmp_path
):
    program(SHOW)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(SHOW)
    for words in (["program.py", "a", "b c"], ["folder", "a"], ["-c", SHOW, "a"]):
        forked, real = forked_and_real(["python", *words], cwd=tmp_path, PLANTED="here")
        assert (forked.returncode, forked.stderr) == (0, "")
        assert forked.stdout == real.stdout
        assert "here" in forked.stdout


def test_a_module_and_an_installed_script_can_be_forked(program, tmp_path):
    program(SHOW)
    forked, real = forked_and_real(["python", "-m", "program", "a"], cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (0, real.stdout)
    forked, real = forked_and_real(["accel-demo", "no-such-verb"])
    assert (forked.returncode, forked.stderr) == (2, real.stderr)


@pytest.mark.parametrize(("end", "code"), ENDS.items())
def test_a_forked_program_ends_like_a_real_one(end, code):
    program = program_that_ends(end)
    forked, real = forked_and_real(["python", "-c", program])
    assert forked.returncode == real.returncode == code
    assert forked.stdout == real.stdout
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_forked_program_does_not_affect_the_next_one():
    change = "import os, torch; torch.manual_seed(1); torch.set_default_dtype(torch.float64)\n"
    change += "os.environ['PLANTED'] = 'left'; os.chdir('/'); torch.set_num_threads(2)"
    before = run_to_end(["python", "-c", SHOW])
    assert run_to_end(["python", "-c", change]).returncode == 0
    assert run_to_end(["python", "-c", SHOW]).stdout == before.stdout


def test_processes_draw_different_random_numbers_unless_they_are_seeded():
    draw = "import numpy, random, torch, uuid\n"
    draw += "print(random.random(), numpy.random.rand(), torch.rand(1).item(), uuid.uuid4())"
    first, second = (run_to_end(["python", "-c", draw]).stdout.split() for _ in range(2))
    assert all(left != right for left, right in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("command", "environment", "is_forked"),
    [
        (["python", "-c", "print(1)"], {}, True),
        (["python", "-c", "print(1)"], {"PLANTED": "1"}, True),
        (["python", "-c", "print(1)"], {"OMP_NUM_THREADS": "2"}, False),
        (["python", "-c", "print(1)"], {"OMP_NUM_THREADS": None}, False),
        (["python", "-c", "print(1)"], {"PYTHONHASHSEED": "1"}, False),
        (["python", "-c", "print(1)"], {"PYTHONUNBUFFERED": "1"}, True),
        (["python", "-c", "print(1)"], {"PYTHONPATH": WITH_OBSERVER}, True),
        (["python", "-c", "print(1)"], {"PYTHONPATH": f"{WITH_OBSERVER}:/planted"}, False),
        (["python", "-c", "print(1)"], {"PYTORCH_JIT": "0"}, False),
        (["python", "-c", "print(1)"], {"HF_HOME": "/planted"}, False),
        (["python", "-W", "error", "-c", "print(1)"], {}, False),
        (["echo", "1"], {}, False),
    ],
)
def test_a_command_is_forked_only_if_a_fork_can_behave_the_same(command, environment, is_forked):
    with tempfile.TemporaryFile("w+") as output:
        process = start_process(command, output, output, **environment)
        assert process.wait(60) == 0
        assert isinstance(process, subprocess.Popen) != is_forked
        output.seek(0)
        assert output.read() == "1\n"


OBSERVED = """
import atexit, sys, torch
atexit.register(lambda: print(sys.last_value, "inject" in str(sys.path)))
model = torch.nn.Linear(1, 1)
model(torch.ones(1)).backward()
torch.optim.SGD(model.parameters()).step()
raise ValueError("planted")
"""


def test_the_observer_of_an_audit_records_the_same_in_a_forked_process(program, tmp_path):
    path = program(OBSERVED)
    lines = []
    for real in (False, True):
        folder = tmp_path / f"events-{real}"
        folder.mkdir()
        variables = agent.inject({}, FOLDER, str(folder))
        result = run_to_end(["python", path], real=real, **variables)
        assert (result.returncode, result.stdout) == (1, "planted False\n"), result.stderr
        [events] = read_events(str(folder))
        lines.append([(each["kind"], each.get("line"), each.get("error")) for each in events])
    assert lines[0] == lines[1]
    assert {"process", "backward", "step", "end"} <= {kind for kind, _, _ in lines[0]}


def test_a_forked_process_receives_signals_and_can_ignore_a_signal(tmp_path):
    program = "import time, sys; print('ready', flush=True); time.sleep(60)"
    with open(tmp_path / "output", "w+") as output:
        for number, options in (
            (signal.SIGTERM, {}),
            (signal.SIGTERM, {"ignored_signal": signal.SIGUSR1}),
        ):
            output.truncate(0)
            process = start_process(
                ["python", "-c", program], output, output, new_session=True, **options
            )
            while not (tmp_path / "output").read_text().endswith("ready\n"):
                time.sleep(0.01)
            assert os.getsid(process.pid) == process.pid
            if options:
                process.send_signal(signal.SIGUSR1)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.2)
            process.send_signal(number)
            assert process.wait(10) == -number
            process.send_signal(number)  # has no effect, because the process has ended


def test_a_program_prints_its_stack_on_sigusr2(tmp_path):
    program = "import time\ndef wait(): time.sleep(60)\nprint('ready', flush=True)\nwait()"
    with open(tmp_path / "output", "w+") as output:
        process = start_process(["python", "-c", program], output, output)
        while "ready" not in (tmp_path / "output").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR2)
        while "in wait\n" not in (tmp_path / "output").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL


def test_the_server_and_its_programs_end_with_the_process_that_started_the_server(tmp_path):
    owner = """
        import os, sys, time
        from accel_demo.processes.launch import start
        from tests.support.fork_server import ForkServer
        server = ForkServer()
        with open("output", "w") as output:
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            environment = {**os.environ, **server.variables}
            program = start(command, environment, output, output, cwd=".")
        print(server.process.pid, program.pid, flush=True)
        print(server._folder, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(owner)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        folder = process.stdout.readline()
        process.kill()
    assert len(started) == 2
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    assert not Path(folder.strip()).exists()


def outputs(program: str, text: str, **options):
    """Run `program -c text`. Return the returncode, stdout and stderr."""
    result = subprocess.run([program, "-u", "-c", text], capture_output=True, text=True, **options)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(("end", "code"), ENDS.items())
def test_the_forked_python_ends_like_the_real_python(end, code):
    text = program_that_ends(end)
    forked, real = (outputs(python, text) for python in (fork_server().python, sys.executable))
    assert forked[:2] == real[:2] and forked[0] == code
    assert forked[2].splitlines()[-1:] == real[2].splitlines()[-1:]


def test_the_forked_python_writes_a_whole_line_at_a_time_with_u():
    text = "print('two', 'words'); print('next')"
    receiver, stdout = socket.socketpair(type=socket.SOCK_DGRAM)  # one datagram for each write
    with receiver, stdout:
        subprocess.run([fork_server().python, "-u", "-c", text], stdout=stdout, check=True)
        receiver.settimeout(10)
        assert [receiver.recv(99), receiver.recv(99)] == [b"two words\n", b"next\n"]


def test_the_forked_python_inherits_what_the_real_python_inherits(tmp_path):
    show = "import os, signal, sys; print(os.getcwd(), sys.stdin.read(), os.environ['PLANTED'])\n"
    show += "os.write({}, b'written'); print(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)"
    options = {"cwd": tmp_path, "input": "typed", "env": {**os.environ, "PLANTED": "here"}}
    shown = []
    for python in (fork_server().python, sys.executable):
        read, write = os.pipe()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            text = show.format(write)
            shown.append(outputs(python, text, pass_fds=[write], **options))
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert os.read(read, 20) == b"written"
        os.close(read), os.close(write)
    assert shown[0] == shown[1] == (0, f"{tmp_path} typed here\nTrue\n", "")


def test_the_forked_python_inherits_descriptors_that_the_server_also_uses():
    open_files = "import os, sys; [os.dup2(2, number) for number in range(3, 100)]\n"
    open_files += "os.execv(sys.argv[1], sys.argv[1:])"
    text = "import os; [os.write(number, b'.') for number in range(3, 100)]"
    command = [sys.executable, "-c", open_files, fork_server().python, "-c", text]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "." * 97)


def test_the_forked_python_becomes_the_real_python_if_a_fork_would_differ():
    parent = "import os; print(os.getppid())"
    forked = outputs(fork_server().python, parent)
    assert forked == (0, f"{fork_server().process.pid}\n", "")
    other_threads = {**os.environ, "OMP_NUM_THREADS": "2"}
    assert outputs(fork_server().python, parent, env=other_threads)[1] == f"{os.getpid()}\n"
    few_files = 'ulimit -n 200; exec "$0" "$@"'
    command = ["sh", "-c", few_files, fork_server().python, "-c", parent]
    assert subprocess.check_output(command, text=True) == f"{os.getpid()}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_forked_python_reaches_the_forked_process(number):
    # a single sleep is not interrupted by a signal that comes just before it begins
    text = "import os, time\nprint(os.getpid(), flush=True)\nwhile True: time.sleep(0.1)"
    command = [fork_server().python, "-u", "-c", text]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            forked = psutil.Process(int(process.stdout.readline()))
            assert forked.pid != process.pid
            process.send_signal(number)
            ended = process.wait(10)
        finally:
            process.kill()
    assert ended == -number
    assert psutil.wait_procs([forked], timeout=10)[1] == []


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_launcher_forks_its_workers_from_the_server(launcher, program):
    path = program("import os; print('rank', os.environ['RANK'], 'parent', os.getppid())")
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", path]
    if launcher == "accelerate":
        config = "accelerate_configs/cpu_two_processes.yaml"
        command = ["accelerate", "launch", "--config_file", config, path]
    result = run_to_end(command)
    lines = {f"rank {rank} parent {fork_server().process.pid}" for rank in (0, 1)}
    assert {*result.stdout.splitlines()} == lines, result.stdout + result.stderr


ORPHANS = {
    "a child": "child = subprocess.Popen(['sleep', '600'])",
    "a child in a new session, with a different environment": (
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True, env={})"
    ),
    "a forked child": textwrap.dedent("""
        child = types.SimpleNamespace(pid=os.fork())
        if child.pid == 0:
            time.sleep(600)
    """),
    "a daemon whose parent has ended": textwrap.dedent("""
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                os.close(1), os.close(2)
                time.sleep(600)
            os._exit(0)
        os.wait()
        child = types.SimpleNamespace(pid=int(os.read(read, 20)))
    """),
    "a child that multiprocessing has forked": textwrap.dedent("""
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
    """),
}
IMPORTS = "import multiprocessing, os, subprocess, time, types\n"
END = "\nprint(child.pid, flush=True)\nos._exit(0)"


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr("tests.conftest.GRACE", 1)


def check_that_orphans_are_found(run) -> None:
    before = processes_below_this_one()
    with pytest.raises(AssertionError, match="left .* behind") as error:
        run()
    message = str(error.value).split("\nassert ")[0]  # pytest repeats the list, and shortens it
    planted = [int(pid) for pid in re.findall(r"^\s*(\d+)$", message, re.MULTILINE)]
    reported = {int(pid) for pid in re.findall(r"pid=(\d+)", message)}
    assert planted and reported == set(planted)
    assert processes_below_this_one() == before


@pytest.mark.parametrize("real", [False, True])
def test_an_orphan_of_each_kind_is_found_and_killed(real, short_grace):
    commands = [["python", "-c", IMPORTS + orphan + END] for orphan in ORPHANS.values()]
    check_that_orphans_are_found(lambda: run_all(commands, real=real))


def test_an_orphan_of_a_rank_is_found_and_killed(program, short_grace):
    path = program(IMPORTS + ORPHANS["a daemon whose parent has ended"] + END)
    check_that_orphans_are_found(lambda: run_ranks([path], 2))


def test_a_command_that_takes_too_long_is_killed_with_every_process_it_started():
    before = processes_below_this_one()
    program = "import subprocess; subprocess.run(['sleep', '600'])"
    for real in (False, True):
        with pytest.raises(AssertionError, match="took more than 1 s"):
            run_to_end(["python", "-c", program], timeout=1, real=real)
    assert left_behind(before) == []


def test_a_rank_that_fails_ends_the_remaining_ranks(program):
    path = program(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('planted')\ntime.sleep(600)"
    )
    result = run_ranks([path], 3)
    assert (result.returncode, result.stderr) == (1, "planted\n")


@pytest.mark.parametrize("which", ["the first", "the second"])
def test_each_test_starts_from_the_same_state(which):
    """The test runs twice. Each run changes every part of the state, and restores nothing."""
    assert torch.initial_seed() == 0
    assert torch.get_num_threads() == 1
    assert "PLANTED" not in os.environ
    assert os.getcwd() != "/"
    torch.manual_seed(5)
    torch.set_num_threads(2)
    os.environ["PLANTED"] = which
    os.chdir("/")


def test_killing_a_client_at_any_time_does_not_harm_the_server():
    command = [fork_server().python, "-c", "import time; time.sleep(600)"]
    before = processes_below_this_one()
    for milliseconds in range(0, 100, 4):
        process = subprocess.Popen(command)
        time.sleep(milliseconds / 1000)
        process.kill()
        process.wait()
    parent = "import os; print(os.getppid())"
    assert outputs(fork_server().python, parent)[1] == f"{fork_server().process.pid}\n"
    assert left_behind(before) == []


def test_a_missing_server_causes_an_error_instead_of_a_hang():
    other = {ADDRESS: fork_server().variables[ADDRESS] + "-of-another"}
    with tempfile.TemporaryFile() as output, pytest.raises(OSError):
        start_process(["python", "-c", ""], output, output, **other)


def test_programs_that_the_package_starts_in_any_folder_use_the_fork_server(tmp_path):
    program = "from accel_demo.processes.launch import run_to_end\n"
    program += "print(run_to_end(\"python -c 'import os; print(os.getppid())'\").stdout)"
    result = run_to_end(["python", "-c", program], cwd=tmp_path)
    assert int(result.stdout) == fork_server().process.pid


def test_a_child_of_an_earlier_process_is_not_reported_as_left_behind():
    """For example, a browser that stays open during all tests may start helper processes."""
    starts_another = "import subprocess, sys; sys.stdin.read(1); subprocess.run(['sleep', '600'])"
    command = [sys.executable, "-c", starts_another]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as browser:
        before = processes_below_this_one()
        browser.stdin.write(b"x")
        browser.stdin.flush()
        while not psutil.Process(browser.pid).children():
            time.sleep(0.01)
        assert left_behind(before) == []
        kill_all(psutil.Process(browser.pid).children())
