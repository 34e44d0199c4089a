"""Which GPU is which, what this machine has, and who uses it.

python -m accel_demo.anatomy.devices                  # a report of this machine
python -m accel_demo.anatomy.devices --visible 0,4    # what that means on a machine with 8 GPUs
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil  # torch is imported where it is needed: the map does without

from accel_demo import show
from accel_demo.anatomy.flags import command_line, read
from accel_demo.errors import UserError, one_line_errors

CHILD = """import psutil, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(psutil.Process().memory_full_info().uss)"""  # what the process shares with no other

# In the picture, one unit of x is a GPU of the machine; two are an id, whose words have to fit in.
INCHES = 0.75  # per unit
UNITS_PER_LETTER = 0.12  # what a digit takes at 10 pt, the widest that an id has


def visible_devices(visible: str | None, physical: int | Sequence[str]) -> dict[str, int | str]:
    """Which GPU of the machine each `cuda:N` is, under this value of CUDA_VISIBLE_DEVICES.

    >>> visible_devices("0,4", physical=8)
    {'cuda:0': 0, 'cuda:1': 4}

    `visible` is None where the variable is not set. `physical` is how many GPUs the machine has, or
    their UUIDs. With a number alone, a UUID is passed through as it is written; "MIG-…" always is.
    Raises `ValueError` where `physical` cannot be right.

    NVIDIA's page has the rules for numbers and for the beginnings of UUIDs, says that what follows
    an invalid number is hidden, and that CUDA takes a single MIG instance. What it leaves open is
    here as in torch's `_parse_visible_devices`, which was tested against a driver (pytorch#92315):
    an id that comes twice leaves no GPU; the first id decides between numbers and UUIDs; `1st` is
    read as 1; blanks may stand around a number, but not around a UUID. torch differs where an id
    comes again behind one that no GPU has ("0,9,0"): not knowing the GPUs yet, it leaves none.
    https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
    """
    if isinstance(physical, int):
        uuids, count = None, physical
    else:
        uuids, count = list(physical), len(physical)
    if count < 0 or (uuids and (len(set(uuids)) < count or "" in uuids)):
        raise ValueError(f"physical must be a number of GPUs or their UUIDs, got {physical!r}")
    if visible is None:
        return {f"cuda:{gpu}": gpu for gpu in range(count)}
    if visible.startswith("MIG-"):
        return {"cuda:0": visible.split(",")[0]}
    found = []
    for written in visible.split(","):
        if visible.startswith("GPU-"):
            gpu = _gpu_with_uuid(written, uuids)
        else:
            gpu = _gpu_with_number(written, count)
        if gpu is None:
            break
        if gpu in found:
            return {}
        found.append(gpu)
    return {f"cuda:{index}": gpu for index, gpu in enumerate(found)}


def _gpu_with_number(written: str, count: int) -> int | None:
    number = re.match(r"\s*([+-]?[0-9]+)", written)  # what follows the digits is not read
    return int(number[1]) if number and 0 <= int(number[1]) < count else None


def _gpu_with_uuid(written: str, uuids: list[str] | None) -> int | str | None:
    if uuids is None or not written.startswith("GPU-"):
        return written if written.startswith("GPU-") else None
    matching = [number for number, uuid in enumerate(uuids) if uuid.startswith(written)]
    return matching[0] if len(matching) == 1 else None


def cuda_order(bus_ids: list[str], speeds: list[float], order: str = "FASTEST_FIRST") -> list[int]:
    """The GPUs (places in these lists) as CUDA numbers them, before CUDA_VISIBLE_DEVICES.

    `order` is the value of CUDA_DEVICE_ORDER: FASTEST_FIRST, its default, or PCI_BUS_ID, ascending.
    How CUDA judges the speed ("a simple heuristic") and what it does with equals is not documented:
    here `speeds` say it, and equals stay in the order of the bus. Source: as `visible_devices`.
    """
    if order not in ("FASTEST_FIRST", "PCI_BUS_ID"):
        raise ValueError(f"order must be FASTEST_FIRST or PCI_BUS_ID, got {order!r}")
    places = [[int(part, 16) for part in re.split("[:.]", bus_id)] for bus_id in bus_ids]
    by_bus = sorted(range(len(bus_ids)), key=lambda gpu: places[gpu])
    return by_bus if order == "PCI_BUS_ID" else sorted(by_bus, key=lambda gpu: -speeds[gpu])


def machine_rows() -> list[tuple[str, str]]:
    """Cores, memory, every accelerator torch can use, and every GPU: name and value, to print."""
    import torch

    memory, ids = psutil.virtual_memory(), {}
    rows = [("cores usable", str(usable_cores()))]
    rows.append(("memory", f"{gibibytes(memory.available)} of {gibibytes(memory.total)} available"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"):
        rows.append((name, os.environ.get(name, "not set") or "empty"))
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    physical = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), 64)  # 64: as torch assumes
    for index in range(torch.accelerator.device_count()):
        name = f"{kind}:{index}"
        here = "in the machine's memory" if kind.type == "mps" else "usable"
        if kind.type == "cuda":
            gpu = torch.cuda.get_device_properties(index)
            here = f"{gpu.name}, {gibibytes(gpu.total_memory)}, id {physical.get(name, 'unknown')}"
            ids[f"GPU-{gpu.uuid}"] = name
        rows.append((name, here))
    if torch.accelerator.device_count() == 0:
        rows.append(("accelerator", "none that torch can use: it computes on the CPU"))
    try:
        import pynvml  # pyright: ignore[reportMissingImports] (nvidia-ml-py may be missing)
    except ImportError:
        return [*rows, ("who uses GPUs", "not known: pip install nvidia-ml-py")]
    try:
        return rows + nvml_rows(pynvml, ids)
    except pynvml.NVMLError as error:
        return [*rows, ("who uses GPUs", f"not known: no NVIDIA driver answers ({error})")]


def nvml_rows(nvml, ids: dict[str, str]) -> list[tuple[str, str]]:
    """All GPUs and the processes that compute on them, numbered and seen as by `nvidia-smi`.

    `nvml` is the module `pynvml`; `ids` has what torch calls a GPU, by UUID: CUDA_VISIBLE_DEVICES
    means nothing to NVML. Inside a container the pids may be those of the host, without a name.
    """

    def ask(question: str, *about):
        try:
            return getattr(nvml, question)(*about)
        except nvml.NVMLError:  # not every GPU, driver and user can be told everything
            return None

    rows = []
    nvml.nvmlInit()
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            gpu = ask("nvmlDeviceGetHandleByIndex", number)
            if gpu is None:
                rows.append((f"GPU {number}", "does not answer: it may be lost"))
                continue
            name = ask("nvmlDeviceGetName", gpu) or "name not told"
            uuid, memory = ask("nvmlDeviceGetUUID", gpu), ask("nvmlDeviceGetMemoryInfo", gpu)
            total = f" of {gibibytes(memory.total)}" if memory else ""
            used = gibibytes(memory and memory.used)
            rows.append((f"GPU {number}", f"{name}, {used}{total} used"))
            here = f"{ids.get(str(uuid), 'hidden')} here, {uuid}"
            rows.append(("", here if uuid else "UUID not told: not known which it is here"))
            users = ask("nvmlDeviceGetComputeRunningProcesses", gpu)
            for user in users or []:
                name = ask("nvmlSystemGetProcessName", user.pid) or "name not told"
                used = gibibytes(user.usedGpuMemory)
                rows.append(("", f"process {user.pid}, {name[-40:]}: {used}"))
            if not users:
                rows.append(("", "not told who uses it" if users is None else "nobody uses it"))
    finally:
        nvml.nvmlShutdown()
    return rows or [("GPU", "NVML answers, and knows of none")]


def gloo_rows() -> list[tuple[str, str]]:
    """How many processes connected by gloo this machine has cores and memory for.

    The memory each takes is that of one, started to be measured, that has no model yet.
    """
    on_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    each = int(subprocess.check_output([sys.executable, "-c", CHILD], env=on_cpu))
    room = psutil.virtual_memory().available // each
    memory = f"each takes {gibibytes(each)} before it has a model: memory for {room}"
    return [("gloo processes", f"{min(usable_cores(), room)} fit, a core each; {memory}")]


def usable_cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gibibytes(number_of_bytes: int | None) -> str:
    return "memory not told" if number_of_bytes is None else f"{number_of_bytes / 2**30:.1f} GiB"


def print_map(values: list[str], physical: int) -> None:
    """Which GPU each device of PyTorch is, for each value of CUDA_VISIBLE_DEVICES."""
    maps = [visible_devices(value, physical) for value in values]
    words = [", ".join(f"{name}: {gpu}" for name, gpu in one.items()) for one in maps]
    head = ["CUDA_VISIBLE_DEVICES", "visible", "PyTorch's device: the GPU"]
    print(show.table(head, [list(row) for row in zip(values, map(len, maps), words, strict=True)]))


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    help = "a value of CUDA_VISIBLE_DEVICES to explain instead; may come several times"
    parser.add_argument("--visible", metavar="IDS", action="append", help=help)
    help = "how many GPUs the machine is to have, for --visible (default: 8)"
    parser.add_argument("--physical", metavar="N", type=int, default=8, help=help)
    options = read(parser, arguments)
    if options.plot and options.visible is None:
        raise UserError("--plot draws what --visible asks for: name some ids, as in 0,4")
    if options.visible is None:
        print(show.table(["what", "here"], [*machine_rows(), *gloo_rows()]))
        return
    if options.physical not in range(1, 17):
        raise UserError(f"--physical must be from 1 to 16, got {options.physical}")
    for value in options.visible if options.plot else []:
        check_drawable(value)
    print_map(options.visible, options.physical)
    if options.plot:
        draw_map(options.visible, options.physical, options.plot)


def check_drawable(value: str) -> None:
    """Raise `UserError` for a value of CUDA_VISIBLE_DEVICES that `draw_map` cannot show."""
    ids = _ids(value)
    if not all(re.fullmatch(r"\s*[+-]?[0-9]+\s*", written) for written in ids):
        raise UserError(f"--plot draws numbers only, got {value!r}")
    if len(set(map(int, ids))) < len(ids):
        raise UserError("--plot draws numbers that come once: leave out what comes twice")
    if len(ids) > 16:
        raise UserError(f"--plot draws up to 16 ids, got {len(ids)}")


def draw_map(values: list[str], physical: int, file: Path) -> None:
    """For each value: the machine's GPUs, the ids as written, PyTorch's devices."""
    left = min(-2.7, *(0.1 - UNITS_PER_LETTER * len(f"= {value}") for value in values))
    right = max(physical - 0.4, 1.5, *(2 * len(_ids(value)) - 0.1 for value in values))
    figure = show.new_figure(INCHES * (right - left), 2.5 * len(values))
    for row, value in enumerate(values, start=1):
        axes = figure.add_subplot(len(values), 1, row, xlim=(left, right), ylim=(-0.45, 2.45))
        _draw_one_map(axes, left, value, physical)
    show.save(figure, file)


def _draw_one_map(axes, left: float, value: str, physical: int) -> None:
    found, written = visible_devices(value, physical), _ids(value)
    colours, red, grey = [show.COLOURS[0], show.COLOURS[2], show.COLOURS[4]], "#d55e00", "#707070"
    places = {gpu: place for place, gpu in enumerate(found.values())}
    axes.axis("off")
    shown = value if written else "(empty)"
    levels = ["PyTorch's devices", f"CUDA_VISIBLE_DEVICES\n= {shown}", "the machine's GPUs"]
    for y, level in enumerate(levels):
        axes.text(left, y, level, va="center", fontsize=10)

    def box(x: int, y: int, text: str, colour: str) -> None:
        frame = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour}
        axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=10, bbox=frame)

    for gpu in range(physical):
        box(gpu, 2, f"GPU {gpu}", colours[places[gpu] % 3] if gpu in places else grey)
    for place, word in enumerate(written):
        x = 1 + 2 * place
        if place < len(found):
            gpu, colour = found[f"cuda:{place}"], colours[place % 3]
            axes.plot([gpu, gpu, x, x], [2, 1.8, 1.2, 0], color=colour, zorder=0)
            box(x, 0, f"cuda:{place}", colour)
        else:
            colour = red if place == len(found) else grey
            says = f"no GPU for {word}" if place == len(found) else "so this is hidden"
            axes.text(x, 0.5, says, ha="center", color=colour, fontsize=10)
        box(x, 1, word, colour)
    if not written:
        axes.text(0, 0, "none visible", va="center", color=red, fontsize=10)


def _ids(value: str) -> list[str]:
    return value.split(",") if value.strip() else []


if __name__ == "__main__":
    with one_line_errors():
        main()
