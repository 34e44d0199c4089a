"""Train with 12_plain.py, 12_accelerate.py and 12_ddp.py, and compare what they have saved.

python tutorials/12_compare.py

Two wrong scripts are 12_plain.py with nothing but DDP's wrapper and sampler, and the same with a
divided batch. Each of their processes has its own folder, so that rank 0's files can be compared.
"""

import csv
import os
import runpy
import statistics
import tempfile
from pathlib import Path

import torch

from accel_demo import show
from accel_demo.data import packaged_set
from accel_demo.errors import one_line_errors
from accel_demo.processes.launch import REPOSITORY, run_to_end

SEEDS = range(5)
CPU = "accelerate launch --config_file accelerate_configs"
LAUNCHERS = {
    ("12_accelerate.py", 1): f"{CPU}/cpu.yaml",
    ("12_ddp.py", 1): "torchrun --standalone --nproc-per-node 1",
    ("12_accelerate.py", 2): f"{CPU}/cpu_two_processes.yaml",
    ("12_ddp.py", 2): "torchrun --standalone --nproc-per-node 2",
    ("only wrapped", 2): "torchrun --standalone --nproc-per-node 2",
    ("wrapped, batch divided", 2): "torchrun --standalone --nproc-per-node 2",
}
ONLY_WRAPPED = {
    "    options.folder.mkdir": "    torch.distributed.init_process_group('gloo')\n"
    "    assert torch.distributed.get_world_size() == 2\n"
    "    options.folder /= str(torch.distributed.get_rank())\n"
    "    options.folder.mkdir",
    "model = new_model()": "model = torch.nn.parallel.DistributedDataParallel(new_model())",
    "RandomSampler(train_set, generator=order)": "torch.utils.data.DistributedSampler(train_set)",
    "order.manual_seed(seed)": "sampler.set_epoch(100 * epoch)",
}
DIVIDED = {"BATCH_SIZE, sampler": "BATCH_SIZE // 2, sampler"}
EXACT = {  # nothing that differs between the ranks, except rounding, which is small in float64
    "WARM_UP, CLIP_NORM, PATIENCE = 0.1, 50": "WARM_UP, CLIP_NORM, PATIENCE = 0.1, 5",
    "nn.BatchNorm2d(8)": "nn.GroupNorm(1, 8)",
    "nn.Dropout(0.2)": "nn.Dropout(0.0)",
    "torch.where(is_mirrored, images.flip(-1), images)": "images",
    '"image": image,': '"image": image.double(),',
    "(label == 6).float()": "(label == 6).double()",
    "def main(options):": "def main(options):\n    torch.set_default_dtype(torch.float64)",
    "packaged_set(split)\n": "torch.utils.data.Subset(packaged_set(split), range(1920))\n",
}
_, LABELS = packaged_set("test")[:]
auc = runpy.run_path(str(REPOSITORY / "tutorials/12_plain.py"))["auc"]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # so that every program adds in the same order
    with tempfile.TemporaryDirectory() as folder:
        compare_metrics(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        compare_weights(Path(folder))


def compare_metrics(folder: Path) -> None:
    plain = [train("python", "12_plain.py", folder / f"{seed}", f"--seed {seed}") for seed in SEEDS]
    scores = [score_of(folder / f"{seed}") for seed in SEEDS]
    mean, spread = statistics.mean(scores), 3 * statistics.stdev(scores)
    print(f"12_plain.py, seeds 0 to 4: AUC {min(scores):.4f} to {max(scores):.4f}")
    print(f"mean ± 3 standard deviations: {mean - spread:.4f} to {mean + spread:.4f}\n")
    rows = []
    for (name, processes), launcher in LAUNCHERS.items():
        own = folder / f"{name}-{processes}"
        weights = train(launcher, name, own)
        score = score_of(own)
        same = "equal bits" if torch.equal(weights, plain[0]) else "different"
        inside = "inside" if abs(score - mean) < spread else "outside"
        rows.append([label(name), processes, same, f"{score:.4f}", inside])
    titles = ["program, seed 0", "processes", "weights, compared with plain", "AUC", "spread"]
    print(show.table(titles, rows))


def compare_weights(folder: Path) -> None:
    print("\nGroupNorm instead of BatchNorm, no dropout, no mirroring, 1,920 images, float64:\n")
    flags = "--epochs 2"
    plain = train("python", "12_plain.py", folder / "plain", flags, EXACT)
    rows = []
    for (name, processes), launcher in LAUNCHERS.items():
        if processes == 2:
            weights = train(launcher, name, folder / name, flags, EXACT)
            difference = (weights - plain).abs().max().item()
            shown = "below 1e-10" if difference < 1e-10 else f"{difference:.1g}"
            rows.append([label(name), processes, shown])
    print(show.table(["program", "processes", "largest difference of a weight"], rows))


def label(name: str) -> str:
    return f"`{name}`" if name.endswith(".py") else f"`12_plain.py`, {name}"


def train(launcher: str, name: str, folder: Path, flags: str = "", changes=None) -> torch.Tensor:
    """Train with a changed copy of a script, and return the best weights in one vector."""
    changes = dict(changes or {})
    if not name.endswith(".py"):
        changes |= ONLY_WRAPPED | (DIVIDED if "divided" in name else {})
        name = "12_plain.py"
    text = (REPOSITORY / "tutorials" / name).read_text()
    for old, new in changes.items():
        if old not in text:
            raise RuntimeError(f"{name} does not contain {old!r}")
        text = text.replace(old, new)
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(text)
    command = f"{launcher} '{script}' {flags} --folder '{folder}'"
    run = run_to_end(command, time_limit=300)
    if run.returncode:
        raise RuntimeError(f"{command} failed:\n{run.stderr}")
    state = torch.load(next(folder.glob("**/best.pt")))
    return torch.cat([each.flatten().double() for each in state.values()])


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
