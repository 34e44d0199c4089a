"""Page 94: more launches, the variables that each launcher sets, and launches from a notebook."""

import argparse
import inspect
from datetime import timedelta

import pytest
import torch.cuda
import torch.distributed.launch
from accelerate import debug_launcher
from torch.distributed.constants import default_pg_timeout

from accel_demo.processes.launch import free_port
from tests.conftest import run_all, run_ranks
from tests.pages.pages import FIELD, TUTORIALS, bound_to, rows_below, table_rows

PAGE = "94_launchers.md"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 …"
CONFIG = "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml …"
USE_CPU = "ACCELERATE_USE_CPU=true"
SPAWN_MISTAKES = """
import torch.distributed as dist
import torch.multiprocessing as mp


def without_rank(processes):
    pass


def without_variables(rank):
    dist.init_process_group("gloo")


if __name__ == "__main__":
    for function, arguments in ((without_rank, (2,)), (without_variables, ()), (lambda r: r, ())):
        try:
            mp.spawn(function, args=arguments, nprocs=1)
        except Exception as error:
            print(str(error).strip().splitlines()[-1])
"""


def test_the_page_shows_how_many_processes_each_command_starts_and_connects():
    multi_cpu = "accelerate launch --config_file tutorials/10_multi_cpu.yaml …"
    wanted = [  # command, expected, started, connected
        ("accelerate launch …", "1", "1", "1"),
        ("accelerate launch --cpu --num_processes 2 …", "2", "1", "⚠ 1"),
        (multi_cpu, "2", "1", "⚠ 1"),
        (CONFIG, "2", "2", "⚠ 1"),
        (f"{USE_CPU} {TORCHRUN}", "2", "2", "2"),
        (f"{USE_CPU} accelerate launch --multi_gpu --num_processes 2 …", "2", "2", "2"),
        (f"{TORCHRUN} --cpu-if-needed", "2", "2", "2"),
        (f"{CONFIG} --cpu-if-needed", "2", "2", "2"),
        ("python … --debug-launcher", "2", "2", "2"),
    ]
    assert table_rows(PAGE, cells=5) == [
        [str(row), f"`{command}`", *numbers]
        for row, (command, *numbers) in enumerate(wanted, start=5)
    ]


def test_the_page_shows_what_each_launcher_sets_and_passes():
    rows = {row[0]: row[1:] for row in table_rows(PAGE) if len(row) == 8}
    assert rows == {
        "`python`": [*[""] * 6, ""],
        "`mp.spawn`": [*[""] * 6, ""],
        "`debug_launcher`": ["", "", "set", "", "set", "set", ""],
        "`torchrun`": [*["set"] * 6, ""],
        "`python -m torch.distributed.launch`": [*["set"] * 6, "`--local-rank=0`"],
        "`accelerate launch`": [*["set"] * 6, ""],
    }


def test_an_old_script_rejects_the_argument_of_the_old_launcher(capsys):
    parser = argparse.ArgumentParser(prog="script.py")
    parser.add_argument("--local_rank", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--local-rank=0"])
    message = "error: unrecognized arguments: --local-rank=0"
    assert capsys.readouterr().err.splitlines()[-1] == f"script.py: {message}"
    assert f"`{message}`" in " ".join((TUTORIALS / PAGE).read_text().split())


def test_the_old_launcher_is_deprecated():
    source = inspect.getsource(torch.distributed.launch)
    assert "torch.distributed.launch is deprecated" in source and "Use torchrun" in source


def test_debug_launcher_needs_an_interface_that_macos_does_not_have():
    bound_to("accelerate", PAGE, "in Accelerate {version}, it needs a network interface")
    assert 'gloo_socket_ifname="lo"' in inspect.getsource(debug_launcher)


def test_the_page_shows_which_launches_from_a_notebook_connect_their_processes():
    bound_to("accelerate", PAGE, "Accelerate {version} ignores the launcher's `mixed_precision`")
    shown = [row[2] for row in rows_below(TUTORIALS / PAGE, "in the notebook")]
    clones = "`process 0 of 1, fp32`, `process 0 of 1, fp32`"
    connected = "`process 0 of 2, fp32`, `process 1 of 2, fp32`"
    of_notebook, (of_debug, error, after_accelerator) = shown[:4], shown[4:]
    assert of_notebook == [clones, connected, connected, connected.replace("fp32", "bf16")]
    assert (of_debug, after_accelerator) == (connected, clones)
    assert error.startswith("`` ValueError: To launch a multi-device training from your notebook")


CUDA_IS_USED = """
from accelerate import notebook_launcher
from accel_demo.processes.launch import free_port

def train():
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA")

try:
    notebook_launcher(train, num_processes=2, use_port=str(free_port()))
except Exception as error:
    print(type(error).__name__, "Cannot re-initialize CUDA in forked subprocess" in str(error))
"""


def test_the_message_about_a_used_gpu_reaches_the_notebook(start, tmp_path):
    assert "Cannot re-initialize CUDA in forked subprocess. " in inspect.getsource(torch.cuda)
    (tmp_path / "script.py").write_text(CUDA_IS_USED)
    result = start(["python", tmp_path / "script.py"])
    assert result.stdout.splitlines()[1:] == ["ChildFailedError True"], result.stderr


def test_mp_spawn_passes_the_rank_first_sets_no_variables_and_rejects_lambdas(start, tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(SPAWN_MISTAKES)
    result = start(["python", script], RANK=None, WORLD_SIZE=None)
    without_rank, without_variables, of_lambda = result.stdout.splitlines()
    assert without_rank == (
        "TypeError: without_rank() takes 1 positional argument but 2 were given"
    )
    assert "environment variable RANK expected, but not set" in without_variables
    assert "pickle" in of_lambda


def test_the_page_shows_what_two_processes_with_rank_0_print():
    of_spawn, _, of_torchrun, _ = rows = rows_below(TUTORIALS / PAGE, "started with")
    assert [row[2:] for row in rows[1::2]] == [["connected: 2"] * 2] * 2
    in_use, waiting = of_spawn[2:]
    assert in_use.startswith("`DistNetworkError: The server socket has failed to listen on any ")
    assert in_use.endswith("name: EADDRINUSE, message: address already in use`")
    assert waiting.endswith("seconds waiting for clients. 1/2 clients joined.`")
    assert all(cell.startswith("`DistStoreError: wait timeout after ") for cell in of_torchrun[2:])
    assert default_pg_timeout == timedelta(minutes=30)


def test_the_second_process_with_rank_0_finds_the_address_in_use(tmp_path):
    text = (FIELD / "c14_same_rank.py").read_text()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [["python", FIELD / "c14_same_rank.py"]] * 2
    results = run_all(both, timeout=60, environments=[address] * 2)
    [message] = [result.stderr for result in results if result.returncode == 1]
    assert message.rstrip().endswith("name: EADDRINUSE, message: address already in use")
    text = text.replace("rank=0", 'rank=int(os.environ["RANK"])')
    text += "dist.barrier()\n"  # so that neither exits while the other one is still connecting
    (tmp_path / "script.py").write_text(f"import os\n{text}print(dist.get_world_size())\n")
    connected = run_ranks([tmp_path / "script.py"], 2)
    assert (connected.returncode, connected.stdout) == (0, "2\n2\n"), connected.stderr


def test_spawn_in_a_script_without_a_guard_fails_as_the_page_says(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=1)\n")
    result = start(["python", script])
    assert result.returncode != 0
    assert "RuntimeError" in result.stderr and "freeze_support()" in result.stderr
