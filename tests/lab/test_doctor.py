"""Test that `accel-demo doctor` reports what a config really launches, and how to fix a config."""

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from accel_demo.errors import UserError
from accel_demo.lab.doctor import command as doctor
from accel_demo.lab.doctor.comparison import (
    ROWS,
    connection_of,
    failure_fix,
    fixes,
    obtained_cells,
    plain_words,
)
from accel_demo.lab.doctor.launch_config import ProbeAnswer, Promise, promise_of, read_config
from accel_demo.lab.doctor.launches import LaunchFailed, cause_in, flags_for, launch_probe
from accel_demo.lab.doctor.notes import PREFIXES, cannot_check, known_keys, notes_on_config
from accel_demo.processes.cleanup import kill_tree
from tests.conftest import REPOSITORY

CLI = ["accel-demo", "doctor"]
FIELD = REPOSITORY / "tests" / "lab" / "field"  # public launch configs, shortened
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
CLONES = "  connected: no: 2 of 2 processes are clones that run alone"
SAME = "A plain Accelerator() gets the same."
# For each config, a file or its text: the cells of some rows, and what else is printed
LAUNCHES = {
    "distributed_type: NO\nnum_processes: 1\nuse_cpu: true\nmixed_precision: bf16\n": (
        {"processes": "1 | 1", "connected": "alone | alone", "backend": "none | none"}
        | {"device": "cpu | cpu", "dtype": "bfloat16 | bfloat16", "kind": "none | none"},
        [AS_PROMISED, SAME, 'note: YAML reads NO as false. Write distributed_type: "NO"'],
    ),
    CONFIGS + "cpu_two_processes.yaml": (
        {"processes": "2 | 2", "connected": "yes | yes", "backend": "gloo | gloo"}
        | {"device": "cpu | cpu", "dtype": "float32 | float32"}
        | {"kind": "DDP, whole model | DDP, whole model"},
        [AS_PROMISED, CLONES, "set the environment variable ACCELERATE_USE_CPU=true."],
    ),
    CONFIGS + "multi_gpu.yaml": (  # without GPUs
        {"connected": "yes | yes", "backend": "nccl | gloo"},
        [
            "launch started 2 cpu processes.",
            "use accelerate_configs/cpu_two_processes.yaml",
            CLONES,
        ],
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
    assert result.returncode == (AS_PROMISED not in texts), result.stdout + result.stderr
    assert {name: row(result.stdout, name) for name in rows} == rows
    assert all(text in result.stdout + result.stderr for text in texts)


# What needs a GPU for each process, and a config for it
NEED_GPUS = {
    "FSDP1": FSDP2.replace("version: 2", "version: 1"),
    "Context parallelism": FSDP2 + "parallelism_config:\n  parallelism_config_cp_size: 2\n",
    "Tensor parallelism": TWO + "parallelism_config:\n  parallelism_config_tp_size: 2\n",
}


@pytest.mark.parametrize("kind", NEED_GPUS)
def test_a_failed_launch_without_gpus_is_explained_if_the_config_needs_them(kind, config):
    launch = read_config(config(NEED_GPUS[kind]))
    assert cannot_check(launch) is None
    needed, fix = failure_fix(launch, promise_of(launch))
    assert needed == f"  {kind} needs a GPU for each process: use a machine with 2 GPUs."
    assert fix.endswith("use a config like accelerate_configs/cpu_two_processes.yaml")
    assert failure_fix(launch | {"num_processes": 0}, promise_of(launch)) == []  # enough GPUs


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEED_GPUS)
def test_a_launch_without_the_gpus_that_it_needs_fails_with_an_explanation(kind, start, config):
    result = start([*CLI, "--config", config(NEED_GPUS[kind] + "main_process_port: 0\n")])
    assert result.returncode == 1
    assert "the launch failed: " in result.stderr
    assert f"{kind} needs a GPU for each process" in result.stderr


@pytest.mark.slow
def test_fp16_on_a_cpu_is_launched_and_reported_as_different(start, config):
    result = start([*CLI, "--config", config(NO + "use_cpu: true\nmixed_precision: fp16\n")])
    assert result.returncode == 1
    assert row(result.stdout, "dtype") == "float16 | float32"
    assert "Not as promised: dtype" in result.stdout


def test_a_failed_launch_prints_one_line_without_the_launchers_report(start, config):
    path = config(TWO + 'gpu_ids: "-1,-1"\nmain_process_port: 0\n')
    result = start([*CLI, "--config", path], ACCELERATE_USE_CPU="perhaps")
    assert result.returncode == 1
    assert result.stdout == ""
    _, failure = result.stderr.splitlines()
    assert failure.startswith("the launch failed: ValueError: ") and "perhaps" in failure


def test_a_launch_that_takes_too_long_is_stopped_with_all_its_processes(config):
    path = config(NO + "use_cpu: true\n")
    with pytest.raises(LaunchFailed, match="no answer within 0.5 seconds"):
        launch_probe(path, seconds=0.5)
    own = {str(path), "accel_demo.lab.doctor.probe"}
    assert not [words for words in commands_below_this_process() if own & set(words)]


def test_the_processes_of_a_launch_are_found_by_their_command(config):
    path = config(NO + "use_cpu: true\n")
    say_ready = "import time; print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", say_ready, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        # A process that has only just been started has no command line for a moment.
        assert process.stdout.readline() == "ready\n"
        assert command in commands_below_this_process()
    finally:
        process.kill()
        process.communicate()


def commands_below_this_process() -> list[list[str]]:
    commands = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            commands.append(process.cmdline())
    return commands


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
    "distributed_type: TPU\nnum_processes: 8\n": "TPU is now called XLA",
    NO + "mixed_precision: bf8\n": 'mixed_precision must be "no", bf16, fp16 or fp8, got bf8',
    NO + "compute_environment: AZURE\n": "must be LOCAL_MACHINE or AMAZON_SAGEMAKER, got AZURE",
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
    NO + "use_cpu: perhaps\n": "use_cpu must be true or false, got 'perhaps'",
    TWO + "num_machines: 0\n": "num_machines must be an integer of at least 1, got 0",
    TWO + "num_machines: 2\n": "main_process_ip is missing. Add the address of machine 0",
    TWO + "num_machines: 2\nmain_process_ip: 10\n": "main_process_ip must be an address in quotes",
    TWO + "num_machines: 2\nmain_process_ip: 10.77\n": "in quotes, .* got 10.77",
    TWO + "num_machines: 3\nmain_process_ip: x\n": "on 3 machines, Accelerate would start none",
    TWO + MACHINES + "main_process_port: 0\n": "main_process_port: 0 works only on one machine",
    TWO + MACHINES + "machine_rank: one\n": "machine_rank must be an integer, got 'one'",
    TWO + "main_process_port: 70000\n": "main_process_port must be from 0",
}


