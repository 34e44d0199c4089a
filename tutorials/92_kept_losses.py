"""Show what a list of losses keeps in memory: python tutorials/92_kept_losses.py"""

import gc
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accel_demo.show import table

STEPS, BATCH = 100, 64
WAYS = {  # functions of (kept so far, loss) that return what is kept after this step
    "`losses.append(loss)`": lambda kept, loss: [*kept, loss],
    "`total += loss`": lambda kept, loss: [(kept or [0])[0] + loss],
    "`losses.append(loss.detach())`": lambda kept, loss: [*kept, loss.detach()],
    "`losses.append(loss.item())`": lambda kept, loss: [*kept, loss.item()],
}


class Saved:
    """A tensor that the forward pass saves for backward, such as the input of a layer."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def main() -> None:
    head = ["loop", "each step", "graph nodes", "bytes saved for backward"]
    rows = []
    for loop in ("training", "evaluation"):
        for way, keep in WAYS.items():
            nodes, size = left_after_an_epoch(keep, trains=loop == "training")
            rows.append([loop, way, nodes, f"{size:,}"])
    print(table(head, rows))


def left_after_an_epoch(keep, trains: bool) -> tuple[int, int]:
    """Run `STEPS` batches. Return the graph nodes and the bytes that still exist at the end.

    Nodes of the parameters, and the parameters' own bytes, are not counted: they exist anyway.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    kept, saved = [], weakref.WeakSet()

    def save(tensor: torch.Tensor) -> Saved:  # called for each tensor that forward saves
        saved.add(new := Saved(tensor.detach()))  # without its node, which keeps this object
        return new

    for _ in range(STEPS):
        images, labels = torch.rand(BATCH, 784), torch.randint(10, (BATCH,))
        with saved_tensors_hooks(save, lambda saved: saved.tensor):
            loss = F.cross_entropy(model(images), labels)
        if trains:
            loss.backward()
            model.zero_grad()
        kept = keep(kept, loss)
    del loss, images, labels
    gc.collect()
    storages = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage() for s in saved}
    for weight in model.parameters():
        storages.pop(weight.untyped_storage().data_ptr(), None)
    return len(nodes_of(kept)), sum(storage.nbytes() for storage in storages.values())


def nodes_of(kept: list) -> set:
    """Return the nodes of the autograd graphs that the tensors in the list belong to."""
    found = set()
    new = {value.grad_fn for value in kept if isinstance(value, torch.Tensor)}
    while new := {node for node in new if node and not hasattr(node, "variable")} - found:
        found |= new
        new = {following for node in new for following, _ in node.next_functions}
    return found


if __name__ == "__main__":
    main()
