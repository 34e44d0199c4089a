"""What does torch.compile make, when does it make it again, and what is the model called then?

python tutorials/10_compiled.py
python tutorials/10_compiled.py --without-compiler

The backend "eager" runs what has been captured as it is. To compile it in earnest takes long, and
changes neither what is captured nor how often.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters

from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from accel_demo.show import table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-compiler", action="store_true", help="hide g++ from it")
    if parser.parse_args().without_compiler:
        without_compiler()
        return
    print("Graphs that `torch.compile` has made, after each batch of two epochs:\n")
    head = ["batch", "in epoch 1", "in epoch 2"]
    first, second = two_epochs(make_model(TrainConfig()))
    rows = [
        [batch, before, after] for (batch, before), (_, after) in zip(first, second, strict=True)
    ]
    print(table(head, rows))
    print("\nThe first weight's name, and what its layer computes in under bf16:\n")
    head = ["how", "in `state_dict()`", "in `accelerator.get_state_dict`", "layer gives"]
    print(table(head, [named(how) for how in WAYS]))
    print(f"\nRecompiled in the second epoch: {second[-1][1] - first[-1][1]} times")


def two_epochs(model: torch.nn.Module) -> list[list[tuple[str, int]]]:
    """Batches of 24 images but for the last; the number of graphs after each."""
    torch._dynamo.reset()
    counters.clear()
    model.compile(backend="eager")
    epochs = []
    for _ in range(2):
        epochs.append([])
        for what, sizes in (("train", (24, 24, 24, 20)), ("evaluate", (24, 24, 20))):
            model.train(what == "train")
            for size in sizes:
                with torch.set_grad_enabled(model.training):
                    model(torch.rand(size, 1, 28, 28))
                epochs[-1].append((f"{what}, {size} images", counters["stats"]["unique_graphs"]))
    return epochs


def not_compiled(accelerator: Accelerator, model):
    return accelerator.prepare(model)


def in_place(accelerator: Accelerator, model):
    model.compile(backend="eager")
    return accelerator.prepare(model)


def before(accelerator: Accelerator, model):
    return accelerator.prepare(torch.compile(model, backend="eager"))


def after(accelerator: Accelerator, model):
    return torch.compile(accelerator.prepare(model), backend="eager")


WAYS = {
    "not compiled": not_compiled,
    "`model.compile()`, then `prepare`": in_place,
    "`torch.compile(model)`, then `prepare`": before,
    "`prepare`, then `torch.compile(model)`": after,
    "`Accelerator(dynamo_backend=…)`": not_compiled,  # the launcher's --dynamo_backend too
}


def named(how: str) -> list[str]:
    """How the weights of a model that is compiled in this way are called."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()
    backend = "eager" if "dynamo" in how else None
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend=backend)
    layer, gave = torch.nn.Linear(4, 2), []
    layer.register_forward_hook(lambda layer, inputs, output: gave.append(output.dtype))
    model = WAYS[how](accelerator, torch.nn.Sequential(layer))
    model(torch.ones(1, 4))
    names = [next(iter(state)) for state in (model.state_dict(), accelerator.get_state_dict(model))]
    return [how, *(f"`{name}`" for name in names), str(gave[0]).removeprefix("torch.")]


def without_compiler() -> None:
    """What the default backend says where it finds no C++ compiler."""
    os.environ["PATH"] = ""
    os.environ.pop("CXX", None)
    model = torch.nn.Linear(2, 2)
    model.compile()
    try:
        model(torch.ones(1, 2))
    except RuntimeError as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
