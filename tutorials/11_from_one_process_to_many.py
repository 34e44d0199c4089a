"""Train with each of the four train files, and compare the final weights bit for bit.

python tutorials/11_from_one_process_to_many.py
"""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file

from accel_demo.processes.launch import run_to_end

COURSE = Path(__file__).parent.parent
CONFIGS = "accelerate_configs"
RUNS = [  # (launcher, script)
    ("python", "accel_demo/train_plain.py"),
    ("python", "accel_demo/train_dp.py"),
    ("torchrun --standalone --nproc-per-node 1", "accel_demo/train_ddp.py"),
    (f"accelerate launch --config_file {CONFIGS}/cpu.yaml", "accel_demo/train.py"),
    ("torchrun --standalone --nproc-per-node 2", "accel_demo/train_ddp.py"),
    (f"accelerate launch --config_file {CONFIGS}/cpu_two_processes.yaml", "accel_demo/train.py"),
]
# Use all that could make the weights differ: dropout, clipping, accumulation, several epochs.
FLAGS = (
    "--max-steps 20 --accumulate 2 --batch-size 32 --dropout 0.2 --clip-norm 0.5 "
    "--train-samples 1024 --test-samples 256"
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(number)) for number in range(len(RUNS))]
        with ThreadPoolExecutor(2) as pool:  # two runs at a time
            processes = list(pool.map(train, RUNS, folders))
        weights = [load_file(run / "model.safetensors") for run in folders]
    print("| row | command | connected processes | rows with the same weights, bit for bit |")
    print("|---|---|---|---|")
    for row, (launcher, script) in enumerate(RUNS):
        own, numbered = weights[row], enumerate(weights, start=1)
        same_as = [str(i) for i, other in numbered if i != row + 1 and same(own, other)]
        command = f"`{launcher} {script}`"
        print(f"| {row + 1} | {command} | {processes[row]} | {', '.join(same_as) or 'none'} |")


def train(run: tuple[str, str], run_dir: Path) -> int:
    """Train with one command, which writes to `run_dir`. Return how many processes connected."""
    launcher, script = run
    result = run_to_end(f"{launcher} {script} {FLAGS} --run-dir {run_dir}", cwd=COURSE)
    if result.returncode != 0:
        raise RuntimeError(f"{script}: {result.returncode}\n{result.stdout}\n{result.stderr}")
    return json.loads((run_dir / "environment.json").read_text())["processes"]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first | second)


if __name__ == "__main__":
    main()
