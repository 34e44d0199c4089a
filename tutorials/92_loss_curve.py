"""Train a CNN for one epoch and draw its loss.

python tutorials/92_loss_curve.py --plot loss.svg
accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/92_loss_curve.py --plot loss.svg
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_demo import show
from accel_demo.data import packaged_set
from accel_demo.options import Parser
from accel_demo.processes.devices import use_cpu

BATCH_SIZE = 64
SMOOTH = 11  # steps to average over: each step, five before it and five after it


class DictSet(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        return {"image": image, "label": label}


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        features = self.conv(x).flatten(1)
        return self.out(features), features


def train(accelerator):
    torch.manual_seed(0)
    train_loader = DataLoader(DictSet(packaged_set("train")), BATCH_SIZE, shuffle=True)
    cnn = CNN()
    optimizer = torch.optim.Adam(cnn.parameters())
    cnn, optimizer, train_loader = accelerator.prepare(cnn, optimizer, train_loader)
    loss_func = nn.CrossEntropyLoss()
    losses = []
    for data in train_loader:
        output, _ = cnn(data["image"])
        loss = loss_func(output, data["label"])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main(plot):
    accelerator = Accelerator(cpu=use_cpu())
    losses = train(accelerator)
    curve = accelerator.reduce(losses, "mean").cpu()  # the mean over the processes, step by step
    first, last = curve[:SMOOTH].mean().item(), curve[-SMOOTH:].mean().item()
    head = ["connected processes", "steps", "loss at the start", "loss at the end"]
    row = [accelerator.num_processes, len(curve), round(first, 1), round(last, 1)]
    accelerator.print(show.table(head, [row]))
    if plot and accelerator.is_main_process:
        draw(curve, plot)
    accelerator.end_training()


def draw(curve: torch.Tensor, path) -> None:
    """Draw the loss of each step, and the mean of the `SMOOTH` losses around it."""
    axes = (figure := show.new_figure(5.2, 3)).subplots()
    steps = range(1, len(curve) + 1)
    axes.plot(steps, curve.numpy(), color="#888888", linewidth=1, label="each step")
    smooth = curve.unfold(0, SMOOTH, 1).mean(dim=1)
    half = SMOOTH // 2
    axes.plot(
        steps[half:-half], smooth.numpy(), color=show.COLORS[0], label=f"mean of {SMOOTH} steps"
    )
    axes.set_xticks([1, *range(50, len(curve) - 10, 50), len(curve)])
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    show.save(figure, path)


if __name__ == "__main__":
    main(Parser(__doc__, plot=True).parse_args().plot)
