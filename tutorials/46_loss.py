"""Compare the loss of each method after the same number of samples, over several seeds.

torchrun --standalone --nproc-per-node 2 tutorials/46_loss.py    # takes minutes
torchrun --standalone --nproc-per-node 2 tutorials/46_loss.py --plot send_less.svg
"""

import statistics
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from send_less import EVERY, METHODS, make_model, own_batches, train
from tqdm import tqdm

from accel_demo import show
from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.data import packaged_set
from accel_demo.errors import one_line_errors
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.options import Parser
from accel_demo.processes.devices import use_cpu
from accel_demo.show import table

SEEDS, EPOCHS = 8, 2
# {row: (method, local steps between two averages, learning rate of DiLoCo's outer optimizer)}
RUNS = {method: (method, EVERY) for method in METHODS}
RUNS |= {f"{method}, H = {every}": (method, every) for method in METHODS[-2:] for every in (4, 64)}
RUNS["DiLoCo, H = 4, lr 0.1"] = "DiLoCo", 4, 0.1


def main(plot: Path | None) -> None:
    accelerator = Accelerator(cpu=use_cpu())
    images, labels = (tensor.to(accelerator.device) for tensor in packaged_set("test").tensors)
    losses, megabytes = {name: [] for name in RUNS}, {}
    hidden = None if accelerator.is_main_process else True  # None: only on a terminal
    with tqdm(total=SEEDS * len(RUNS), unit="run", leave=False, disable=hidden) as bar:
        for seed in range(SEEDS):
            for name, (method, *settings) in RUNS.items():
                batches = own_batches(EPOCHS, seed, str(accelerator.device))
                with recorded() as collectives:
                    model = train(method, make_model(seed), batches, *settings)
                sent = sum(each.size for each in collectives if each.name == "all_reduce")
                megabytes[name] = sent / 1e6
                with torch.no_grad():
                    losses[name].append(F.cross_entropy(model(images), labels).item())
                bar.update()
    everyone = [None] * accelerator.num_processes
    dist.all_gather_object(everyone, losses)
    assert all(each == losses for each in everyone), "the ranks end with different weights"
    if accelerator.is_main_process:
        print(f"{accelerator.num_processes} connected processes, {SEEDS} seeds, {EPOCHS} epochs\n")
        head = ["method", "MB sent", "mean test loss", "higher than DDP", "median difference"]
        print(table([*head, "90 % interval"], rows(losses, megabytes)))
        if plot:
            draw(losses, plot)
    accelerator.end_training()


def rows(losses: dict[str, list[float]], megabytes: dict[str, float]) -> list[list[str]]:
    cells = []
    for method, own in losses.items():
        row = [method, f"{megabytes[method]:.1f}", f"{statistics.mean(own):.3f}"]
        differences = [one - ddp for one, ddp in zip(own, losses["DDP"], strict=True)]
        higher = sum(difference > 0 for difference in differences)
        interval = interval_text(median_interval(differences), digits=3)
        median = f"{statistics.median(differences):+.3f}"
        is_ddp = method == "DDP"
        row += ["–"] * 3 if is_ddp else [f"{higher} of {SEEDS}", median, interval]
        cells.append(row)
    return cells


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Draw a row for each method, with a point per seed and a line at the mean."""
    figure = show.new_figure(5.2, 4.4)
    axes = figure.subplots()
    for row, own in enumerate(losses.values()):
        axes.plot(own, [row] * len(own), "o", color=show.COLORS[0], alpha=0.4, markersize=5)
        axes.plot([statistics.mean(own)], [row], "|", color="black", markersize=18, mew=2)
    axes.axvline(statistics.mean(losses["DDP"]), color="gray", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(losses)), list(losses))
    axes.invert_yaxis()
    axes.set_xlabel("test loss; a point per seed, and the mean")
    axes.spines[["top", "right"]].set_visible(False)
    show.save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        main(Parser(__doc__, plot=True).parse_args().plot)