@pytest.mark.parametrize("text", BAD)
def test_an_invalid_config_is_an_error_before_anything_starts(config, text):
    with pytest.raises(UserError, match=BAD[text]) as error:
        doctor.main(["--config", str(config(text))])
    assert "\n" not in str(error.value)


# For each public config or its text, the notes on it
TPU_ONLY = "only on TPUs, with distributed_type: XLA."
QUOTES = 'YAML reads NO as false. Write distributed_type: "NO", in quotes.'
NOTES = {
    "debug_true.yaml": [
        "Accelerate ignores enable_cpu_affinity in a file, and reads only the flag "
        "--enable_cpu_affinity.",
        f"Accelerate uses downcast_bf16, main_training_function {TPU_ONLY}",
    ],
    "deepspeed_typo.yaml": [
        "Accelerate ignores zero_stag in deepspeed_config. Did you mean zero_stage?"
    ],
    "downcast_no.yaml": [],
    "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
    "  stage3_max_live_parameters: 1e8\n  fp16:\n    enabled: true\n": [
        "Accelerate ignores stage3_max_live_parameters, fp16 in deepspeed_config. Only the file in "
        "deepspeed_config_file can have DeepSpeed's own keys."
    ],
    "fp8.yaml": [],
    "multi_gpu_with_fsdp_config.yaml": [
        "Accelerate ignores fsdp_config here: it needs distributed_type: FSDP."
    ],
    "no_unquoted.yaml": [QUOTES],
    "prefetch_policy.yaml": [
        "Accelerate ignores fsdp_backward_prefetch_policy in fsdp_config. Did you mean "
        "fsdp_backward_prefetch?"
    ],
    "tpu_xla.yaml": [],
    NO + 'use_cpu: "no"\nmixed_precision: BF16\n': [],
    NO + "use_cpu: true\nfp16: false\n": ["fp16 is an old key. Write mixed_precision instead."],
    NO + "dynamo_backend: 'NO'\n": [
        "dynamo_backend is an old key. Write it into the section dynamo_config."
    ],
    NO + "deepspeed_config: {zero_stage: 2}\nmegatron_lm_config: {}\n": [
        "Accelerate ignores deepspeed_config here: it needs distributed_type: DEEPSPEED."
    ],
    TWO + "fp8_config: {backend: TE}\n": [
        "Accelerate ignores fp8_config here: it needs mixed_precision: fp8."
    ],
    TWO + "fsdp_config: true\n": [
        "Accelerate ignores fsdp_config here: it needs distributed_type: FSDP."
    ],
    TWO + "dynamo_config: {backend: INDUCTOR, dynamo_mod: default}\n": [
        "Accelerate ignores dynamo_mod in dynamo_config. Did you mean dynamo_mode?"
    ],
    TWO + "parallelism_config: {cp_size: 2}\n": [
        "Accelerate ignores cp_size in parallelism_config. Did you mean parallelism_config_cp_size?"
    ],
    TWO + "rdzv_backend: c10d\n": [
        "rdzv_backend: c10d has no effect in a file. The launch uses static."
    ],
    TWO + MACHINES + "rdzv_backend: c10d\nsame_network: true\n": [
        "Accelerate ignores rdzv_backend in a file, and reads only the flag --rdzv_backend c10d."
    ],
    # `accelerate launch` starts num_processes // num_machines = 2 on each.
    TWO.replace("2", "5") + MACHINES: [
        "Accelerate starts only 4 of 5 processes, because 5 is not a multiple of 2 machines."
    ],
    FSDP2 + "  fsdp_ignored_modules: head\n  offload_params: false\n": [],
    FSDP2 + "  version: 2\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_use_orig_params: true\n": [
        "FSDP2 ignores fsdp_sharding_strategy, fsdp_use_orig_params: see "
        "`accelerate to-fsdp2 --help`."
    ],
}


