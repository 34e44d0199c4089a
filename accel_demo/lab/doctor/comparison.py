"""Compare what a launch config promises with what its processes report, and suggest fixes."""

from pathlib import Path

from accel_demo.lab.doctor.launch_config import (
    ProbeAnswer,
    Promise,
    starts_several,
    type_of,
)
from accel_demo.lab.doctor.notes import has_enough_gpus, parallelism_of
from accel_demo.show import table
from accel_demo.terminal import display
from accel_demo.wording import counted

SETTINGS_FIX = [
    "The processes did not receive the launcher's settings.",
    "Fix: unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, and in your script write",
    "Accelerator(cpu=use_cpu()), as in accel_demo/train.py.",
]
DTYPE_FIX = [
    "This device does not compute in the dtype that mixed_precision selects. On a CPU, Accelerate",
    "silently replaces fp16 with float32. Fix: use bf16, which works on a CPU, or another device.",
]
ROWS = ["processes", "connected", "backend", "device", "dtype", "kind"]


def promised_cells(promise: Promise, processes: int = 0) -> list[str]:
    """Return the cells of the "promised" column, one for each of `ROWS`.

    `processes` is their number on all machines, if there are several.
    """
    several = (processes or promise.processes) > 1
    connected = f"all {processes}" if processes else "yes" if several else "alone"
    device = device_words(promise.device, promise.processes, promise.processes)
    kind = kind_words(promise.kind, several and promise.kind.startswith("FSDP"))
    return [str(promise.processes), connected, promise.backend, device, promise.dtype, kind]


def obtained_cells(
    answers: list[ProbeAnswer], everyone: list[ProbeAnswer] | None = None
) -> list[str]:
    """Return the cells of the "obtained" column, one for each of `ROWS`.

    `everyone` contains the answers from all machines, if there are several.
    """
    devices = {answer.device for answer in answers}
    kinds = ", ".join(sorted({device.split(":")[0] for device in devices}))
    backends = ", ".join(sorted({answer.backend for answer in answers}))
    dtypes = ", ".join(sorted({answer.dtype for answer in answers}))
    device = device_words(kinds, len(answers), len(devices))
    distributions = {kind_words(answer.kind, answer.is_sharded) for answer in answers}
    kind = " and ".join(sorted(distributions))
    connected = connection_of(everyone or answers)
    if everyone and connected == "yes":
        connected = f"all {len(everyone)}"
    return [str(len(answers)), connected, backends, device, dtypes, kind]


def print_comparison(
    path: Path, columns: list[str], promised: list[str], obtained: dict[int, list[str]]
) -> dict[int, list[str]]:
    """Print a table of the cells, and whether they are as promised.

    `obtained` has one entry for each machine. Return the names of the rows that are different, by
    machine, or an empty dict if there are none.
    """
    rows = list(zip(ROWS, promised, *obtained.values(), strict=True))
    display(f"{path}\n\n{table(columns, rows)}\n")
    different = {
        machine: [row[0] for row, cell in zip(rows, cells, strict=True) if cell != row[1]]
        for machine, cells in obtained.items()
    }
    if any(different.values()):
        return different
    display("Everything is as promised.")
    return {}


def kind_words(kind: str, is_sharded: bool) -> str:
    """Return the kind of distribution, and whether each process holds the whole model."""
    if kind in ("none", "DeepSpeed"):  # with DeepSpeed, it depends on the ZeRO stage
        return kind
    return f"{kind}, {'sharded' if is_sharded else 'whole'} model"


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
    connection = ("processes", "connected", "backend", "kind")
    causes: list[tuple[tuple[str, ...], list[str]]] = []
    if promise.processes > 1 and not starts_several(config):
        causes.append((connection, processes_fix(config, promise)))
    elif "kind" in different and promise.kind not in ("DDP", "none"):
        causes.append((("kind", "device", "backend"), kind_fix(promise)))
    if "device" in different:
        kind = answers[0].device.split(":")[0]
        causes.append((("device", "backend"), device_fix(promise, len(answers), kind)))
    unexplained, explanations = set(different), []
    for names, lines in [*causes, (connection, SETTINGS_FIX), (("dtype",), DTYPE_FIX)]:
        if explained := [name for name in names if name in unexplained]:
            unexplained.difference_update(explained)
            explanations.append((explained, lines))
    return explanations


