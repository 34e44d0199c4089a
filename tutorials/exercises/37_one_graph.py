"""Exercise 37: compile a model into one graph.

`train` compiles a model and trains it. Change `Model` and `train` so that

- a step needs one graph: nothing in forward breaks it. For all batches together, there are at most
  two graphs, because the last batch is smaller;
- the outputs and the gradients of `Model` stay the same. What it prints may go;
- `train` saves weights that fit a `Model` that isn't compiled.

`train` must pass `backend` on when it compiles: the check counts the graphs with it.

accel-demo check 37
"""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        """Return logits [B, 4] for inputs [B, 8]. If features exceed 1, the largest becomes 1."""
        hidden = self.first(inputs)
        largest = hidden.abs().max().item()
        if largest > 1:
            hidden = hidden / largest
        if hidden.isnan().any():
            print("the hidden features contain NaN")
        return self.second(hidden.relu())


def train(batches, backend, path):
    """Train for one step per batch, and save the weights at `path`."""
    torch.manual_seed(0)
    model = torch.compile(Model(), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), path)
