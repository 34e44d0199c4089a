"""Describe this machine, or check that a launch config starts the processes that it promises.

accel-demo doctor
accel-demo doctor --config accelerate_configs/cpu_two_processes.yaml

Without --config, this command describes this machine, and shows which launch configs in the
repository fit it. With --config, it launches a small test program with that config. The exit code
is 1 if the launch fails, or if the processes, devices or precision differ from the config.
"""

import json
import os
import re
import sys
from pathlib import Path

import accel_demo
from accel_demo.errors import Parser, UserError
from accel_demo.lab.doctor.launch_config import (
    ProbeAnswer,
    Promise,
    promise_of,
    read_config,
    starts_several,
)
from accel_demo.processes.launch import run_to_end
from accel_demo.show import table
from accel_demo.wording import counted

CONFIGS = Path(accel_demo.__file__).parent.parent / "accelerate_configs"
ROWS = ["processes", "connected", "backend", "device", "dtype"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


def main(arguments: list[str]) -> int:
    parser = Parser(__doc__, prog="accel-demo doctor")
    parser.add_argument("--config", type=Path, metavar="FILE", help="launch config to check")
    path = parser.parse_args(arguments).config
    return report_machine() if path is None else check_launch(path)


def report_machine() -> int:
    """Print a description of this machine, and whether each launch config fits it."""
    import torch

    from accel_demo.anatomy import devices
    from accel_demo.lab import machine

    print(table(["this machine", "value"], devices.machine_rows()) + "\n")
    print(table(["package", "version"], machine.version_rows()) + "\n")
    print(table(["environment variable", "value"], machine.environment_rows()) + "\n")
    files, gpus = sorted(CONFIGS.glob("*.yaml")), torch.accelerator.device_count()
    if files:
        rows = [[file.name, *fit_of(file, gpus)] for file in files]
        print(table(["launch config", "starts", "fits this machine"], rows))
    else:
        print("Launch configs: there is no folder accelerate_configs/ next to the package.")
        print("The folder is part of the repository, but not of an installed package.")
    return 0


def fit_of(file: Path, gpus: int) -> tuple[str, str]:
    """Return what the config would launch, and whether that fits this machine: "yes" or "no: …"."""
    try:
        promise = promise_of(read_config(file))
    except UserError as error:
        return "nothing", f"no: {error}"
    starts = f"{promise.processes} on {promise.device}, {promise.dtype}"
    if promise.device == "cpu" or gpus >= promise.processes:
        return starts, "yes"
    return starts, f"no: it needs {count_of(promise.processes)}, here: {count_of(gpus)}"


def check_launch(path: Path) -> int:
    """Launch the probe with a config, and compare its processes with what the config promises."""
    config = read_config(path)
    promise = promise_of(config)
    print(f"launching a test program with {path} (about 10 seconds) …", file=sys.stderr, flush=True)
    try:
        answers = launch_probe(path)
    except LaunchFailed as failure:
        print(f"the launch failed: {failure}", file=sys.stderr)
        return 1
    rows = list(zip(ROWS, promised_cells(promise), obtained_cells(answers), strict=True))
    print(f"{path}\n\n{table(['', 'promised', 'obtained'], rows)}\n")
    different = [name for name, promised, obtained in rows if promised != obtained]
    if not different:
        print("Everything is as promised.")
        return 0
    for names, fix in fixes(config, promise, answers, different):
        print(f"Not as promised: {', '.join(names)}")
        print("\n".join(f"  {line}" for line in fix))
    return 1


def promised_cells(promise: Promise) -> list[str]:
    """Return the cells of the "promised" column, one for each of `ROWS`."""
    connected = "yes" if promise.processes > 1 else "alone"
    device = device_words(promise.device, promise.processes, promise.processes)
    return [str(promise.processes), connected, promise.backend, device, promise.dtype]


def obtained_cells(answers: list[ProbeAnswer]) -> list[str]:
    """Return the cells of the "obtained" column, one for each of `ROWS`."""
    devices = {answer.device for answer in answers}
    kinds = ", ".join(sorted({device.split(":")[0] for device in devices}))
    backends = ", ".join(sorted({answer.backend for answer in answers}))
    dtypes = ", ".join(sorted({answer.dtype for answer in answers}))
    device = device_words(kinds, len(answers), len(devices))
    return [str(len(answers)), connection_of(answers), backends, device, dtypes]


def connection_of(answers: list[ProbeAnswer]) -> str:
    """Return "yes", "alone" for a single process, or "no: …" with the reason.

    The processes are connected if an all-reduce and a gather included all of them.
    """
    count = len(answers)
    alone = sum(answer.world_size == 1 for answer in answers)
    if count == alone == 1:
        return "alone"
    pids = {answer.pid for answer in answers}
    is_connected = all(
        answer.world_size == count
        and answer.sum_of_ranks == count * (count + 1) / 2
        and set(answer.gathered_pids) == pids
        for answer in answers
    )
    return "yes" if is_connected else f"no: {alone} of {count} processes are clones that run alone"


def device_words(kind: str, processes: int, devices: int) -> str:
    """Return the kind of device. For several processes on GPUs, add "one each" or "shared"."""
    if processes == 1 or kind == "cpu":
        return kind
    return f"{kind}, one each" if devices == processes else f"{kind}, shared"


def fixes(
    config: dict, promise: Promise, answers: list[ProbeAnswer], different: list[str]
) -> list[tuple[list[str], list[str]]]:
    """Return (rows, lines) for each cause of the differences: which rows it explains, and a fix."""
    connection = ("processes", "connected", "backend")
    causes: list[tuple[tuple[str, ...], list[str]]] = []
    if promise.processes > 1 and not starts_several(config):
        causes.append((connection, processes_fix(config, promise)))
    if "device" in different:
        kind = answers[0].device.split(":")[0]
        causes.append((("device", "backend"), device_fix(promise, len(answers), kind)))
    settings_fix = [
        "The processes did not receive the launcher's settings.",
        "Fix: unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, and in your script write",
        "Accelerator(cpu=use_cpu()), as in accel_demo/train.py.",
    ]
    dtype_fix = [
        "This device does not compute in the dtype that mixed_precision selects.",
        'Fix: set mixed_precision to "no", or use another device.',
    ]
    causes += [(connection, settings_fix), (("dtype",), dtype_fix)]
    unexplained, explanations = list(different), []
    for names, lines in causes:
        explained = [name for name in names if name in unexplained]
        unexplained = [name for name in unexplained if name not in explained]
        if explained:
            explanations.append((explained, lines))
    return explanations


def processes_fix(config: dict, promise: Promise) -> list[str]:
    """Explain why the launcher started only one process, and how to start several."""
    import torch

    reason = f"{config['distributed_type']} starts only one process and ignores num_processes."
    if promise.device != "cpu" and torch.accelerator.device_count() >= promise.processes:
        fix = "Fix: use distributed_type: MULTI_GPU, as in accelerate_configs/multi_gpu.yaml"
        return [reason, fix]
    fix = 'Fix: use distributed_type: MULTI_GPU with gpu_ids: "-1,-1",'
    return [reason, fix, "as in accelerate_configs/cpu_two_processes.yaml"]


def device_fix(promise: Promise, processes: int, kind: str) -> list[str]:
    """Explain why the processes run on `kind` and not on the promised device, and suggest a fix."""
    import torch

    if promise.device == "cpu":
        return [
            f"The processes run on {kind}, because MULTI_GPU does not pass use_cpu to them.",
            'Fix: add gpu_ids: "-1,-1", as in accelerate_configs/cpu_two_processes.yaml',
        ]
    needed, here = count_of(promise.processes), count_of(torch.accelerator.device_count())
    file = "cpu_two_processes.yaml" if promise.processes > 1 else "cpu.yaml"
    return [
        f"Each process needs its own GPU: {needed} in total, but this machine has {here}.",
        f"So the launch started {counted(processes, f'{kind} process')}.",
        f"Fix: use accelerate_configs/{file}, or a machine with {needed}.",
    ]


def count_of(gpus: int) -> str:
    return counted(gpus, "GPU") if gpus else "no GPU"


class LaunchFailed(Exception):
    """Raised if a launch fails or times out."""


def launch_probe(path: Path, seconds: float = 120) -> list[ProbeAnswer]:
    """Launch the probe with a config, and return the answers of all processes, sorted by rank.

    Raises `LaunchFailed` if the launch fails or takes longer than `seconds`. All launched processes
    have exited when this function returns or raises.
    """
    command = [*LAUNCH, str(path), "-m", "accel_demo.lab.doctor.probe"]
    ended = run_to_end(command, seconds, environment=dict(os.environ), cwd=Path.cwd())
    if ended.returncode is None:
        raise LaunchFailed(f"no answer within {seconds} seconds, so all processes were stopped")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("PROBE ")]
    answers = [ProbeAnswer(**json.loads(line.removeprefix("PROBE "))) for line in lines]
    if ended.returncode != 0 or not answers:
        raise LaunchFailed(cause_in(ended.stderr) or "the test program exited without an answer")
    return sorted(answers, key=lambda answer: answer.rank)


def cause_in(stderr: str) -> str:
    """Return the last error message of the launched program, ignoring the launcher's own errors."""
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line).rstrip() for line in stderr.splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    errors = [
        line
        for line in lines
        if re.match(r"[\w.]*(error|Error|Exception): ", line)
        and not re.search("CalledProcessError|ChildFailedError", line)
    ]
    return (errors or lines or [""])[-1]