@pytest.mark.parametrize("launch", NOTES)
def test_what_accelerate_ignores_is_a_note_and_no_error(launch, config):
    path = FIELD / launch if launch.endswith(".yaml") else config(launch)
    assert list(notes_on_config(read_config(path))) == NOTES[launch]


@pytest.mark.parametrize("section", PREFIXES)
def test_every_key_that_accelerate_reads_from_a_section_is_accepted(section, config):
    keys = known_keys(section)
    assert len(keys) >= (1 if section == "mpirun_config" else 4)
    kind = {"deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}.get(
        section, "FSDP"
    )
    if section == "mpirun_config":
        kind = "MULTI_CPU"
    lines = "".join(f"  {key}: 1\n" for key in keys)
    text = f"distributed_type: {kind}\nnum_processes: 2\n{section}:\n{lines}"
    launch = read_config(config(text + "mixed_precision: fp8\n"))
    assert list(notes_on_config(launch)) == []
    launch[section]["not_a_key"] = 1
    (note,) = notes_on_config(launch)
    assert note.startswith(f"Accelerate ignores not_a_key in {section}.")


def test_a_config_with_the_default_of_every_key_has_no_notes(config):
    from accelerate.commands.config.config_args import ClusterConfig

    launch = ClusterConfig(
        "LOCAL_MACHINE", "NO", mixed_precision="no", use_cpu=False, debug=True, num_processes=1
    )
    path = config("")
    launch.to_yaml_file(str(path))
    path.write_text(path.read_text() + "same_network: true\ndowncast_bf16: 'no'\ntpu_env: []\n")
    assert list(notes_on_config(read_config(path))) == []


# For each public config or its text, what doctor cannot check
NOT_CHECKED = {
    "fp8.yaml": "fp8",
    "tpu_xla.yaml": "XLA",
    NO + "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: x\n": "Amazon SageMaker",
    "distributed_type: MULTI_MLU\nnum_processes: 2\n": "MULTI_MLU",
    "distributed_type: DEEPSPEED\nnum_processes: 2\n" + MACHINES: "DEEPSPEED on several machines",
}


