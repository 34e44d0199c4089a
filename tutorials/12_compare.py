"""Train with 12_plain.py, 12_accelerate.py and 12_ddp.py, and compare what they have saved.

python tutorials/12_compare.py
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
RUNS = [  # program, processes, and what starts it
    ("12_accelerate.py", 1, f"{CPU}/cpu.yaml"),
    ("12_ddp.py", 1, "torchrun --standalone --nproc-per-node 1"),
    ("12_accelerate.py", 2, f"{CPU}/cpu_two_processes.yaml"),
    ("12_ddp.py", 2, "torchrun --standalone --nproc-per-node 2"),
]
_, LABELS = packaged_set("test")[:]
auc = runpy.run_path(str(REPOSITORY / "tutorials/12_plain.py"))["auc"]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # so that every program adds in the same order
    with tempfile.TemporaryDirectory() as folder:
        plain = [train("python", "12_plain.py", seed, Path(folder, f"{seed}")) for seed in SEEDS]
        scores = [score for _, score in plain]
        mean, spread = statistics.mean(scores), 3 * statistics.stdev(scores)
        print(f"12_plain.py, seeds 0 to 4: AUC {min(scores):.4f} to {max(scores):.4f}")
        print(f"mean ± 3 standard deviations: {mean - spread:.4f} to {mean + spread:.4f}\n")
        rows = []
        for number, (name, processes, launcher) in enumerate(RUNS):
            weights, score = train(launcher, name, 0, Path(folder, f"run {number}"))
            same = "equal bits" if torch.equal(weights, plain[0][0]) else "different"
            inside = "inside" if abs(score - mean) < spread else "outside"
            rows.append([f"`{name}`", processes, same, f"{score:.4f}", inside])
    titles = ["program, seed 0", "processes", "weights, compared with plain", "AUC", "spread"]
    print(show.table(titles, rows))


def train(launcher: str, name: str, seed: int, folder: Path) -> tuple[torch.Tensor, float]:
    """Return the best weights in one vector, and their AUC, computed from the ids in best.csv."""
    words = f"{launcher} tutorials/{name} --seed {seed} --folder '{folder}'"
    run = run_to_end(words, time_limit=300)
    if run.returncode:
        raise RuntimeError(f"{words} failed:\n{run.stderr}")
    state = torch.load(folder / "best.pt")
    with open(folder / "best.csv", newline="") as file:
        logits = {int(id.removeprefix("test-")): float(logit) for id, logit in csv.reader(file)}
    if sorted(logits) != list(range(len(LABELS))):
        raise RuntimeError(f"{words}: best.csv does not have each test image once")
    ordered = torch.tensor([logits[index] for index in range(len(LABELS))])
    return torch.cat([each.flatten().float() for each in state.values()]), auc(
        ordered, (LABELS == 6).float()
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
