"""Train a network in fp32, with bf16 autocast, and with everything in bf16, and compare accuracies.

python tutorials/33_lost.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from accel_demo.data import packaged_set
from accel_demo.options import Parser
from accel_demo.show import table

SEEDS, EPOCHS, BATCH_SIZE = 3, 2, 32
LEARNING_RATES = 1e-3, 1e-4
PRECISIONS = {  # {name: (dtype of the weights, dtype of autocast)}
    "fp32": (torch.float32, torch.float32),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "bf16 everywhere": (torch.bfloat16, torch.bfloat16),
}


def main() -> None:
    rows = []
    runs = SEEDS * len(PRECISIONS) * len(LEARNING_RATES)
    with tqdm(total=runs, unit="run", disable=None) as progress:
        for learning_rate in LEARNING_RATES:
            for name, dtypes in PRECISIONS.items():
                accuracies, changed = [], []
                for seed in range(SEEDS):
                    accuracy, share = train(seed, learning_rate, *dtypes)
                    accuracies.append(accuracy)
                    changed.append(share)
                    progress.update()
                row = [name, f"{min(accuracies):.1%} – {max(accuracies):.1%}"]
                rows.append([learning_rate, *row, f"{min(changed):.0%} – {max(changed):.0%}"])
    head = ["learning rate", "precision", "test accuracy", "weights that the last step changes"]
    print(f"Lowest and highest of {SEEDS} seeds:\n")
    print(table(head, rows))


def train(seed: int, learning_rate: float, weights: torch.dtype, autocast: torch.dtype):
    """Train. Return the test accuracy, and the share of weights that the last step changes.

    The weights of pixels that are black in all images of the last batch are left out: their
    gradients are 0.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    model = model.to(weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    lower = torch.autocast("cpu", autocast, enabled=autocast != weights)
    images, labels = packaged_set("train").tensors
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            with lower:
                logits = model(images[batch].to(weights))
            F.cross_entropy(logits.float(), labels[batch]).backward()
            before = [weight.detach().clone() for weight in model.parameters()]
            optimizer.step()
            gradients = [weight.grad for weight in model.parameters()]
            optimizer.zero_grad()
    after = model.parameters()
    changes = [
        (old != new)[gradient != 0]
        for old, new, gradient in zip(before, after, gradients, strict=True)
    ]
    images, labels = packaged_set("test").tensors
    with torch.no_grad(), lower:
        accuracy = (model(images.to(weights)).argmax(1) == labels).float().mean()
    return accuracy.item(), torch.cat(changes).float().mean().item()


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    torch.set_num_threads(1)
    main()
