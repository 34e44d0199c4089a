"""Show the first step of 11_ddp.py in two processes, for one weight of the network.

python tutorials/11_replicas.py --plot replicas.svg
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo import show
from accel_demo.data import packaged_set
from accel_demo.options import Parser
from accel_demo.processes.launch import spawn

PROCESSES = 2
LEARNING_RATE = 0.1
ROW, COLUMN = 9, 120  # the weight: a row and a column of the last layer's matrix
IMAGES = 4  # how many images to draw
COLORS = {"images": "#e3edf9", "weight": "#f4f4f4", "gradient": "#fbe9d0"}


def main() -> None:
    options = Parser(__doc__, plot=True).parse_args()
    ranks = spawn(first_step, PROCESSES)
    if options.plot:
        draw(ranks, options.plot)
        return
    for rank, step in enumerate(ranks):
        numbers = [f"{name} {step[name]:.3f}" for name in ("weight", "own", "average", "new")]
        print(f"rank {rank}: {', '.join(numbers)}")


def first_step() -> dict:
    """Train for one step like 11_ddp.py. Return some images, and the weight and its gradients."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set = packaged_set("train")
    loader = DataLoader(train_set, batch_size=64, sampler=DistributedSampler(train_set))
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    matrix = model.module[3].weight

    images, labels = next(iter(loader))
    before = matrix[ROW, COLUMN].item()
    # Not averaged, because this calls the network without its DDP wrapper:
    [own] = torch.autograd.grad(F.cross_entropy(model.module(images), labels), matrix)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    dist.destroy_process_group()
    return {
        "images": images[:IMAGES, 0],
        "weight": before,
        "own": own[ROW, COLUMN].item(),
        "average": matrix.grad[ROW, COLUMN].item(),
        "new": matrix[ROW, COLUMN].item(),
    }


def draw(ranks: list[dict], path: Path) -> None:
    """Draw a column per process, and across the columns the gradient that they average."""
    figure = show.new_figure(5, 5.6)
    axes = figure.subplots()
    axes.axis("off")
    for rank, step in enumerate(ranks):
        left, middle = 5.1 * rank, 5.1 * rank + 2.35
        axes.text(middle, 11.3, f"rank {rank}", fontsize=12, weight="bold", ha="center")
        box(axes, left, 8.6, 4.7, 2.4, "", "images")
        axes.text(middle, 10.4, "64 images from its shard", fontsize=10, ha="center", va="center")
        for place, image in enumerate(step["images"]):
            x = left + 0.25 + 1.08 * place
            extent = (x, x + 0.96, 8.8, 9.95)
            axes.imshow(image, extent=extent, cmap="gray", aspect="auto", zorder=2)
        weight, new = number(step["weight"]), number(step["new"])
        box(axes, left, 6.2, 4.7, 1.6, f"replica of the model:\nweight {weight}", "weight")
        own = f"loss.backward():\nown gradient {number(step['own'])}"
        box(axes, left, 4.2, 4.7, 1.4, own, "gradient")
        change = f"{weight} − {LEARNING_RATE} × ({number(step['average'])})"
        step_text = f"optimizer.step():\n{change}\n= new weight {new}"
        box(axes, left, -0.4, 4.7, 2, step_text, "weight")
        for start, end in ((8.6, 7.8), (6.2, 5.6), (4.2, 3.5), (2.4, 1.6)):
            arrow = {"arrowstyle": "-|>", "color": "#555555"}
            axes.annotate("", (middle, end), (middle, start), arrowprops=arrow)
    average = number(ranks[0]["average"])
    box(axes, 0, 2.4, 9.8, 1.1, f"averaged over both ranks: {average}", "gradient")
    axes.set(xlim=(-0.1, 9.9), ylim=(-0.5, 11.8))
    show.save(figure, path)


def box(axes, x: float, y: float, width: float, height: float, text: str, kind: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=COLORS[kind], edgecolor="#555555"))
    axes.text(x + width / 2, y + height / 2, text, fontsize=10, ha="center", va="center")


def number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


if __name__ == "__main__":
    main()
