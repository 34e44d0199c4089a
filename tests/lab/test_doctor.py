"""Test that `accel-demo doctor` reports what a config really launches, and how to fix a config."""

import signal
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from accel_demo.errors import UserError
from accel_demo.lab.doctor import command as doctor
from accel_demo.lab.doctor.comparison import ROWS, connection_of, fixes, obtained_cells
from accel_demo.lab.doctor.launch_config import (
    ProbeAnswer,
    Promise,
    ignored_keys,
    promise_of,
    read_config,
)
from accel_demo.lab.doctor.launches import LaunchFailed, cause_in, launch_probe
from accel_demo.processes.cleanup import kill_tree

CLI = ["accel-demo", "doctor"]
NO = 'distributed_type: "NO"\n'
TWO = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
MACHINES = "num_machines: 2\nmain_process_ip: 127.0.0.1\n"
FSDP2 = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.fixture
def config(tmp_path):
    """`config(text)` writes a launch config and returns its path."""

    def config(text: str):
        path = tmp_path / "launch.yaml"
        path.write_text(text)
        return path

    return config


def row(stdout: str, name: str) -> str:
    """Return the `promised` and `obtained` cells of the table row with this name."""
    lines = [line for line in stdout.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    (cells,) = (cells for first, *cells in rows if first == name)
    return " | ".join(cells)


CONFIGS = "accelerate_configs/"
AS_PROMISED = "Everything is as promised."
# For each config, a file or its text: the cells of some rows, and what else is printed
LAUNCHES = {
    NO + "use_cpu: true\nmixed_precision: bf16\n": (
        {"processes": "1 | 1", "connected": "alone | alone", "backend": "none | none"}
        | {"device": "cpu | cpu", "dtype": "bfloat16 | bfloat16", "kind": "none | none"},
        [AS_PROMISED],
    ),
    CONFIGS + "cpu_two_processes.yaml": (
        {"processes": "2 | 2", "connected": "yes | yes", "backend": "gloo | gloo"}
        | {"device": "cpu | cpu", "dtype": "float32 | float32"}
        | {"kind": "DDP, whole model | DDP, whole model"},
        [AS_PROMISED],
    ),
    CONFIGS + "multi_gpu.yaml": (  # without GPUs
        {"connected": "yes | yes", "backend": "nccl | gloo"},
        ["launch started 2 cpu processes.", "use accelerate_configs/cpu_two_processes.yaml"],
    ),
    FSDP2 + "main_process_port: 0\n": (  # without GPUs
        {"processes": "2 | 2", "connected": "yes | yes"}
        | {"kind": "FSDP2, sharded model | DDP, whole model"},
        ["Not as promised: kind, device, backend", "Accelerate silently replaces FSDP2 with DDP."],
    ),
    "distributed_type: MULTI_CPU\nnum_processes: 2\n": (
        {"processes": "2 | 1", "connected": "yes | alone", "kind": "DDP, whole model | none"},
        ['Fix: use distributed_type: MULTI_GPU with gpu_ids: "-1,-1"'],
    ),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_what_a_config_starts_is_compared_with_what_it_promises(launch, start, config):
    rows, texts = LAUNCHES[launch]
    path = launch if launch.startswith(CONFIGS) else config(launch)
    result = start([*CLI, "--config", path])
    assert result.returncode == (texts != [AS_PROMISED]), result.stdout + result.stderr
    assert {name: row(result.stdout, name) for name in rows} == rows
    assert all(text in result.stdout for text in texts)


def test_a_failed_launch_prints_one_line_without_the_launchers_report(start, config):
    path = config(TWO + 'gpu_ids: "-1,-1"\nmain_process_port: 0\n')
    result = start([*CLI, "--config", path], ACCELERATE_USE_CPU="perhaps")
    assert result.returncode == 1
    assert result.stdout == ""
    _, failure = result.stderr.splitlines()
    assert failure.startswith("the launch failed: ValueError: ") and "perhaps" in failure


def test_a_launch_that_takes_too_long_is_stopped_with_all_its_processes(config):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(LaunchFailed, match="no answer within 0.5 seconds"):
        launch_probe(config(NO + "use_cpu: true\n"), seconds=0.5)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_stopping_a_launcher_stops_workers_in_a_different_session():
    start_worker = (
        "import subprocess, time; worker = ['sleep', '60']; "
        "print(subprocess.Popen(worker, start_new_session=True).pid, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", start_worker], stdout=subprocess.PIPE, text=True
    )
    worker = psutil.Process(int(launcher.stdout.readline()))
    kill_tree(launcher)
    launcher.communicate()
    assert launcher.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs([worker], timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


BAD = {
    "distributed_type: [": "is not YAML",
    "- cpu\n": "must contain lines of `key: value`",
    "": "must contain lines of `key: value`",
    "num_processes: 2\n": "distributed_type is missing",
    "distributed_type: NO\n": 'Write distributed_type: "NO", in quotes',
    "distributed_type: MULTIGPU\n": "distributed_type must be one of NO, .*MULTI_GPU",
    NO + "mixed_precision: no\n": 'Write mixed_precision: "no", in quotes',
    NO + "mixed_precision: bf8\n": 'mixed_precision must be "no", bf16 or fp16, got bf8',
    NO + "use_cpu: true\nmixed_precision: fp16\n": "fp16 needs a GPU for each process",
    NO + "use_cpu: true\nfp16: true\n": "fp16 needs a GPU for each process",
    TWO + 'gpu_ids: "-1,-1"\nmixed_precision: fp16\n': "fp16 needs a GPU for each process",
    NO + "num_proceses: 2\n": "unknown key num_proceses: did you mean num_processes",
    NO + "gradient_accumulation_steps: 4\n": "unknown key gradient_accumulation_steps: ",
    NO + "num_processes: 0\n": "num_processes must be an integer of at least 1, got 0",
    NO + "num_processes: 1.5\n": "integer of at least 1, got 1.5",
    NO + "num_processes: yes\n": "integer of at least 1, got True",
    NO + "num_processes: two\n": "integer of at least 1, got 'two'",
    "distributed_type: MULTI_GPU\n": "MULTI_GPU needs num_processes",
    "distributed_type: MULTI_CPU\n": "MULTI_CPU needs num_processes",
    TWO + "gpu_ids: 0\n": 'gpu_ids must be in quotes. Write gpu_ids: "0"',
    TWO + 'gpu_ids: "0"\n': "MULTI_GPU needs at least two gpu_ids",
    NO + 'use_cpu: "no"\n': "use_cpu must be true or false",
    TWO + "num_machines: 0\n": "num_machines must be an integer of at least 1, got 0",
    TWO + "num_machines: 2\n": "main_process_ip is missing. Add the address of machine 0",
    TWO + "num_machines: 2\nmain_process_ip: 10\n": "main_process_ip must be an address in quotes",
    TWO + "num_machines: 2\nmain_process_ip: 10.77\n": "in quotes, .* got 10.77",
    TWO + "num_machines: 3\nmain_process_ip: x\n": "on 3 machines, Accelerate would start only 0",
    TWO + MACHINES + "main_process_port: 0\n": "main_process_port: 0 works only on one machine",
    TWO + MACHINES + "machine_rank: one\n": "machine_rank must be an integer, got 'one'",
    TWO + MACHINES + "rdzv_backend: c10d\n": "rdzv_backend: c10d has no effect in a file",
    NO.replace("NO", "DEEPSPEED") + "num_processes: 2\n" + MACHINES: "Use MULTI_GPU or FSDP",
    FSDP2 + "  version: 2\n  fsdp_versoin: 2\n": "fsdp_versoin in fsdp_config has no effect",
    # `accelerate launch` would start num_processes // num_machines = 2 on each.
    TWO.replace("2", "5") + MACHINES: "of 5 processes on 2 machines, .* would start only 4",
    TWO + "main_process_port: 70000\n": "main_process_port must be from 0",
    NO + "compute_environment: AMAZON_SAGEMAKER\n": "only compute_environment: LOCAL_MACHINE",
}


@pytest.mark.parametrize("text", BAD)
def test_an_invalid_config_is_an_error_before_anything_starts(config, text):
    with pytest.raises(UserError, match=BAD[text]) as error:
        doctor.main(["--config", str(config(text))])
    assert "\n" not in str(error.value)


def test_old_keys_and_keys_without_a_flag_that_accelerate_accepts_are_allowed(config):
    path = config(FSDP2 + "  fsdp_ignored_modules: head\n  offload_params: false\n")
    assert promise_of(read_config(path)).kind == "FSDP2"
    path = config(NO + "use_cpu: true\nfp16: false\ndynamo_backend: 'NO'\n")
    assert promise_of(read_config(path)) == Promise(1, "none", "cpu", "float32", "none")


def test_an_ignored_key_that_does_no_harm_is_a_note(config):
    launch = read_config(config(TWO + "same_network: true\nenable_cpu_affinity: true\n"))
    assert ignored_keys(launch) == ["same_network", "enable_cpu_affinity"]
    assert ignored_keys(read_config(config(TWO + "rdzv_backend: static\n"))) == []


def test_flags_for_several_machines_need_a_config_for_several_machines(config):
    for flag in ("--machine-rank=0", "--main-process-ip=127.0.0.1"):
        with pytest.raises(UserError, match="launch.yaml is for one machine. Set num_machines"):
            doctor.main(["--config", str(config(TWO)), flag])
        with pytest.raises(UserError, match="the flags for several machines need --config FILE"):
            doctor.main([flag])


def test_a_missing_config_is_an_error(tmp_path):
    with pytest.raises(UserError, match="cannot read launch config .*nowhere.yaml: No such file"):
        doctor.main(["--config", str(tmp_path / "nowhere.yaml")])


def test_a_port_in_use_is_an_error(config):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use. Write main_process_port: 0"):
            doctor.main(["--config", str(config(TWO + f"main_process_port: {port}\n"))])


def test_an_invalid_config_prints_one_line_and_exits_with_code_2(start, config):
    result = start([*CLI, "--config", config("distributed_type: NO\n")])
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and 'distributed_type: "NO"' in line


def answer(rank: int, world_size: int, total: float, pids: list[int]) -> ProbeAnswer:
    pid = 100 + rank
    return ProbeAnswer(rank, world_size, "none", "cpu", "float32", "none", False, pid, pids, total)


def on_gpus() -> list[ProbeAnswer]:
    return [replace(answer(rank, 2, 3.0, [100, 101]), device=f"cuda:{rank}") for rank in (0, 1)]


def test_processes_are_connected_only_if_the_sum_of_ranks_and_all_process_ids_match():
    clones = [answer(0, 1, 1.0, [100]), replace(answer(0, 1, 1.0, [101]), pid=101)]
    assert obtained_cells(clones)[ROWS.index("processes")] == "2"
    assert connection_of(clones) == "no: 2 of 2 processes are clones that run alone"
    right = [answer(rank, 2, 3.0, [100, 101]) for rank in (0, 1)]
    assert connection_of(right) == "yes"
    assert connection_of([right[0], replace(right[1], sum_of_ranks=2.0)]) != "yes"
    assert connection_of([right[0], replace(right[1], gathered_pids=[101, 101])]) != "yes"


def test_a_gpu_that_two_processes_share_is_reported_as_shared():
    gpus, device = on_gpus(), ROWS.index("device")
    assert obtained_cells(gpus)[device] == "cuda, one each"
    assert obtained_cells([gpus[0], gpus[0]])[device] == "cuda, shared"


def test_the_fix_for_a_cpu_config_that_uses_gpus_is_to_hide_the_gpus(config):
    launch = read_config(config(TWO + "use_cpu: true\n"))
    promise = promise_of(launch)
    assert promise == Promise(2, "gloo", "cpu", "float32", "DDP")
    ((names, lines),) = fixes(launch, promise, on_gpus(), ["backend", "device"])
    assert sorted(names) == ["backend", "device"]
    assert 'Fix: add gpu_ids: "-1,-1"' in "\n".join(lines)


def test_the_cause_of_a_failure_is_the_error_and_not_the_launchers_report():
    stderr = (
        '[rank1]:   File "x.py", line 1\n[rank1]: ValueError: bad luck\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nx.py FAILED\n"
    )
    assert cause_in(stderr) == "ValueError: bad luck"
    assert cause_in("killed\n-----\n") == "killed"
    assert cause_in("") == ""


def test_the_machine_report_names_every_config_and_fits_in_100_columns(start):
    result = start(CLI, WORLD_SIZE="3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert row(result.stdout, "WORLD_SIZE") == "3"
    for path in doctor.CONFIGS.glob("*.yaml"):
        assert path.name in result.stdout
    assert row(result.stdout, "cpu.yaml").endswith("| yes")
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_a_missing_folder_of_configs_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "CONFIGS", tmp_path)
    assert doctor.main([]) == 0
    assert "there is no folder accelerate_configs/" in capsys.readouterr().out


def test_a_config_fits_only_a_machine_with_enough_gpus():
    file = doctor.CONFIGS / "multi_gpu.yaml"
    assert doctor.fit_of(file, 2)[1] == "yes"
    assert doctor.fit_of(file, 1)[1] == "no: it needs 2 GPUs, here: 1 GPU"
    assert doctor.fit_of(doctor.CONFIGS / "cpu_two_processes.yaml", 0)[1] == "yes"
