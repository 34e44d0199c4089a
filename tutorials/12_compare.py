"""Train with 12_plain.py, 12_accelerate.py and 12_ddp.py, and compare what they have saved.

python tutorials/12_compare.py          # the weights in one process, and the metrics in two
python tutorials/12_compare.py --exact  # weights and metrics in two processes, of changed copies

Wrong scripts are trained as well: 12_plain.py with nothing but DDP's wrapper and sampler, the same
with a divided batch, 12_accelerate.py with two wrong schedules, and more for the exact comparison.
Each process of the first two has its own folder, so that rank 0's files can be compared.
"""

import csv
import os
import re
import runpy
import shutil
import statistics
import tempfile
from pathlib import Path

import torch

from accel_demo import show
from accel_demo.data import packaged_set
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end

TUTORIALS = Path(__file__).parent
SEEDS = range(0, 500, 100)  # The ranks of a run draw with its seed plus their number.
CONFIGS = {1: "accelerate_configs/cpu.yaml", 2: "accelerate_configs/cpu_two_processes.yaml"}
ONLY_WRAPPED = {
    "    options.folder.mkdir": "    torch.distributed.init_process_group('gloo')\n"
    "    options.folder /= str(torch.distributed.get_rank())\n"
    "    options.folder.mkdir",
    "model = new_model()": "model = new_model()\n"
    "    model = torch.nn.parallel.DistributedDataParallel(model)",
    "RandomSampler(train_set, generator=order)": "torch.utils.data.DistributedSampler(train_set)",
    "order.manual_seed(seed)": "sampler.set_epoch(1_000 * epoch)",
}
DIVIDED = ONLY_WRAPPED | {"BATCH_SIZE, sampler": "BATCH_SIZE // 2, sampler"}
SEEDED = "torch.utils.data.DistributedSampler(train_set, seed=options.seed)"
WITH_SEED = DIVIDED | {"RandomSampler(train_set, generator=order)": SEEDED}
AVERAGED = {  # The first half of the logits is rank 0's.
    "score = auc(logits, targets)": "score = sum(map(auc, logits.chunk(2), targets.chunk(2))) / 2"
}
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
    ("12_accelerate.py", NO_FLAG, ", schedule at double speed", 2),
    ("12_accelerate.py", BEFORE, ", schedule twice as long", 2),
]
EXACT = {  # Of what differs between the ranks, only rounding is left, which is small in float64.
    # no BatchNorm, no dropout, no augmentation
    "= new_model()": "= exact(new_model())",
    "torch.where(is_mirrored, images.flip(-1), images)": "images",
    # float64: inputs, targets and model
    '"image": image,': '"image": image.double(),',
    "(label == 6).float()": "(label == 6).double()",
    "def main(options):": "from page_12_exact import exact\n\n\n"
    "def main(options):\n    torch.set_default_dtype(torch.float64)",
    "AUC {score:.4f}": "AUC {score:.10f}",
    # a short run in which all batches and steps are full
    "packaged_set(split)\n": "torch.utils.data.Subset(packaged_set(split), range(1920))\n",
}
SHORT_WARM_UP = {"WARM_UP = 50": "WARM_UP = 5"}  # The run has only 30 steps.
EPOCH_ENDS = '        progress["epoch"] = epoch + 1'
EXACT_ONLY = [
    ("12_ddp.py", AVERAGED, ", mean of the ranks' AUCs", SHORT_WARM_UP),
    ("12_plain.py", WITH_SEED, ", batch divided, seed passed on", SHORT_WARM_UP),
    ("12_accelerate.py", BEFORE, ", schedule twice as long, long warm-up", {}),
]
_, LABELS = packaged_set("test")[:]
auc = runpy.run_path(str(TUTORIALS / "12_plain.py"))["auc"]
weights_in = runpy.run_path(str(TUTORIALS / "12_distance.py"))["weights_in"]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--exact", action="store_true", help="compare changed copies exactly")
    compare = compare_weights if parser.parse_args().exact else compare_metrics
    os.environ["OMP_NUM_THREADS"] = "1"  # so that every program adds in the same order
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder))


