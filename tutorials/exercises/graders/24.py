"""Grade exercise 24: call scatter and gather with all kinds of batches, and in a training step.

python tutorials/exercises/graders/24.py FILE
"""

import sys
from pathlib import Path

from accel_demo.lab.grading import Wrong, described, grade, import_answer

TOLERANCE = 1e-6
RIGHT = "the gradients equal those of the whole batch, for 1 to 8 replicas and all batches"


def observe(answer: Path) -> None:
    module = import_answer(answer)
    scatter, gather = module.scatter, module.gather
    for check, subject in (
        (check_scatter, "scatter of a tensor"),
        (check_scatter_of_containers, "scatter of dicts, lists and tuples"),
        (check_gather, "gather of tensors"),
        (check_gather_of_containers, "gather of dicts, lists and tuples"),
        (check_devices, "scatter or gather with two devices"),
        (check_gradients, "a training step"),
    ):
        try:
            check(scatter, gather)
        except Wrong:
            raise
        except (Exception, SystemExit) as error:
            raise Wrong(f"{subject} stops with {described(error)}") from None


def check_scatter(scatter, gather) -> None:
    import torch

    for samples, replicas in ((12, 4), (10, 4), (30, 8), (9, 8), (3, 8), (5, 1)):
        call = f"scatter of {samples} samples over {replicas} replicas"
        batch = torch.randn(samples, 40, requires_grad=True)
        parts = scatter(batch, [torch.device("cpu")] * replicas)
        if not is_list_of(parts, torch.Tensor):
            raise Wrong(f"{call} should return a list of tensors")
        shapes = [tuple(part.shape) for part in parts]
        if any(shape[1:] != (40,) for shape in shapes):
            raise Wrong(f"{call} splits a dimension other than 0: the shapes are {shapes}")
        sizes = [len(part) for part in parts]
        if len(parts) > replicas:
            raise Wrong(f"{call} returns too many parts: {len(parts)}")
        if 0 in sizes:
            raise Wrong(f"{call} returns empty parts: {sizes}")
        if sum(sizes) < samples:
            raise Wrong(f"{call} loses samples: the parts have {sizes}")
        if not torch.equal(torch.cat(list(parts)), batch):
            raise Wrong(f"{call} does not keep every sample once, in order: the parts have {sizes}")
        if len(parts) == 1 and min(samples, replicas) > 1:
            raise Wrong(f"{call} sends all samples to the first replica")
        if not has_gradient(torch.cat(list(parts)), [batch]):
            raise Wrong(f"{call} cuts the graph: no gradient reaches the batch")


def check_scatter_of_containers(scatter, gather) -> None:
    import torch

    for samples, replicas in ((10, 4), (3, 8)):
        call = f"scatter of a dict with {samples} samples over {replicas} replicas"
        devices = [torch.device("cpu")] * replicas
        images, labels = torch.randn(samples, 4, requires_grad=True), torch.arange(samples)
        batch = {"data": (images, [labels]), "name": "a batch", "scale": 0.5, "empty": []}
        sizes = [len(part) for part in scatter(images, devices)]
        parts = scatter(batch, devices)
        if not is_list_of(parts, dict):
            raise Wrong("scatter of a dict should return a dict for each replica")
        if len(parts) != len(sizes):
            raise Wrong(f"{call} returns {len(parts)} parts, but a tensor makes {len(sizes)}")
        if any(part.keys() != batch.keys() for part in parts):
            raise Wrong(f"{call} loses keys: there were {list(batch)}, a part has {list(parts[0])}")
        if any(part[name] != batch[name] for part in parts for name in ("name", "scale", "empty")):
            raise Wrong("scatter should pass values without tensors to every replica unchanged")
        for part in parts:
            data = part["data"]
            if type(data) is not tuple or len(data) != 2 or type(data[1]) is not list:
                raise Wrong("scatter of a tuple with a list should return such a tuple per replica")
        for name, whole, tensors in (
            ("first", images, [part["data"][0] for part in parts]),
            ("second", labels, [part["data"][1][0] for part in parts]),
        ):
            if [len(tensor) for tensor in tensors] != sizes:
                raise Wrong(f"{call} should split the {name} tensor of a tuple like a tensor")
            if not torch.equal(torch.cat(tensors), whole):
                raise Wrong(f"scatter loses or reorders samples of the {name} tensor of a tuple")
        if not has_gradient(torch.cat([part["data"][0] for part in parts]), [images]):
            raise Wrong("scatter cuts the graph of a tensor in a tuple in a dict")