def processes_fix(config: dict, promise: Promise) -> list[str]:
    """Explain why the launcher started only one process, and how to start several."""
    import torch

    reason = f"{type_of(config)} starts only one process and ignores num_processes."
    if promise.device != "cpu" and torch.accelerator.device_count() >= promise.processes:
        fix = "Fix: use distributed_type: MULTI_GPU, as in accelerate_configs/multi_gpu.yaml"
        return [reason, fix]
    fix = 'Fix: use distributed_type: MULTI_GPU with gpu_ids: "-1,-1",'
    return [reason, fix, f"as in accelerate_configs/{cpu_config(promise)}"]


def failure_fix(config: dict, promise: Promise) -> list[str]:
    """Explain why a launch may have failed, and suggest a fix. The list is empty if we don't know.

    Without a GPU for each process, Accelerate raises an error that does not mention GPUs.
    """
    parallelism = parallelism_of(config)
    sharding = [promise.kind] if promise.kind.startswith("FSDP") else []
    if has_enough_gpus(config) or not (names := parallelism + sharding):
        return []
    needed = count_of(promise.processes // promise.machines)
    return [
        f"  {names[0]} needs a GPU for each process: use a machine with {needed}.",
        f"  To try the script on CPUs, use a config like accelerate_configs/{cpu_config(promise)}",
    ]


def plain_words(answers: list[ProbeAnswer], plain: list[ProbeAnswer] | str) -> list[str]:
    """Return lines about the differences between the probe and a plain `Accelerator()`.

    `plain` contains the answers of a probe that created one, or why its launch failed, in one line.
    """
    created = "The test program creates Accelerator(cpu=use_cpu()), as accel_demo/train.py does."
    if isinstance(plain, str):
        cells = [plain]
    else:
        rows = zip(ROWS, obtained_cells(answers), obtained_cells(plain), strict=True)
        cells = [f"{name}: {cell}" for name, obtained, cell in rows if cell != obtained]
    if not cells:
        return [created, "A plain Accelerator() gets the same."]
    return [
        created,
        "A plain Accelerator() obtains different values:",
        *(f"  {cell}" for cell in cells),
        "  Fix, for CPUs: set the environment variable ACCELERATE_USE_CPU=true.",
    ]


def kind_fix(promise: Promise) -> list[str]:
    """Explain why the model is not sharded, and suggest a fix."""
    return [
        f"Without a GPU for each process, Accelerate silently replaces {promise.kind} with DDP.",
        "Then each process holds the whole model, and accel_demo/train.py refuses to start.",
        f"Fix: use a machine with {count_of(promise.processes)}, or distributed_type: MULTI_GPU,",
        f"as in accelerate_configs/{cpu_config(promise)}",
    ]


def device_fix(promise: Promise, processes: int, kind: str) -> list[str]:
    """Explain why the processes run on `kind` and not on the promised device, and suggest a fix."""
    import torch

    if promise.device == "cpu":
        return [
            f"The processes run on {kind}, because MULTI_GPU does not pass use_cpu to them.",
            f'Fix: add gpu_ids: "-1,-1", as in accelerate_configs/{cpu_config(promise)}',
        ]
    needed, here = count_of(promise.processes), count_of(torch.accelerator.device_count())
    return [
        f"Each process needs its own GPU: {needed} in total, but this machine has {here}.",
        f"So the launch started {counted(processes, f'{kind} process')}.",
        f"Fix: use accelerate_configs/{cpu_config(promise)}, or a machine with {needed}.",
    ]


def cpu_config(promise: Promise) -> str:
    """Return the launch config with which these processes would run on the CPU."""
    if promise.machines > 1:
        return "multi_node_cpu.yaml"
    return "cpu_two_processes.yaml" if promise.processes > 1 else "cpu.yaml"


def count_of(gpus: int) -> str:
    return counted(gpus, "GPU") if gpus else "no GPU"