def compare_metrics(folder: Path) -> None:
    plain, plain_scores = train_all("12_plain.py", {}, 0, SEEDS, folder / "plain")
    rows = [["`12_plain.py`", 1, "", in_words(plain_scores), ""]]
    for number, (name, changes, what, processes) in enumerate(SCRIPTS):
        seeds = SEEDS if processes == 2 else SEEDS[:1]
        own = folder / f"script-{number}"
        weights, scores = train_all(name, changes, processes, seeds, own)
        same = "equal bits" if torch.equal(weights, plain) else "different"
        cells = [in_words(scores), in_errors(scores, plain_scores)] if processes == 2 else ["", ""]
        rows.append([f"`{name}`{what}", processes, same, *cells])
    titles = ["program", "processes", "last weights", "best AUC of five seeds"]
    print(show.table([*titles, "difference in standard errors"], rows))


def in_words(scores: list[float]) -> str:
    """Return the mean and the standard deviation."""
    return f"{statistics.mean(scores):.4f} ± {statistics.stdev(scores):.4f}"


def in_errors(scores: list[float], others: list[float]) -> str:
    """Return the difference of two means, divided by its standard error. Chance: ±2.3 for 95 %."""
    variance = (statistics.variance(scores) + statistics.variance(others)) / len(scores)
    errors = (statistics.mean(scores) - statistics.mean(others)) / variance**0.5
    return f"{round(errors, 1) + 0.0:.1f}"  # not -0.0


def train_all(
    name: str, changes: dict, processes: int, seeds: range, folder: Path
) -> tuple[torch.Tensor, list[float]]:
    """Train with each seed. Return the last weights of the first one, and the AUC of each."""
    folder.mkdir()
    weights = [
        train(name, changes, processes, folder / f"{seed}", f"--seed {seed}")[0] for seed in seeds
    ]
    return weights[0], [score_of(folder / f"{seed}") for seed in seeds]


def compare_weights(folder: Path) -> None:
    flags = "--epochs 2 --seed 1"  # 0 is also the default of DistributedSampler
    scripts = [(*each, SHORT_WARM_UP) for *each, processes in SCRIPTS if processes == 2]
    scripts += EXACT_ONLY
    plain = train("12_plain.py", EXACT | SHORT_WARM_UP, 0, folder / "plain", flags)
    long = train("12_plain.py", EXACT, 0, folder / "long", flags)
    rows = []
    for number, (name, changes, what, warm_up) in enumerate(scripts):
        own = train(name, changes | EXACT | warm_up, 2, folder / f"script-{number}", flags)
        pairs = zip(own, plain if warm_up else long, strict=True)
        differences = [(a - b).abs().max().item() for a, b in pairs]
        cells = ["below 1e-9" if each < 1e-9 else f"{each:.1g}" for each in differences]
        rows.append([f"`{name}`{what}", "wrong" if changes else "right", *cells])
    titles = ["program, 2 processes", "script", "largest difference of a weight", "of an AUC"]
    print(show.table(titles, rows))


def train(
    name: str, changes: dict, processes: int, folder: Path, flags: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train with a changed copy of a script.

    Returns the last weights in one vector, and the AUC of each epoch as it is printed. With 0
    processes, the script is started without a launcher.
    """
    text = (TUTORIALS / name).read_text()
    if processes > 1:
        connected = f"assert torch.distributed.get_world_size() == {processes}"
        changes = changes | {EPOCH_ENDS: f"        {connected}\n{EPOCH_ENDS}"}
    for old, new in changes.items():
        if old not in text:
            raise RuntimeError(f"{name} does not contain {old!r}")
        text = text.replace(old, new)
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(text)
    shutil.copy(TUTORIALS / "page_12_exact.py", folder)
    launcher = f"torchrun --standalone --nproc-per-node {processes}"
    if name == "12_accelerate.py":
        launcher = f"accelerate launch --config_file {CONFIGS[processes]}"
    launcher = launcher if processes else "python"
    command = f"{launcher} '{script}' {flags} --folder '{folder}'"
    run = run_to_end(command, time_limit=300, cwd=TUTORIALS.parent)
    if run.returncode:
        raise RuntimeError(f"{command} failed:\n{run.stderr}")
    scores = dict(re.findall(r"^epoch (\d+): AUC (\S+)", run.stdout, re.MULTILINE))
    return last_weights(folder), torch.tensor([*map(float, scores.values())], dtype=torch.float64)


def last_weights(folder: Path) -> torch.Tensor:
    """Return the weights of the last checkpoint, sorted by their names."""
    file = next(folder.glob("**/last.pt"), None)  # a process of a wrong script has its own folder
    weights = weights_in(file or folder / "last")
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


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
