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
from send_less import METHODS, make_model, own_batches, train
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


def main(plot: Path | None) -> None:
    accelerator = Accelerator(cpu=use_cpu())
    images, labels = (tensor.to(accelerator.device) for tensor in packaged_set("test").tensors)
    losses, megabytes = {method: [] for method in METHODS}, {}
    hidden = None if accelerator.is_main_process else True  # None: only on a terminal
    with tqdm(total=SEEDS * len(METHODS), unit="run", leave=False, disable=hidden) as bar:
        for seed in range(SEEDS):
            for method in METHODS:
                batches = own_batches(EPOCHS, seed, str(accelerator.device))
                with recorded() as collectives:
                    model = train(method, make_model(seed), batches)
                sent = sum(each.size for each in collectives if each.name == "all_reduce")
                megabytes[method] = sent / 1e6
                with torch.no_grad():
                    losses[method].append(F.cross_entropy(model(images), labels).item())
                bar.update()
    everyone = [None] * accelerator.num_processes
    dist.all_gather_object(everyone, losses)
    assert all(each == losses for each in everyone), "the ranks end with different weights"
    if accelerator.is_main_process:
        print(f"{accelerator.num_processes} connected processes, {SEEDS} seeds, {EPOCHS} epochs\n")
        head = ["method", "MB sent", "test loss", "from seed to seed", "minus that of DDP"]
        print(table([*head, "90 % interval"], rows(losses, megabytes)))
        if plot:
            draw(losses, megabytes, plot)
    accelerator.end_training()


def rows(losses: dict[str, list[float]], megabytes: dict[str, float]) -> list[list[str]]:
    cells = []
    for method, own in losses.items():
        mean, spread = statistics.mean(own), statistics.stdev(own)
        row = [method, f"{megabytes[method]:.1f}", f"{mean:.3f}", f"± {spread:.3f}"]
        differences = [one - ddp for one, ddp in zip(own, losses["DDP"], strict=True)]
        interval = interval_text(median_interval(differences), digits=3)
        is_ddp = method == "DDP"
        row += ["–", "–"] if is_ddp else [f"{statistics.median(differences):+.3f}", interval]
        cells.append(row)
    return cells


def draw(losses: dict[str, list[float]], megabytes: dict[str, float], path: Path) -> None:
    """Draw the loss against the megabytes that a rank sends, a point per seed."""
    figure = show.new_figure(5.2, 3.6)
    axes = figure.subplots()
    colors = [color for color in show.COLORS if color != "#f0e442"]  # yellow is too faint here
    for color, (method, own) in zip(colors, losses.items(), strict=True):
        sent = [megabytes[method]] * len(own)
        axes.plot(sent, own, "o", color=color, alpha=0.35, markersize=4)
        axes.plot(sent[:1], [statistics.mean(own)], "_", color=color, markersize=18, mew=2.5)
        place = (megabytes[method], max(own))
        axes.annotate(method, place, (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xscale("log")
    axes.set(xlabel="MB sent by each process", ylabel="test loss")
    axes.margins(x=0.12, y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    show.save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        main(Parser(__doc__, plot=True).parse_args().plot)
