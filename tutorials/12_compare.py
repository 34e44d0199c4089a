"""Train with 12_plain.py, 12_accelerate.py and 12_ddp.py, and compare what they have saved.

python tutorials/12_compare.py

Four wrong scripts are trained as well: 12_plain.py with nothing but DDP's wrapper and sampler, the
same with a divided batch, and 12_accelerate.py with two wrong schedules. Each process of the first
two has its own folder, so that rank 0's files can be compared.
"""

import csv
import math
import os
import runpy
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from accel_demo import show
from accel_demo.data import packaged_set
from accel_demo.errors import one_line_errors
from accel_demo.processes.launch import run_to_end

TUTORIALS = Path(__file__).parent
SEEDS = range(5)
STUDENT_T = 2.3  # for 95 %, with 2 · 5 - 2 degrees of freedom
CONFIGS = {1: "accelerate_configs/cpu.yaml", 2: "accelerate_configs/cpu_two_processes.yaml"}
ONLY_WRAPPED = {
    "    options.folder.mkdir": "    torch.distributed.init_process_group('gloo')\n"
    "    assert torch.distributed.get_world_size() == 2\n"
    "    options.folder /= str(torch.distributed.get_rank())\n"
    "    options.folder.mkdir",
    "model = new_model()": "model = torch.nn.parallel.DistributedDataParallel(new_model())",
    "RandomSampler(train_set, generator=order)": "torch.utils.data.DistributedSampler(train_set)",
    "order.manual_seed(seed)": "sampler.set_epoch(100 * epoch)",
}
DIVIDED = ONLY_WRAPPED | {"BATCH_SIZE, sampler": "BATCH_SIZE // 2, sampler"}
NO_FLAG = {"        step_scheduler_with_optimizer=False,\n": ""}
BEFORE = {
    "    train_loader, test_loader = accelerator": "    length_before = len(train_loader)\n"
    "    train_loader, test_loader = accelerator",
    "len(train_loader) / ACCUMULATE": "length_before / ACCUMULATE",
}
SCRIPTS = [  # script, changes, what they are, number of processes
    ("12_accelerate.py", {}, "", 1),
    ("12_ddp.py", {}, "", 1),
    ("12_accelerate.py", {}, "", 2),
    ("12_ddp.py", {}, "", 2),
    ("12_plain.py", ONLY_WRAPPED, ", only wrapped", 2),
    ("12_plain.py", DIVIDED, ", wrapped, batch divided", 2),
    ("12_accelerate.py", NO_FLAG, " without the scheduler's flag", 2),
    ("12_accelerate.py", BEFORE, ", length from before `prepare`", 2),
]
EXACT = {  # Of what differs between the ranks, only rounding is left, which is small in float64.
    # statistics of a batch
    "nn.BatchNorm2d(8)": "nn.GroupNorm(1, 8)",
    # random numbers other than the order of the images
    "nn.Dropout(0.2)": "nn.Dropout(0.0)",
    "torch.where(is_mirrored, images.flip(-1), images)": "images",
    # float64: inputs, targets and model
    '"image": image,': '"image": image.double(),',
    "(label == 6).float()": "(label == 6).double()",
    "def main(options):": "def main(options):\n    torch.set_default_dtype(torch.float64)",
    # a short run in which all batches and steps are full
    "packaged_set(split)\n": "torch.utils.data.Subset(packaged_set(split), range(1920))\n",
    "WARM_UP = 50": "WARM_UP = 5",
}
_, LABELS = packaged_set("test")[:]
auc = runpy.run_path(str(TUTORIALS / "12_plain.py"))["auc"]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # so that every program adds in the same order
    with tempfile.TemporaryDirectory() as folder:
        compare_metrics(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        compare_weights(Path(folder))


def compare_metrics(folder: Path) -> None:
    plain, plain_scores = train_all("12_plain.py", {}, 0, SEEDS, folder / "plain")
    rows = [["`12_plain.py`", 1, "", in_words(plain_scores), "", "", ""]]
    for number, (name, changes, what, processes) in enumerate(SCRIPTS):
        seeds = SEEDS if processes == 2 else SEEDS[:1]
        own = folder / f"script-{number}"
        weights, scores = train_all(name, changes, processes, seeds, own)
        same = "equal bits" if torch.equal(weights, plain) else "different"
        cells = [""] * 4
        if processes == 2:
            difference = abs(statistics.mean(scores) - statistics.mean(plain_scores))
            variances = statistics.variance(scores) + statistics.variance(plain_scores)
            limit = STUDENT_T * math.sqrt(variances / len(SEEDS))
            is_found = "yes" if difference > limit else "no"
            cells = [in_words(scores), f"{difference:.4f}", f"{limit:.4f}", is_found]
        rows.append([f"`{name}`{what}", processes, same, *cells])
    titles = ["program", "processes", "last weights, seed 0", "best AUC of seeds 0 to 4"]
    print(show.table([*titles, "difference", "limit", "found?"], rows))


def in_words(scores: list[float]) -> str:
    """Return the mean and the standard deviation."""
    return f"{statistics.mean(scores):.4f} ± {statistics.stdev(scores):.4f}"


def train_all(
    name: str, changes: dict, processes: int, seeds: range, folder: Path
) -> tuple[torch.Tensor, list[float]]:
    """Train with each seed. Return the last weights of the first one, and the AUC of each."""
    folder.mkdir()
    weights = [
        train(name, changes, processes, folder / f"{seed}", f"--seed {seed}") for seed in seeds
    ]
    return weights[0], [score_of(folder / f"{seed}") for seed in seeds]


def compare_weights(folder: Path) -> None:
    print("\nGroupNorm, no dropout, no mirroring, 1,920 images, float64:\n")
    flags = "--epochs 2 --seed 1"  # 0 is also the default of DistributedSampler
    plain = train("12_plain.py", EXACT, 0, folder / "plain", flags)
    rows = []
    for number, (name, changes, what, processes) in enumerate(SCRIPTS):
        if processes == 2:
            weights = train(name, changes | EXACT, 2, folder / f"script-{number}", flags)
            difference = (weights - plain).abs().max().item()
            shown = "below 1e-10" if difference < 1e-10 else f"{difference:.1g}"
            rows.append([f"`{name}`{what}", processes, shown])
    print(show.table(["program, seed 1", "processes", "largest difference of a weight"], rows))


def train(name: str, changes: dict, processes: int, folder: Path, flags: str = "") -> torch.Tensor:
    """Train with a changed copy of a script, and return the last weights in one vector.

    With 0 processes, the script is started without a launcher.
    """
    text = (TUTORIALS / name).read_text()
    for old, new in changes.items():
        if old not in text:
            raise RuntimeError(f"{name} does not contain {old!r}")
        text = text.replace(old, new)
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(text)
    launcher = f"torchrun --standalone --nproc-per-node {processes}"
    if name == "12_accelerate.py":
        launcher = f"accelerate launch --config_file {CONFIGS[processes]}"
    launcher = launcher if processes else "python"
    command = f"{launcher} '{script}' {flags} --folder '{folder}'"
    run = run_to_end(command, time_limit=300, cwd=TUTORIALS.parent)
    if run.returncode:
        raise RuntimeError(f"{command} failed:\n{run.stderr}")
    return last_weights(folder)


def last_weights(folder: Path) -> torch.Tensor:
    """Return the weights of the last checkpoint, sorted by their names."""
    file = next(folder.glob("**/last.pt"), None)  # a process of a wrong script has its own folder
    state = torch.load(file)["model"] if file else load_file(folder / "last/model.safetensors")
    return torch.cat([state[name].flatten().double() for name in sorted(state)])


def score_of(folder: Path) -> float:
    """Return the AUC, computed from the IDs and logits in best.csv."""
    with open(next(folder.glob("**/best.csv")), newline="") as file:
        logits = {int(id.removeprefix("test-")): float(logit) for id, logit in csv.reader(file)}
    if sorted(logits) != list(range(len(LABELS))):
        raise RuntimeError(f"{folder}: best.csv does not have each test image once")
    ordered = torch.tensor([logits[index] for index in range(len(LABELS))])
    return auc(ordered, (LABELS == 6).float())


if __name__ == "__main__":
    with one_line_errors():
        main()