@pytest.mark.parametrize("launch", NOT_CHECKED)
def test_what_cannot_be_checked_here_is_no_error_and_nothing_is_launched(launch, config, capsys):
    path = FIELD / launch if launch.endswith(".yaml") else config(launch)
    assert doctor.main(["--config", str(path)]) == 3
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith(f"doctor cannot check {NOT_CHECKED[launch]}")
    assert stderr == ""
    assert doctor.fit_of(path, gpus=8)[1].startswith("doctor cannot check")


def test_public_configs_that_accelerate_rejects_are_errors_with_the_reason():
    reasons = {
        "ipex.yaml": "unknown key ipex_config: Accelerate 1.13 and newer have no support for IPEX.",
        "sagemaker_without_key.yaml": "ec2_instance_type: it needs compute_environment: AMAZON_SAG",
    }
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            read_config(FIELD / name)
    every = {path.name for path in FIELD.glob("*.yaml")}
    assert every == {*reasons} | {name for name in NOTES if name.endswith(".yaml")}


def test_the_number_of_processes_can_be_a_flag_like_that_of_the_launcher(config):
    path = config("distributed_type: MULTI_GPU\n")
    launch = read_config(path, num_processes=2)
    assert promise_of(launch).processes == 2
    assert flags_for(launch) == ("--num_processes", "2")
    quoted = read_config(config('distributed_type: MULTI_GPU\nnum_processes: "2"\n'))
    assert promise_of(quoted).processes == 2  # as in `accelerate launch`


def test_a_promise_is_for_the_devices_that_the_config_names(config):
    for kind, device in (("XPU", "xpu"), ("CPU", "cpu"), ("GPU", "cuda")):
        launch = read_config(config(f"distributed_type: MULTI_{kind}\nnum_processes: 2\n"))
        assert promise_of(launch).device == device


def test_a_plain_accelerator_is_compared_with_what_the_probe_got():
    clones = [answer(0, 1, 1.0, [100]), replace(answer(0, 1, 1.0, [101]), pid=101)]
    connected = [answer(rank, 2, 3.0, [100, 101]) for rank in (0, 1)]
    assert plain_words(connected, connected)[1:] == [SAME]
    assert CLONES in plain_words(connected, clones)
    assert "  no GPU" in plain_words(connected, "no GPU")


def test_flags_for_several_machines_need_a_config_for_several_machines(config):
    with pytest.raises(UserError, match="the flags for a launch need --config FILE"):
        doctor.main(["--num-processes", "2"])
    for flag in ("--machine-rank=0", "--main-process-ip=127.0.0.1"):
        with pytest.raises(UserError, match="launch.yaml is for one machine. Set num_machines"):
            doctor.main(["--config", str(config(TWO)), flag])
        with pytest.raises(UserError, match="the flags for a launch need --config FILE"):
            doctor.main([flag])


def test_a_missing_config_is_an_error(tmp_path):
    with pytest.raises(UserError, match="cannot read launch config .*nowhere.yaml: No such file"):
        doctor.main(["--config", str(tmp_path / "nowhere.yaml")])


def test_a_port_in_use_is_a_note_because_accelerate_uses_another_one(config):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launch = read_config(config(TWO + f"main_process_port: {port}\n"))
        assert list(notes_on_config(launch)) == [
            f"port {port} is in use, so Accelerate uses another one."
        ]


def test_a_wrong_interface_is_an_error_before_anything_starts(monkeypatch, config):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eht0")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME is eht0, .* It has lo"):
        doctor.main(["--config", str(config(TWO + 'gpu_ids: "-1,-1"\n'))])


def test_an_invalid_config_prints_one_line_and_exits_with_code_2(start, config):
    result = start([*CLI, "--config", config("distributed_type: NO\n")])
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and 'distributed_type: "NO"' in line


def answer(rank: int, world_size: int, total: float, pids: list[int]) -> ProbeAnswer:
    pid = 100 + rank
    words = (False, pid, pids, total, True)
    return ProbeAnswer(rank, world_size, "none", "cpu", "float32", "none", *words)


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


def test_a_config_fits_only_a_machine_with_enough_gpus():
    file = doctor.CONFIGS / "multi_gpu.yaml"
    assert doctor.fit_of(file, 2)[1] == "yes"
    assert doctor.fit_of(file, 1)[1] == "no: it needs 2 GPUs, here: 1 GPU"
    assert doctor.fit_of(doctor.CONFIGS / "cpu_two_processes.yaml", 0)[1] == "yes"
