"""Grade exercise 03: split and join batches of every kind, and train with both in between.

python tutorials/exercises/graders/03.py FILE
"""

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
from pathlib import Path

from accel_demo.processes.launch import run_to_end

TIME_LIMIT = 60  # seconds; without a mistake it takes a few
TOLERANCE = 1e-6


def main(answer: Path) -> int:
    """Say what is wrong with the answer; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        program = f"tutorials/exercises/graders/03.py {shlex.quote(str(answer))}"
        result = run_to_end(f"python {program} --report {report}", TIME_LIMIT)
        if result.returncode is None:
            print(f"wrong: it did not end within {TIME_LIMIT} s")
            return 1
        if not report.exists():
            print(f"wrong: the program broke off with exit code {result.returncode}")
            return 1
        mistake = json.loads(report.read_text())
    if mistake:
        print(f"wrong: {mistake}")
        return 1
    print("right: the gradients are those of the whole batch, for 1 to 8 replicas and any batch")
    return 0


def grade(answer: Path) -> str:
    """The sentence that says what is wrong with the answer, or nothing."""
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        scatter, gather = module.scatter, module.gather
    except (Exception, SystemExit) as error:
        return f"the file cannot be used: {type(error).__name__}: {error}"
    checks = [check_scatter, check_structures, check_gather, check_gathered_structures]
    for check in [*checks, check_devices, check_gradients]:
        try:
            mistake = check(scatter, gather)
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            mistake = f"{check.__doc__.splitlines()[0]} it stopped with {what}"
        if mistake:
            return mistake
    return ""


def check_scatter(scatter, gather) -> str:
    """In scatter, with a tensor,"""
    import torch

    for samples, replicas in ((12, 4), (10, 4), (30, 8), (9, 8), (3, 8), (5, 1)):
        what = f"scatter of {samples} samples over {replicas} replicas"
        batch = torch.randn(samples, 40, requires_grad=True)
        parts = scatter(batch, [torch.device("cpu")] * replicas)
        if not isinstance(parts, list | tuple) or not all(
            isinstance(part, torch.Tensor) for part in parts
        ):
            return f"{what} should give a list of tensors"
        shapes = [tuple(part.shape) for part in parts]
        if any(shape[1:] != (40,) for shape in shapes):
            return f"{what} splits another dimension than 0: the shapes are {shapes}"
        sizes = [len(part) for part in parts]
        if len(parts) > replicas:
            return f"{what} gives {len(parts)} parts"
        if 0 in sizes:
            return f"{what} gives empty parts: {sizes}"
        if sum(sizes) < samples:
            return f"{what} loses samples: the parts have {sizes}"
        if not torch.equal(torch.cat(list(parts)), batch):
            return f"{what} does not keep every sample once, in order: the parts have {sizes}"
        if len(parts) == 1 and min(samples, replicas) > 1:
            return f"{what} gives everything to the first replica"
        if not leads_back(torch.cat(list(parts)), [batch]):
            return f"{what} cuts the graph: no gradient finds its way back to the batch"
    return ""


def check_structures(scatter, gather) -> str:
    """In scatter, with dicts, lists and tuples,"""
    import torch

    for samples, replicas in ((10, 4), (3, 8)):
        what = f"scatter of a dict with {samples} samples over {replicas} replicas"
        devices = [torch.device("cpu")] * replicas
        images, labels = torch.randn(samples, 4, requires_grad=True), torch.arange(samples)
        batch = {"data": (images, [labels]), "name": "a batch", "scale": 0.5, "empty": []}
        sizes = [len(part) for part in scatter(images, devices)]
        parts = scatter(batch, devices)
        if not isinstance(parts, list | tuple) or not all(isinstance(part, dict) for part in parts):
            return "scatter of a dict should give a dict for each replica"
        if len(parts) != len(sizes):
            return f"{what} gives {len(parts)} parts, and of a tensor {len(sizes)}"
        if any(part.keys() != batch.keys() for part in parts):
            return f"{what} loses keys: there were {list(batch)}, a part has {list(parts[0])}"
        if any(part[name] != batch[name] for part in parts for name in ("name", "scale", "empty")):
            return "scatter should give what holds no tensor to every replica as it is"
        for part in parts:
            data = part["data"]
            if type(data) is not tuple or len(data) != 2 or type(data[1]) is not list:
                return "scatter of a tuple with a list should give such a tuple to each replica"
        for name, whole, found in (
            ("first", images, [part["data"][0] for part in parts]),
            ("second", labels, [part["data"][1][0] for part in parts]),
        ):
            if [len(part) for part in found] != sizes:
                return f"{what} should split the {name} tensor of a tuple in it as it does a tensor"
            if not torch.equal(torch.cat(found), whole):
                return f"scatter loses or mixes samples of the {name} tensor of a tuple in a dict"
        if not leads_back(torch.cat([part["data"][0] for part in parts]), [images]):
            return "scatter cuts the graph of a tensor in a tuple in a dict"
    return ""


def check_gather(scatter, gather) -> str:
    """In gather, with tensors,"""
    import torch

    device = torch.device("cpu")
    square = gather([torch.zeros(2, 2), torch.ones(2, 2)], device)
    shape = tuple(square.shape) if isinstance(square, torch.Tensor) else type(square).__name__
    if shape != (4, 2):
        return f"gather should join dimension 0: 2×2 and 2×2 should give 4×2, not {shape}"
    parts = [torch.randn(size, 3, requires_grad=True) for size in (4, 4, 2)]
    found = gather(parts, device)
    shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if shape != (10, 3):
        return f"gather of 4×3, 4×3 and 2×3 should give 10×3, not {shape}"
    if not torch.equal(found, torch.cat(parts)):
        return "gather of tensors does not give all rows in the order of the replicas"
    if not leads_back(found, parts):
        return "gather cuts the graph: no gradient finds its way back to the replicas"
    numbers = gather([torch.tensor(1.0), torch.tensor(2.0)], device)
    if not torch.equal(torch.as_tensor(numbers), torch.tensor([1.0, 2.0])):
        return f"gather of the numbers 1 and 2 should give the vector [1, 2], not {numbers}"
    return ""


def check_gathered_structures(scatter, gather) -> str:
    """In gather, with dicts, lists and tuples,"""
    import torch

    sizes = (4, 4, 2)
    pairs = [torch.full((n, 2), float(n), requires_grad=True) for n in sizes]
    ones = [torch.ones(n, requires_grad=True) for n in sizes]
    outputs = [{"both": (pair, [one])} for pair, one in zip(pairs, ones, strict=True)]
    found = gather(outputs, torch.device("cpu"))
    if not isinstance(found, dict) or list(found) != ["both"]:
        return "gather of dicts should give a dict with their keys"
    both = found["both"]
    if type(both) is not tuple or len(both) != 2 or type(both[1]) is not list:
        return "gather of tuples with a list should give a tuple with a list"
    if not torch.equal(both[0], torch.cat(pairs)):
        return "gather loses or mixes rows of tensors in a tuple in a dict"
    if len(both[1]) != 1 or not torch.equal(both[1][0], torch.ones(10)):
        return "gather loses or mixes rows of tensors in a list in a tuple"
    if not leads_back(both[0], pairs) or not leads_back(both[1][0], ones):
        return "gather cuts the graph of tensors in a tuple or a list"
    return ""


def check_devices(scatter, gather) -> str:
    """With two devices,"""
    import torch

    devices = [torch.device("cpu"), torch.device("meta")]  # a second device that all machines have
    found = [part.device for part in scatter(torch.ones(4, 2), devices)]
    if found != devices:
        return (
            f"scatter should put part i on devices[i]: {devices[1]} was asked for, not {found[1]}"
        )
    joined = gather([torch.ones(2, 2), torch.ones(2, 2)], devices[1])
    if joined.device != devices[1]:
        return f"gather should give its result on {devices[1]}, not on {joined.device}"
    batch = {"data": (torch.ones(4, 2), [torch.ones(4)])}
    for part, device in zip(scatter(batch, devices), devices, strict=True):
        pair, (one,) = part["data"]
        if {pair.device, one.device} != {device}:
            return "scatter should put tensors in a dict, tuple or list of part i on devices[i] too"
    pair, (one,) = gather([batch, batch], devices[1])["data"]
    if {pair.device, one.device} != {devices[1]}:
        return f"gather should give tensors in a tuple or list on {devices[1]} too"
    return ""


def check_gradients(scatter, gather) -> str:
    """In a training step,"""
    import torch
    from torch.nn.functional import mse_loss

    from accel_demo.anatomy.data_parallel.phases import parallel_apply, replicate
    from accel_demo.anatomy.data_parallel.tables import largest_difference

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    parameters = list(net.parameters())
    for samples in (30, 16, 7, 1):
        inputs, labels = torch.randn(samples, 6), torch.randn(samples, 3)
        right = torch.autograd.grad(mse_loss(net(inputs), labels), parameters)
        for count in range(1, 9):
            parts = scatter(inputs, [torch.device("cpu")] * count)
            devices = [torch.device("cpu")] * len(parts)
            replicas = replicate(net, devices)
            calls = [(part,) for part in parts]
            outputs = parallel_apply(replicas, calls, [{}] * len(parts), devices)
            loss = mse_loss(gather(outputs, devices[0]), labels)
            found = torch.autograd.grad(loss, parameters)
            error = largest_difference(found, right)
            if not error <= TOLERANCE:
                return (
                    f"with {samples} samples over {count} replicas the gradients are off by "
                    f"{error:.1e}, and {TOLERANCE:.0e} is allowed"
                )
    return ""


def leads_back(found, leaves) -> bool:
    """Whether a gradient finds its way from there to everything in the leaves."""
    import torch

    if not found.requires_grad:
        return False
    gradients = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
    return all(one is not None and bool((one == 1).all()) for one in gradients)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="look at the answer, and write here")
    options = parser.parse_args()
    if options.report:
        options.report.write_text(json.dumps(grade(options.answer)))
    else:
        sys.exit(main(options.answer.resolve()))
