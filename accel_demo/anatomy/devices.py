"""Report this machine's GPUs and the processes on them, or explain CUDA_VISIBLE_DEVICES.

python -m accel_demo.anatomy.devices                  # report on this machine
python -m accel_demo.anatomy.devices --visible 0,4    # explain 0,4 on a machine with 8 GPUs
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import psutil

from accel_demo import show
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.launch import STARTER, start
from accel_demo.wording import byte_size

CHILD = """import psutil, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(psutil.Process().memory_full_info().uss)"""  # uss: memory not shared with other processes

# In the picture a GPU is 1 unit wide, and an id is 2 units wide, to leave room for its text.
INCHES = 0.75  # per unit


def visible_devices(visible: str | None, physical: int | Sequence[str]) -> dict[str, int | str]:
    """Return the GPU behind each `cuda:N` for a value of CUDA_VISIBLE_DEVICES.

    >>> visible_devices("0,4", physical=8)
    {'cuda:0': 0, 'cuda:1': 4}

    `visible` is None if the variable is not set. `physical` is the number of GPUs in the machine,
    or a list of their UUIDs. If `physical` is a number, UUIDs are returned as written. An id that
    starts with "MIG-" is always returned as written. Raises `ValueError` if `physical` is invalid.

    NVIDIA documents how CUDA reads numbers and abbreviated UUIDs, that an invalid number hides all
    ids after it, and that CUDA uses a single MIG instance. The other rules follow torch's
    `_parse_visible_devices`, which was tested against a driver (pytorch#92315): a repeated id hides
    all GPUs; the first id decides whether all ids are numbers or UUIDs; `1st` is read as 1; spaces
    may surround a number, but not a UUID. torch differs from this function in one case: if an id is
    repeated after an invalid number ("0,9,0"), torch returns no GPU, because it does not know the
    number of GPUs yet.
    https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
    """
    uuids = None if isinstance(physical, int) else list(physical)
    count = physical if isinstance(physical, int) else len(physical)
    if count < 0 or (uuids and (len(set(uuids)) < count or "" in uuids)):
        raise ValueError(f"physical must be a number of GPUs or their UUIDs, got {physical!r}")
    if visible is None:
        return {f"cuda:{gpu}": gpu for gpu in range(count)}
    if visible.startswith("MIG-"):
        return {"cuda:0": visible.split(",")[0]}
    gpus: list[int | str] = []
    for written in visible.split(","):
        if visible.startswith("GPU-"):
            gpu = _gpu_with_uuid(written, uuids)
        else:
            gpu = _gpu_with_number(written, count)
        if gpu is None:
            break
        if gpu in gpus:
            return {}
        gpus.append(gpu)
    return {f"cuda:{index}": gpu for index, gpu in enumerate(gpus)}


def _gpu_with_number(written: str, count: int) -> int | None:
    number = re.match(r"\s*([+-]?[0-9]+)", written)  # text after the digits is ignored
    return int(number[1]) if number and 0 <= int(number[1]) < count else None


def _gpu_with_uuid(written: str, uuids: list[str] | None) -> int | str | None:
    if uuids is None or not written.startswith("GPU-"):
        return written if written.startswith("GPU-") else None
    matching = [number for number, uuid in enumerate(uuids) if uuid.startswith(written)]
    return matching[0] if len(matching) == 1 else None


def machine_rows() -> list[tuple[str, str]]:
    """Return (property, value) rows for cores, memory, torch's accelerators, and all GPUs."""
    import torch  # imported here because it is slow, and `--visible` does not need it

    memory, torch_names = psutil.virtual_memory(), {}
    rows = [("cores usable", str(usable_cores()))]
    rows.append(("memory", f"{byte_size(memory.available)} of {byte_size(memory.total)} available"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"):
        rows.append((name, os.environ.get(name, "not set") or "empty"))
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    physical = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), 64)  # like torch, assume 64
    for index in range(torch.accelerator.device_count()):
        name = f"{kind}:{index}"
        description = "in the machine's memory" if kind.type == "mps" else "usable"
        if kind.type == "cuda":
            gpu = torch.cuda.get_device_properties(index)
            gpu_id = physical.get(name, "unknown")
            description = f"{gpu.name}, {byte_size(gpu.total_memory)}, id {gpu_id}"
            torch_names[f"GPU-{gpu.uuid}"] = name
        rows.append((name, description))
    if torch.accelerator.device_count() == 0:
        rows.append(("accelerator", "none that torch can use, so it computes on the CPU"))
    try:
        import pynvml  # pyright: ignore[reportMissingImports] (nvidia-ml-py may be missing)
    except ImportError:
        return [*rows, ("GPU processes", "unknown: pip install nvidia-ml-py")]
    try:
        return rows + nvml_rows(pynvml, torch_names)
    except pynvml.NVMLError as error:
        return [*rows, ("GPU processes", f"unknown: no NVIDIA driver responds ({error})")]


def nvml_rows(nvml, torch_names: dict[str, str]) -> list[tuple[str, str]]:
    """Return all GPUs and the processes that compute on them, as `nvidia-smi` lists them.

    `nvml` is the module `pynvml`. NVML ignores CUDA_VISIBLE_DEVICES, so `torch_names` maps the
    UUIDs of the GPUs to their names in torch. In a container, NVML may return the host's process
    ids, and the process names may be missing.
    """

    def query(function: str, *arguments):
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError:  # not supported by this GPU or driver, or not permitted
            return None

    rows = []
    nvml.nvmlInit()
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            gpu = query("nvmlDeviceGetHandleByIndex", number)
            if gpu is None:
                rows.append((f"GPU {number}", "does not respond and may be lost"))
                continue
            name = query("nvmlDeviceGetName", gpu) or "unknown name"
            uuid, memory = query("nvmlDeviceGetUUID", gpu), query("nvmlDeviceGetMemoryInfo", gpu)
            used = f"{byte_size(memory.used)} of {byte_size(memory.total)} used" if memory else ""
            rows.append((f"GPU {number}", f"{name}, {used or 'unknown memory'}"))
            torch_name = f"{torch_names.get(str(uuid), 'hidden')} here, {uuid}"
            rows.append(
                ("", torch_name if uuid else "unknown UUID, so its name in torch is unknown")
            )
            processes = query("nvmlDeviceGetComputeRunningProcesses", gpu)
            for process in processes or []:
                name = query("nvmlSystemGetProcessName", process.pid) or "unknown name"
                used = process.usedGpuMemory
                size = "unknown memory" if used is None else byte_size(used)
                rows.append(("", f"process {process.pid}, {name[-40:]}: {size}"))
            if not processes:
                rows.append(("", "unknown processes" if processes is None else "no process"))
    finally:
        nvml.nvmlShutdown()
    return rows or [("GPU", "NVML responds, but lists no GPU")]


def gloo_rows() -> list[tuple[str, str]]:
    """Return how many gloo processes fit into this machine's cores and memory.

    This function starts a process without a model, and measures how much memory it takes.
    """
    on_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    on_cpu.pop(STARTER, None)  # started normally, because the measured memory is not to be shared
    child = start([sys.executable, "-c", CHILD], on_cpu, PIPE, None, cwd=Path.cwd())
    each = int(child.communicate()[0])
    room = psutil.virtual_memory().available // each
    memory = f"each takes {byte_size(each)} before it has a model: memory for {room}"
    return [("gloo processes", f"{min(usable_cores(), room)} fit, one core each; {memory}")]


def usable_cores() -> int:
    """Return the number of cores this process may use. The machine may have more."""
    if hasattr(os, "sched_getaffinity"):  # missing on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(__doc__, plot=True)
    help = "explain this value of CUDA_VISIBLE_DEVICES; may be given several times"
    parser.add_argument("--visible", metavar="IDS", action="append", help=help)
    help = "how many GPUs the machine has, for --visible"
    parser.add_option("--physical", 8, help, least=1, most=16)
    options = parser.parse_args(arguments)
    if options.plot and options.visible is None:
        raise UserError("--plot needs --visible. Add some ids, for example --visible 0,4.")
    if options.visible is None:
        print(show.table(["property", "value"], [*machine_rows(), *gloo_rows()]))
        return
    for value in options.visible if options.plot else []:
        check_drawable(value)
    rows = []
    for value in options.visible:
        visible = visible_devices(value, options.physical)
        gpus = ", ".join(f"{name}: {gpu}" for name, gpu in visible.items())
        rows.append([value, len(visible), gpus])
    print(show.table(["CUDA_VISIBLE_DEVICES", "visible", "PyTorch's device: the GPU"], rows))
    if options.plot:
        draw_map(options.visible, options.physical, options.plot)


def check_drawable(value: str) -> None:
    """Raise `UserError` for a value of CUDA_VISIBLE_DEVICES that `draw_map` cannot show."""
    ids = _ids(value)
    if not all(re.fullmatch(r"\s*[+-]?[0-9]+\s*", written) for written in ids):
        raise UserError(f"--plot draws numbers only, got {value!r}")
    if len(set(map(int, ids))) < len(ids):
        raise UserError("--plot draws each number only once. Remove the repeated number.")
    if len(ids) > 16:
        raise UserError(f"--plot draws up to 16 ids, got {len(ids)}")


def draw_map(values: list[str], physical: int, file: Path) -> None:
    """For each value, draw the machine's GPUs, the ids as written, and PyTorch's devices."""
    left = -1.9
    right = max(physical - 0.4, 1.5, *(2 * len(_ids(value)) - 0.1 for value in values))
    figure = show.new_figure(INCHES * (right - left), 2.7 * len(values))
    for row, value in enumerate(values, start=1):
        axes = figure.add_subplot(len(values), 1, row, xlim=(left, right), ylim=(-0.45, 2.95))
        _draw_one_map(axes, left, value, physical)
    show.save(figure, file)


def _draw_one_map(axes, left: float, value: str, physical: int) -> None:
    devices, written = visible_devices(value, physical), _ids(value)
    colors, red, gray = [show.COLORS[0], show.COLORS[2], show.COLORS[4]], "#d55e00", "#707070"
    places = {gpu: place for place, gpu in enumerate(devices.values())}
    axes.axis("off")
    shown = value if written else "(empty)"
    axes.text(left, 2.8, f"CUDA_VISIBLE_DEVICES={shown}", va="center", fontsize=10, weight="bold")
    for y, level in enumerate(["PyTorch", "variable", "machine"]):
        axes.text(left, y, level, va="center", fontsize=10)

    def box(x: int, y: int, text: str, color: str) -> None:
        frame = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": color}
        axes.text(x, y, text, ha="center", va="center", color=color, fontsize=10, bbox=frame)

    for gpu in range(physical):
        box(gpu, 2, f"GPU {gpu}", colors[places[gpu] % 3] if gpu in places else gray)
    for place, gpu_id in enumerate(written):
        x = 1 + 2 * place
        if place < len(devices):
            gpu, color = devices[f"cuda:{place}"], colors[place % 3]
            axes.plot([gpu, gpu, x, x], [2, 1.8, 1.2, 0], color=color, zorder=0)
            box(x, 0, f"cuda:{place}", color)
        else:
            color = red if place == len(devices) else gray
            reason = f"no GPU {gpu_id}" if place == len(devices) else "hidden"
            axes.text(x, 0.55, reason, ha="center", color=color, fontsize=10)
            for gpu in visible_devices(gpu_id, physical).values():  # if it were the only id
                axes.plot([gpu, gpu, x, x], [2, 1.8, 1.2, 1], ":", color=color, zorder=0)
        box(x, 1, gpu_id, color)
    if not written:
        axes.text(0, 0, "none visible", va="center", color=red, fontsize=10)


def _ids(value: str) -> list[str]:
    return value.split(",") if value.strip() else []


if __name__ == "__main__":
    with one_line_errors():
        main()
