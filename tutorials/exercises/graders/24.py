"""Grade exercise 24: call scatter and gather with all kinds of batches, and in training steps."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from grading import Wrong, describe_error, grade, import_answer, naming_errors, torch

SEED, TOLERANCE = 24, 1e-6
RIGHT = "the gradients equal those of the whole batch, for 1 to 8 replicas and all batches"
GRADIENTS = "What happens in one forward and backward"  # headings of the page
SCALARS = "Why a mean of means can be wrong"  # section on outputs that are scalars


def observe(answer: Path) -> None:
    module = import_answer(answer)
    for check, function, subject in (
        (check_scatter, module.scatter, "scatter of a tensor"),
        (check_scatter_of_containers, module.scatter, "scatter of dicts, lists and tuples"),
        (check_scatter_of_other_values_first, module.scatter, "scatter"),
        (check_devices_of_scatter, module.scatter, "scatter to two devices"),
        (check_gather, module.gather, "gather of tensors"),
        (check_gather_of_scalars, module.gather, "gather of scalars"),
        (check_gather_of_containers, module.gather, "gather of dicts, lists and tuples"),
        (check_devices_of_gather, module.gather, "gather from two devices"),
        (check_gradients, module, "a training step"),
    ):
        torch.manual_seed(SEED)
        with naming_errors(f"{subject} raises"):
            check(function)


def check_scatter(scatter) -> None:
    for samples, count in ((12, 4), (10, 4), (30, 8), (9, 8), (3, 8), (5, 1)):
        call = f"scatter of {samples} samples to {count} devices"
        batch = torch.randn(samples, 40, requires_grad=True)
        parts = scatter(batch, [torch.device("cpu")] * count)
        if not is_list_of(parts, torch.Tensor):
            raise Wrong(f"{call} should return a list of tensors")
        shapes = [tuple(part.shape) for part in parts]
        if any(shape[1:] != (40,) for shape in shapes):
            raise Wrong(f"{call} splits a dimension other than 0: the shapes are {shapes}")
        sizes = [len(part) for part in parts]
        if len(parts) > count:
            raise Wrong(f"{call} returns too many parts: {sizes}")
        if 0 in sizes:
            raise Wrong(f"{call} returns empty parts: {sizes}")
        if sum(sizes) < samples:
            raise Wrong(f"{call} loses samples: the part sizes are {sizes}")
        if not torch.equal(torch.cat(list(parts)), batch):
            raise Wrong(
                f"{call} does not keep every sample once, in order: the part sizes are {sizes}"
            )
        if max(sizes) > (most := math.ceil(samples / count)):
            raise Wrong(f"{call} should return parts of at most {most} samples, got {sizes}")
        if not has_gradient(torch.cat(list(parts)), [batch]):
            raise Wrong(f"{call} cuts the graph: no gradient reaches the batch")


def check_scatter_of_containers(scatter) -> None:
    for samples, count in ((10, 4), (3, 8)):
        call = f"scatter of a dict with {samples} samples to {count} devices"
        images, labels = torch.randn(samples, 4, requires_grad=True), torch.arange(samples)
        others = {"name": "a batch", "scale": 0.5, "empty": [], "info": {"id": 3}, "tags": ["x"]}
        batch = {"data": (images, [labels]), **others}
        parts = scatter(batch, [torch.device("cpu")] * count)
        if not is_list_of(parts, dict):
            raise Wrong("scatter of a dict should return a list of dicts")
        if not parts:
            raise Wrong(
                f"{call} returns no parts. Does it return one for a value without tensors, such as "
                "a string or an empty list?"
            )
        if len(parts) not in range(math.ceil(samples / math.ceil(samples / count)), count + 1):
            raise Wrong(f"{call} returns {len(parts)} parts, unlike scatter of a tensor")
        for part in parts:
            if part.keys() != batch.keys():
                raise Wrong(f"{call} should keep the keys {list(batch)}, got {list(part)}")
            for name, value in others.items():
                if part[name] != value:
                    raise Wrong(
                        "scatter should pass values without tensors to every replica unchanged: "
                        f"{value!r} became {part[name]!r}"
                    )
            if not has_same_structure(part["data"], batch["data"]):
                raise Wrong(
                    "scatter of a tuple that contains a list should return a tuple with the same "
                    f"structure for each replica, got {structure_of(part['data'])}"
                )
        first, second = [part["data"][0] for part in parts], [part["data"][1][0] for part in parts]
        for name, whole, tensors in (("first", images, first), ("second", labels, second)):
            sizes = [len(tensor) for tensor in tensors]
            if 0 in sizes or max(sizes) > math.ceil(samples / count):
                raise Wrong(
                    f"{call} should split the {name} tensor of a tuple as it splits a single "
                    f"tensor, but the part sizes are {sizes}"
                )
            if not torch.equal(torch.cat(tensors), whole):
                raise Wrong(f"scatter loses or reorders samples of the {name} tensor of a tuple")
        if [len(tensor) for tensor in first] != [len(tensor) for tensor in second]:
            raise Wrong(f"{call} returns parts whose tensors have different numbers of samples")
        if not has_gradient(torch.cat(first), [images]):
            raise Wrong("scatter cuts the graph of a tensor in a tuple in a dict")


def check_scatter_of_other_values_first(scatter) -> None:
    """Scatter batches in which a value without tensors comes before the first tensor."""
    images = torch.randn(10, 4)
    for batch in (
        ("a batch", images),
        {"count": 3, "images": images},
        ([], images),
        [{"id": ("x", 7)}, [images]],
    ):
        call = f"scatter of {structure_of(batch)} with 10 samples to 4 devices"
        try:
            parts = scatter(batch, [torch.device("cpu")] * 4)
        except Exception as error:
            raise Wrong(f"{call} raises {describe_error(error)}") from None
        if not isinstance(parts, list | tuple) or not parts:
            raise Wrong(f"{call} should return a list of parts")
        for part in parts:
            if not has_same_structure(part, batch) or others_in(part) != others_in(batch):
                raise Wrong(f"{call} returns a part {structure_of(part)}")
        if not torch.equal(torch.cat([tensors_in(part)[0] for part in parts]), images):
            raise Wrong(f"{call} does not keep every sample once, in order")


def check_devices_of_scatter(scatter) -> None:
    devices = [torch.device("cpu"), torch.device("meta")]  # exist on every machine
    used = [part.device for part in scatter(torch.ones(4, 2), devices)]
    if used != devices:
        names = ", ".join(map(str, used))
        raise Wrong(f"scatter to cpu and meta should put part i on devices[i], but uses {names}")
    batch = {"data": (torch.ones(4, 2), [torch.ones(4)])}
    parts = list(scatter(batch, devices))
    if not has_same_structure(parts, [batch, batch]):
        raise Wrong("scatter of a dict to cpu and meta should return two dicts with its structure")
    for part, device in zip(parts, devices, strict=True):
        matrix, (vector,) = part["data"]
        if {matrix.device, vector.device} != {device}:
            raise Wrong(
                "scatter should also move tensors inside tuples, lists and dicts to devices[i]"
            )


def check_gather(gather) -> None:
    device = torch.device("cpu")
    square = shape_of(gather([torch.zeros(2, 2), torch.ones(2, 2)], device))
    if square != (4, 2):
        raise Wrong(f"gather should join dimension 0: 2×2 and 2×2 should become 4×2, got {square}")
    parts = [torch.randn(size, 3, requires_grad=True) for size in (4, 4, 2)]
    joined = gather(parts, device)
    if shape_of(joined) != (10, 3):
        raise Wrong(f"gather of 4×3, 4×3 and 2×3 should return 10×3, got {shape_of(joined)}")
    if not torch.equal(joined, torch.cat(parts)):
        raise Wrong("gather of tensors does not return all rows in the order of the replicas")
    if not has_gradient(joined, parts):
        raise Wrong("gather cuts the graph: no gradient reaches the replicas")


def check_gather_of_scalars(gather) -> None:
    scalars = [torch.tensor(float(number), requires_grad=True) for number in (1, 2)]
    vector = gather(scalars, torch.device("cpu"))
    if shape_of(vector) != (2,) or vector.tolist() != [1, 2]:
        raise Wrong(
            f"gather of the scalars 1 and 2 should return the vector [1, 2], got {vector}", SCALARS
        )
    if not has_gradient(vector, scalars):
        raise Wrong("gather cuts the graph of scalars: no gradient reaches the replicas", SCALARS)


def check_gather_of_containers(gather) -> None:
    sizes = (4, 4, 2)
    scalars = [torch.randn((), requires_grad=True) for _ in sizes]
    matrices = [torch.randn(size, 2, requires_grad=True) for size in sizes]
    vectors = [torch.randn(size, requires_grad=True) for size in sizes]
    together = zip(matrices, vectors, scalars, strict=True)
    outputs = [{"both": (matrix, [vector]), "loss": scalar} for matrix, vector, scalar in together]
    joined = gather(outputs, torch.device("cpu"))
    if not isinstance(joined, dict) or joined.keys() != outputs[0].keys():
        raise Wrong("gather of dicts should return a dict with the same keys")
    both, losses = joined["both"], joined["loss"]
    if not has_same_structure(both, outputs[0]["both"]):
        raise Wrong(
            "gather of tuples that contain a list should return a tuple with the same structure, "
            f"got {structure_of(both)}"
        )
    if shape_of(losses) != (3,) or not torch.equal(losses, torch.stack(scalars)):
        raise Wrong(f"gather of scalars in dicts should return a vector, got {losses}", SCALARS)
    if shape_of(both[0]) != (10, 2) or not torch.equal(both[0], torch.cat(matrices)):
        raise Wrong("gather loses or reorders rows of tensors in a tuple in a dict")
    if not torch.equal(both[1][0], torch.cat(vectors)):
        raise Wrong("gather loses or reorders rows of tensors in a list in a tuple")
    if not has_gradient(both[0], matrices) or not has_gradient(both[1][0], vectors):
        raise Wrong("gather cuts the graph of tensors in a tuple or a list")
    if not has_gradient(losses, scalars):
        raise Wrong("gather cuts the graph of scalars in dicts", SCALARS)


def check_devices_of_gather(gather) -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    outputs = [{"data": (torch.ones(2, 2), [torch.ones(2)])} for _ in range(2)]
    tensor, joined = gather([output["data"][0] for output in outputs], meta), gather(outputs, meta)
    if tensor.device != meta:
        raise Wrong(f"gather to the device meta returns a tensor on {tensor.device}")
    if not has_same_structure(joined, outputs[0]):
        raise Wrong(
            "gather of dicts to the device meta should return a dict with the same structure"
        )
    matrix, (vector,) = joined["data"]
    if {matrix.device, vector.device} != {meta}:
        raise Wrong("gather should also return tensors in a tuple or list on the given device")
    mixed = gather([torch.ones(2, 2, device=cpu), torch.ones(1, 2, device=meta)], meta)
    if (mixed.device, tuple(mixed.shape)) != (meta, (3, 2)):
        raise Wrong("gather of 2×2 on cpu and 1×2 on meta should return 3×2 on the given device")
    scalars = gather([torch.ones((), device=cpu), torch.ones((), device=meta)], meta)
    if (scalars.device, tuple(scalars.shape)) != (meta, (2,)):
        raise Wrong(
            "gather of a scalar on cpu and one on meta should return a vector on the given device",
            SCALARS,
        )


def check_gradients(module) -> None:
    from accel_demo.anatomy.data_parallel.phases import parallel_apply, replicate
    from accel_demo.anatomy.data_parallel.tables import largest_difference

    mse_loss = torch.nn.functional.mse_loss
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    parameters = list(net.parameters())
    for samples in (30, 16, 7, 1):
        inputs, labels = torch.randn(samples, 6), torch.randn(samples, 3)
        loss = mse_loss(net(inputs), labels)
        expected = torch.autograd.grad(loss, parameters)
        for count in range(1, 9):
            parts = module.scatter(inputs, [torch.device("cpu")] * count)
            devices = [torch.device("cpu")] * len(parts)
            calls = [(part,) for part in parts]
            outputs = parallel_apply(replicate(net, devices), calls, [{}] * len(parts), devices)
            loss = mse_loss(module.gather(outputs, devices[0]), labels)
            error = largest_difference(torch.autograd.grad(loss, parameters), expected)
            if not error <= TOLERANCE:
                raise Wrong(
                    f"with {samples} samples on {count} replicas, the gradients are off by "
                    f"{error:.1e}, but at most {TOLERANCE:.0e} is allowed",
                    GRADIENTS,
                )


def is_list_of(parts, kind: type) -> bool:
    return isinstance(parts, list | tuple) and all(isinstance(part, kind) for part in parts)


def has_same_structure(value, expected) -> bool:
    """Return True if both have the same containers, with tensors in the same places."""
    if isinstance(expected, dict):
        is_like = isinstance(value, dict) and value.keys() == expected.keys()
        return is_like and all(has_same_structure(value[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        is_like = isinstance(value, type(expected)) and len(value) == len(expected)
        return is_like and all(map(has_same_structure, value, expected))
    return isinstance(value, torch.Tensor) == isinstance(expected, torch.Tensor)


def structure_of(value) -> str:
    """Return a value as text, with "tensor" in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {structure_of(value[key])}' for key in value)}}}"
    if isinstance(value, list | tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(map(structure_of, value))}{right}"
    return repr(value)


def leaves(value) -> Iterator:
    """Yield all values in nested containers, in order."""
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield value


def tensors_in(value) -> list:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def others_in(value) -> list[str]:
    return sorted(repr(leaf) for leaf in leaves(value) if not isinstance(leaf, torch.Tensor))


def shape_of(result) -> tuple | str:
    """Return the shape of a tensor, or the name of the type of anything else."""
    return tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__


def has_gradient(result, leaves) -> bool:
    """Return True if the gradient of `result.sum()` is 1 for every element of the leaves."""
    if not result.requires_grad:
        return False
    gradients = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return all(grad is not None and bool((grad == 1).all()) for grad in gradients)


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT))
