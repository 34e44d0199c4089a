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
from accel_demo.anatomy.flags import command_line, read
from accel_demo.data import packaged_set
from accel_demo.processes.connect import use_cpu

BATCH_SIZE = 64
SMOOTH = 10  # steps to average over


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
    accelerator.print(f"Connected processes: {accelerator.num_processes}, steps: {len(curve)}")
    first, last = curve[:SMOOTH].mean().item(), curve[-SMOOTH:].mean().item()
    accelerator.print(f"Loss: {first:.1f} at the start, {last:.1f} at the end")
    if plot and accelerator.is_main_process:
        draw(curve, plot)
    accelerator.end_training()


def draw(curve: torch.Tensor, path) -> None:
    """Draw the loss of each step, and the mean of the last `SMOOTH` losses."""
    figure = show.new_figure(5.2, 3)
    axes = figure.subplots()
    axes.plot(range(1, len(curve) + 1), curve.numpy(), color="#bbbbbb", label="each step")
    smooth = curve.unfold(0, SMOOTH, 1).mean(dim=1)
    axes.plot(
        range(SMOOTH, len(curve) + 1),
        smooth.numpy(),
        color=show.COLOURS[0],
        label=f"mean of the last {SMOOTH}",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    show.save(figure, path)


if __name__ == "__main__":
    main(read(command_line(__doc__)).plot)
