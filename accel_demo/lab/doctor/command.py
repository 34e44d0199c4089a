"""What this machine has, which launch configs fit it, and whether one starts what it says.

accel-demo doctor
accel-demo doctor --config accelerate_configs/cpu_two_processes.yaml
"""

import json
import os
import re
import sys
from pathlib import Path

import accel_demo
from accel_demo.errors import Parser, UserError
from accel_demo.lab.doctor.launch_config import Promise, promise_of, read_config, starts_several
from accel_demo.processes.launch import run_to_end
from accel_demo.wording import counted

CONFIGS = Path(accel_demo.__file__).parent.parent / "accelerate_configs"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


def main(arguments: list[str]) -> int:
    parser = Parser(__doc__, prog="accel-demo doctor")
    parser.add_argument("--config", type=Path, metavar="FILE", help="launch a probe with this file")
    path = parser.parse_args(arguments).config
    return report_machine() if path is None else check_launch(path)


def report_machine() -> int:
    """Print what this machine has, and which of the stored configs fit it."""
    import torch

    from accel_demo.anatomy import devices
    from accel_demo.lab import machine

    print_rows("This machine", devices.machine_rows())
    print_rows("Versions", machine.version_rows())
    print_rows("Environment a launch reads", machine.environment_rows())
    files = sorted(CONFIGS.glob("*.yaml"))
    if not files:
        print("Launch configs: there is no folder accelerate_configs/ beside the package;")
        print("it is part of the repository, not of an installed package.")
        return 0
    accelerators = torch.accelerator.device_count()
    rows = [("config", "starts", "fits this machine")]
    rows += [(file.name, *fit_of(file, accelerators)) for file in files]
    print_rows("Launch configs in accelerate_configs/", rows)
    return 0


def check_launch(path: Path) -> int:
    """Launch the probe with this config; print what was promised, what came, and what to change."""

    config = read_config(path)
    promise = promise_of(config)
    print(f"starting {path} with a small probe, about 10 seconds …", file=sys.stderr, flush=True)
    try:
        answers = launch_probe(path)
    except LaunchFailed as failure:
        print(f"the launch failed: {failure}", file=sys.stderr)
        return 1
    promised, obtained = promised_row(promise), obtained_row(answers)
    rows = [("", "promised", "obtained")]
    rows += [(name, promised[name], obtained[name]) for name in promised]
    print_rows(str(path), rows)
    different = [name for name in promised if promised[name] != obtained[name]]
    if not different:
        print("All as promised.")
        return 0
    for names, fix in fixes(config, promise, answers, different):
        print(f"Not as promised: {', '.join(names)}")
        print("\n".join(f"  {line}" for line in fix))
    return 1


def fit_of(file: Path, accelerators: int) -> tuple[str, str]:
    """What a config starts, and "yes" or why it does not fit a machine with so many GPUs."""
    try:
        config = read_config(file)
    except UserError as error:
        return "nothing", f"no: {error}"
    promise = promise_of(config)
    starts = f"{promise.processes} on {promise.device}, {promise.dtype}"
    if promise.device == "cpu" or accelerators >= promise.processes:
        return starts, "yes"
    return starts, f"no: it needs {count_of(promise.processes)}, here: {count_of(accelerators)}"


def promised_row(promise: Promise) -> dict[str, str]:
    """The promise in the words of the table."""
    return {
        "processes": str(promise.processes),
        "connected": "yes" if promise.processes > 1 else "alone",
        "backend": promise.backend,
        "device": device_words(promise.device, promise.processes, promise.processes),
        "dtype": promise.dtype,
    }


def obtained_row(answers: list[dict]) -> dict[str, str]:
    """What the processes of the probe say, in the words of the table."""
    devices = [answer["device"] for answer in answers]
    kinds = {device.split(":")[0] for device in devices}
    return {
        "processes": str(len(answers)),
        "connected": connection_of(answers),
        "backend": ", ".join(sorted({answer["backend"] for answer in answers})),
        "device": device_words(", ".join(sorted(kinds)), len(answers), len(set(devices))),
        "dtype": ", ".join(sorted({answer["dtype"] for answer in answers})),
    }


def connection_of(answers: list[dict]) -> str:
    """ "yes" where every process was in the same all-reduce and the same gather."""
    count = len(answers)
    if count == 1 and answers[0]["world_size"] == 1:
        return "alone"
    everyone = {answer["pid"] for answer in answers}
    together = [
        answer["world_size"] == count
        and answer["sum"] == count * (count + 1) / 2
        and set(answer["pids"]) == everyone
        for answer in answers
    ]
    alone = sum(answer["world_size"] == 1 for answer in answers)
    return "yes" if all(together) else f"no: {alone} of {count} are clones, each alone"


