"""Start 91_old.py, repair what stops it, start it again, and so on, until it works.

python tutorials/91_failures.py

Each start launches two processes on the CPU, in a temporary folder with 40 images. To be quick, the
script trains a ResNet-18 instead of a ResNet-101, and for one epoch only. Lines added at its end
count the connected processes and disconnect them. The rest is 91_old.py.
"""

import difflib
import re
import runpy
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchvision import models

from accel_demo.errors import one_line_errors
from accel_demo.processes.launch import run_to_end

OLD_LAUNCHER = "python -m torch.distributed.launch --nproc_per_node=2 91_old.py"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 91_old.py"
LONGEST = 110  # characters of a message; the rest is cut off
SMALLER = {"resnet101": "resnet18", "range(10)": "range(1)"}
# Appended to the script: each process adds a 1, so the sum is the number of connected processes.
COUNT = """
total = torch.ones(1)
dist.all_reduce(total)
print(f"connected: {total.item():.0f}")
dist.destroy_process_group()
del net  # holds the last reference to the group, whose threads must end before Python does
"""


@dataclass(frozen=True)
class Start:
    """One start of the script: the edits made before it, and the command.

    `edits` maps text of the script to its replacement. If `hides_message` is true, the error
    message depends on the PyTorch build and on the machine, so only the failing line is shown.
    `afterwards` are expressions that are evaluated when the script has ended; `net` is a network
    like the script's, but not inside DDP.
    """

    title: str
    edits: dict[str, str]
    command: str = TORCHRUN
    hides_message: bool = False
    afterwards: tuple[str, ...] = ()


LOAD = 'torch.load("my_net.pth"'
OLD_PARSER = """parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0, help="supplied by the launcher")
local_rank = parser.parse_args().local_rank
"""
NEW_RANK = 'local_rank = int(os.environ["LOCAL_RANK"])\n'
REPAIRS = [  # each start keeps the edits of those above it
    Start("The command of the article", {}, OLD_LAUNCHER),
    Start("Start it with torchrun", {}, hides_message=True),
    Start("Connect with gloo", {'"nccl"': '"gloo"'}, hides_message=True),
    Start(
        "Compute on the CPU",
        {"torch.cuda.set_device(local_rank)\n": "", '"cuda", local_rank)': '"cpu")'},
    ),
    Start("Pass no devices to DDP", {", device_ids=[device], output_device=[device]": ""}),
    Start(
        "Read LOCAL_RANK",
        {"import argparse": "import os", OLD_PARSER: NEW_RANK},
        afterwards=(f"{LOAD})", f"{LOAD}, weights_only=False)"),
    ),
    Start(
        "Save a state_dict",
        {"save(net,": "save(net.state_dict(),"},
        afterwards=(f"net.load_state_dict({LOAD}))",),
    ),
    Start(
        "Save the network inside DDP",
        {"net.state_dict()": "net.module.state_dict()"},
        afterwards=(f"net.load_state_dict({LOAD}))",),
    ),
]
MISTAKES = [  # each start has all the edits above and its own
    Start("Mistake: a sampler and shuffle", {"=sampler)": "=sampler, shuffle=True)"}),
]


def main() -> None:
    script = edited(Path(__file__).with_name("91_old.py").read_text(), SMALLER)
    starts, scripts = [*REPAIRS, *MISTAKES], []  # for each start: the script before and after
    for start in starts:
        scripts.append((script, edited(script, start.edits)))
        if start in REPAIRS:
            script = scripts[-1][1]
    with ThreadPoolExecutor(2) as pool:  # two launches at a time
        results = pool.map(what_happened, starts, [after for _, after in scripts])
        for number, (start, result) in enumerate(zip(starts, results, strict=True), start=1):
            before, after = (script.splitlines() for script in scripts[number - 1])
            print(f"{number}. {start.title}")
            changes = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
            for line in changes:
                if line[0] in "-+":  # not a line number
                    print(f"   {line[0]} {line[1:]}")
            print(f"   $ {start.command}")
            for line in result:
                print(f"   > {line if len(line) <= LONGEST else line[:LONGEST] + ' …'}")
            print()


def edited(script: str, edits: dict[str, str]) -> str:
    for old, new in edits.items():
        if script.count(old) != 1:
            raise RuntimeError(f"the script must contain {old!r} exactly once")
        script = script.replace(old, new)
    return script


def what_happened(start: Start, script: str) -> list[str]:
    """Start the script in a new folder. Return what it printed, or its error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runpy.run_path(str(Path(__file__).with_name("91_small_mnist.py")))["write"](folder / "data")
        (folder / "91_old.py").write_text(script + COUNT)
        # With these variables, the launcher writes what each process prints to separate files.
        ended = run_to_end(start.command, cwd=folder, PET_REDIRECTS="3", PET_LOG_DIR="logs")
        if ended.returncode is None:
            raise RuntimeError(f"{start.title}: the time limit is over\n{ended.stderr}")
        stdout, stderr = ([file.read_text() for file in logs(folder, n)] for n in ("out", "err"))
        if ended.returncode != 0:
            return warnings(ended.stderr) + failure(stderr, script, start.hides_message)
        if [text.splitlines()[-1:] for text in stdout] != [["connected: 2"]] * 2:
            raise RuntimeError(f"{start.title}: two processes must be connected\n{stdout}")
        happened = [
            f"rank {rank} printed: {re.sub(r'loss .*', 'loss …', line)}"
            for rank, text in enumerate(stdout)
            for line in text.splitlines()[:-1]
        ]
        for expression in start.afterwards:
            happened += [f">>> {expression}", *evaluated(expression, folder / "my_net.pth")]
        return happened


def logs(folder: Path, kind: str) -> list[Path]:
    """Return the files with what the processes printed, by rank. `kind` is "out" or "err"."""
    return sorted(folder.glob(f"logs/*/attempt_0/*/std{kind}.log"))


def warnings(stderr: str) -> list[str]:
    """Return the beginning of the launcher's warning, if there is one."""
    return [" ".join(text.split()) for text in re.findall(r"FutureWarning: .*\n.*", stderr)]


def failure(stderr: list[str], script: str, hides_message: bool) -> list[str]:
    """Return the failing line of the script and the error message, from all processes.

    The launcher stops the other process when one has failed, so one of them or both have printed
    the error. It is returned once, without the number of the process.
    """
    text = re.sub(r"^\[rank\d\]: ", "", "\n".join(stderr), flags=re.MULTILINE)
    text = re.sub(r"(local-rank=|device_ids \[)\d", r"\1…", text)
    numbers = set(re.findall(r'91_old.py", line (\d+), in <module>', text))
    messages = set(re.findall(r"^(?:\w+Error: .+|91_old.py: error: .+)", text, re.MULTILINE))
    if len(numbers) > 1 or len(messages) != 1:
        raise RuntimeError(f"expected one error, got {messages} in lines {numbers}\n{text}")
    stopped = [f"stopped at: {script.splitlines()[int(number) - 1]}" for number in numbers]
    return stopped + ([] if hides_message else list(messages))


def evaluated(expression: str, file: Path) -> list[str]:
    """Return the value of the expression, or the error message without its long explanations."""
    net = models.resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    try:
        code = expression.replace("my_net.pth", str(file))
        return [str(eval(code, {"torch": torch, "net": net}))]
    except Exception as error:
        text = re.sub(r"\x1b\[\d*m", "", f"{type(error).__name__}: {error}")  # without colors
    first, *others = [line.strip() for line in text.splitlines()]
    return [first, *(line for line in others if re.search(r"rror: |key\(s\) in", line))]


if __name__ == "__main__":
    with one_line_errors():
        main()
