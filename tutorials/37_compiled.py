"""Count the graphs that torch.compile captures.

python tutorials/37_compiled.py
python tutorials/37_compiled.py --without-compiler

This program uses the backend "eager", which runs the captured graphs without compiling them.
Compiling would take a long time, and would not change which graphs are captured.
"""

import logging
import os

import torch
from torch._dynamo.utils import counters

from accel_demo.config import TrainConfig
from accel_demo.errors import one_line_errors
from accel_demo.models import make_model
from accel_demo.options import Parser
from accel_demo.show import table


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--without-compiler", action="store_true", help="print the error that a missing g++ causes"
    )
    if parser.parse_args().without_compiler:
        without_compiler()
        return
    torch._logging.set_logs(dynamo=logging.ERROR)
    print("Total number of graphs captured by `torch.compile` after each batch of two epochs:\n")
    head = ["batch", "in epoch 1", "in epoch 2"]
    first, second = two_epochs(make_model(TrainConfig()))
    rows = [
        [batch, before, after] for (batch, before), (_, after) in zip(first, second, strict=True)
    ]
    print(table(head, rows))
    print("\nGraphs of a network whose forward contains:\n")
    print(table(["statement", "graphs", "with `fullgraph=True`"], break_rows()))
    print("\nGraphs of a network that skips layers, so that each step needs a different graph:\n")
    print(table(["steps so far", "graphs"], list(graphs_of_different_depths().items())))


def two_epochs(model: torch.nn.Module) -> list[list[tuple[str, int]]]:
    """Run two epochs. For each batch, return its name and the number of graphs captured so far.

    Batches have 24 images, but the last training batch and the last evaluation batch have 20.
    """
    torch._dynamo.reset()
    counters.clear()
    model.compile(backend="eager")
    epochs = []
    for _ in range(2):
        epochs.append([])
        for mode, sizes in (("train", (24, 24, 24, 20)), ("evaluate", (24, 24, 20))):
            model.train(mode == "train")
            for size in sizes:
                with torch.set_grad_enabled(model.training):
                    model(torch.rand(size, 1, 28, 28))
                epochs[-1].append((f"{mode}, {size} images", counters["stats"]["unique_graphs"]))
    return epochs


def nothing_special(hidden):
    return hidden


def prints(hidden):
    print(end="")
    return hidden


def reads_a_value(hidden):
    return hidden / hidden.abs().max().item()


def branches(hidden):
    return 2 * hidden if hidden.sum() > 0 else 3 * hidden


STATEMENTS = {
    "only operations on tensors": nothing_special,
    "`print`": prints,
    "`.item()`": reads_a_value,
    "`if` on a tensor's value": branches,
}


class Network(torch.nn.Module):
    """Two layers, and a statement between them."""

    def __init__(self, statement):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 4) for _ in range(2))
        self.statement = statement

    def forward(self, inputs):
        return self.second(self.statement(self.first(inputs)))


def break_rows() -> list[list]:
    """Return a row per statement: the number of graphs, and what happens if it must be one."""
    rows = []
    for name, statement in STATEMENTS.items():
        torch._dynamo.reset()
        graphs = torch._dynamo.explain(Network(statement))(torch.ones(2, 4)).graph_count
        torch._dynamo.reset()
        model = Network(statement)
        model.compile(backend="eager", fullgraph=True)
        try:
            model(torch.ones(2, 4))
            result = "one graph"
        except torch._dynamo.exc.Unsupported as error:
            result = f"`Unsupported: {str(error).splitlines()[0]}`"
        rows.append([name, graphs, result])
    return rows


class Skipping(torch.nn.Module):
    """Layers of which forward uses only the first `depth`."""

    def __init__(self, most: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(most))

    def forward(self, hidden, depth):
        for layer in self.layers[:depth]:
            hidden = layer(hidden)
        return hidden


def graphs_of_different_depths() -> dict[int, int]:
    """Run a compiled network with 1 to 12 layers. Return the number of graphs after some steps."""
    torch._dynamo.reset()
    counters.clear()
    model = Skipping(most=12)
    model.compile(backend="eager")
    graphs = {}
    for step in range(1, 13):
        model(torch.ones(2, 4), depth=step)
        graphs[step] = counters["stats"]["unique_graphs"]
    return {step: graphs[step] for step in (4, 8, 12)}


def without_compiler() -> None:
    """Print the error that the default backend raises without a C++ compiler."""
    os.environ["PATH"] = ""
    os.environ.pop("CXX", None)
    model = torch.nn.Linear(2, 2)
    model.compile()
    try:
        model(torch.ones(1, 2))
    except RuntimeError as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    with one_line_errors():
        main()