def check_gather(scatter, gather) -> None:
    import torch

    def shape(result) -> tuple | str:
        return tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__

    device = torch.device("cpu")
    square = shape(gather([torch.zeros(2, 2), torch.ones(2, 2)], device))
    if square != (4, 2):
        raise Wrong(f"gather should join dimension 0: 2×2 and 2×2 should be 4×2, not {square}")
    parts = [torch.randn(size, 3, requires_grad=True) for size in (4, 4, 2)]
    joined = gather(parts, device)
    if shape(joined) != (10, 3):
        raise Wrong(f"gather of 4×3, 4×3 and 2×3 should return 10×3, not {shape(joined)}")
    if not torch.equal(joined, torch.cat(parts)):
        raise Wrong("gather of tensors does not return all rows in the order of the replicas")
    if not has_gradient(joined, parts):
        raise Wrong("gather cuts the graph: no gradient reaches the replicas")
    numbers = gather([torch.tensor(1.0), torch.tensor(2.0)], device)
    if not torch.equal(torch.as_tensor(numbers), torch.tensor([1.0, 2.0])):
        raise Wrong(f"gather of the scalars 1 and 2 should return the vector [1, 2], not {numbers}")


def check_gather_of_containers(scatter, gather) -> None:
    import torch

    sizes = (4, 4, 2)
    matrices = [torch.full((size, 2), float(size), requires_grad=True) for size in sizes]
    vectors = [torch.ones(size, requires_grad=True) for size in sizes]
    pairs = zip(matrices, vectors, strict=True)
    outputs = [{"both": (matrix, [vector])} for matrix, vector in pairs]
    joined = gather(outputs, torch.device("cpu"))
    if not isinstance(joined, dict) or list(joined) != ["both"]:
        raise Wrong("gather of dicts should return a dict with the same keys")
    both = joined["both"]
    if type(both) is not tuple or len(both) != 2 or type(both[1]) is not list:
        raise Wrong("gather of tuples with a list inside should return a tuple with a list inside")
    if not torch.equal(both[0], torch.cat(matrices)):
        raise Wrong("gather loses or reorders rows of tensors in a tuple in a dict")
    if len(both[1]) != 1 or not torch.equal(both[1][0], torch.ones(10)):
        raise Wrong("gather loses or reorders rows of tensors in a list in a tuple")
    if not has_gradient(both[0], matrices) or not has_gradient(both[1][0], vectors):
        raise Wrong("gather cuts the graph of tensors in a tuple or a list")


def check_devices(scatter, gather) -> None:
    import torch

    cpu, meta = devices = [torch.device("cpu"), torch.device("meta")]  # exist on every machine
    used = [part.device for part in scatter(torch.ones(4, 2), devices)]
    if used != devices:
        raise Wrong(f"scatter should put part i on devices[i]: {used[1]} holds part 1, not meta")
    joined = gather([torch.ones(2, 2), torch.ones(2, 2)], meta)
    if joined.device != meta:
        raise Wrong(f"gather should return its result on meta, not on {joined.device}")
    batch = {"data": (torch.ones(4, 2), [torch.ones(4)])}
    for part, device in zip(scatter(batch, devices), devices, strict=True):
        matrix, (vector,) = part["data"]
        if {matrix.device, vector.device} != {device}:
            raise Wrong(
                "scatter should also move tensors inside tuples, lists and dicts to devices[i]"
            )
    matrix, (vector,) = gather([batch, batch], meta)["data"]
    if {matrix.device, vector.device} != {meta}:
        raise Wrong("gather should also return tensors in a tuple or list on meta")


def check_gradients(scatter, gather) -> None:
    import torch
    from torch.nn.functional import mse_loss

    from accel_demo.anatomy.data_parallel.phases import parallel_apply, replicate
    from accel_demo.anatomy.data_parallel.tables import largest_difference

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    parameters = list(net.parameters())
    for samples in (30, 16, 7, 1):
        inputs, labels = torch.randn(samples, 6), torch.randn(samples, 3)
        expected = torch.autograd.grad(mse_loss(net(inputs), labels), parameters)
        for count in range(1, 9):
            parts = scatter(inputs, [torch.device("cpu")] * count)
            devices = [torch.device("cpu")] * len(parts)
            calls = [(part,) for part in parts]
            outputs = parallel_apply(replicate(net, devices), calls, [{}] * len(parts), devices)
            loss = mse_loss(gather(outputs, devices[0]), labels)
            error = largest_difference(torch.autograd.grad(loss, parameters), expected)
            if not error <= TOLERANCE:
                raise Wrong(
                    f"with {samples} samples over {count} replicas the gradients are off by "
                    f"{error:.1e}, but at most {TOLERANCE:.0e} is allowed"
                )


def is_list_of(parts, kind: type) -> bool:
    return isinstance(parts, list | tuple) and all(isinstance(part, kind) for part in parts)


def has_gradient(result, leaves) -> bool:
    """Return True if the gradient of `result.sum()` is 1 for every element of the leaves."""
    import torch

    if not result.requires_grad:
        return False
    gradients = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return all(grad is not None and bool((grad == 1).all()) for grad in gradients)


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, time_limit=60))