def device_words(kind: str, processes: int, devices: int) -> str:
    """ "cpu", "cuda", or for several processes on GPUs whether each has its own."""
    if processes == 1 or kind == "cpu":
        return kind
    return f"{kind}, one each" if devices == processes else f"{kind}, shared"


def fixes(
    config: dict, promise: Promise, answers: list[dict], different: list[str]
) -> list[tuple[list[str], list[str]]]:
    """For each cause: the rows that differ because of it, and the lines that say what to do."""
    found, left = [], list(different)

    def explain(names: tuple[str, ...], *lines: str) -> None:
        explained = [name for name in names if name in left]
        left[:] = [name for name in left if name not in explained]
        if explained:
            found.append((explained, list(lines)))

    if promise.processes > 1 and not starts_several(config):
        explain(("processes", "connected", "backend"), *processes_fix(config, promise))
    if "device" in left:
        explain(("device", "backend"), *device_fix(promise, len(answers), answers[0]["device"]))
    explain(
        ("processes", "connected", "backend"),
        "The launcher's promise did not reach the processes.",
        "Fix: unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE if they are set, and build",
        "Accelerator(cpu=use_cpu()) as accel_demo/train.py does.",
    )
    explain(
        ("dtype",),
        "This device does not compute in what mixed_precision says.",
        'Fix: set mixed_precision to "no", or use another device.',
    )
    return found


def processes_fix(config: dict, promise: Promise) -> list[str]:
    """Why the launcher started one process only, and which config starts several here."""
    import torch

    lines = [f"{config['distributed_type']} starts one process, whatever num_processes says."]
    if promise.device != "cpu" and torch.accelerator.device_count() >= promise.processes:
        return [
            *lines,
            "Fix: use distributed_type: MULTI_GPU, as in accelerate_configs/multi_gpu.yaml",
        ]
    return [
        *lines,
        'Fix: use distributed_type: MULTI_GPU with gpu_ids: "-1,-1",',
        "as in accelerate_configs/cpu_two_processes.yaml",
    ]


def device_fix(promise: Promise, processes: int, device: str) -> list[str]:
    """Why the processes are on another device than promised, and what to do about it."""
    import torch

    kind = device.split(":")[0]
    if promise.device == "cpu":
        return [
            f"The processes are on {kind}: MULTI_GPU does not tell them use_cpu.",
            'Fix: add gpu_ids: "-1,-1", as in accelerate_configs/cpu_two_processes.yaml',
        ]
    needed, here = count_of(promise.processes), count_of(torch.accelerator.device_count())
    file = "cpu_two_processes.yaml" if promise.processes > 1 else "cpu.yaml"
    return [
        f"Each process needs a GPU of its own. Needed: {needed}; here: {here}.",
        f"So it runs as {counted(processes, f'{kind} process')}.",
        f"Fix: use accelerate_configs/{file}, or a machine with {needed}.",
    ]


def count_of(gpus: int) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")


def print_rows(title: str, rows: list[tuple]) -> None:
    """A title, and the rows below it in aligned columns, with an empty line behind."""
    print(title)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print(("  " + "  ".join(cells)).rstrip())
    print()


class LaunchFailed(Exception):
    """The launcher ended with an error, or not at all."""


def launch_probe(path: Path, seconds: float = 120) -> list[dict]:
    """What each process of the launch says of itself, in the order of their ranks.

    Raises `LaunchFailed` where the launch goes wrong or takes longer than `seconds`. In the end
    nothing that was started is left.
    """
    command = [*LAUNCH, str(path), "-m", "accel_demo.lab.doctor.probe"]
    ended = run_to_end(command, seconds, environment=dict(os.environ), cwd=Path.cwd())
    if ended.returncode is None:
        raise LaunchFailed(f"no answer within {seconds} seconds; all it had started is stopped")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("PROBE ")]
    answers = [json.loads(line.removeprefix("PROBE ")) for line in lines]
    if ended.returncode != 0 or not answers:
        raise LaunchFailed(cause_in(ended.stderr) or "the probe ended without an answer")
    return sorted(answers, key=lambda answer: answer["rank"])


def cause_in(stderr: str) -> str:
    """The last line that names an error of the program, not the launcher's report around it."""
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line).rstrip() for line in stderr.splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    report = ("CalledProcessError", "ChildFailedError")
    named = [
        line
        for line in lines
        if re.match(r"[\w.]*(error|Error|Exception): ", line)
        and not any(name in line for name in report)
    ]
    return (named or lines or [""])[-1]
