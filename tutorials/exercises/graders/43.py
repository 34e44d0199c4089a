"""Grade exercise 43: compare a sharded Adam with torch.optim.Adam on two and on three ranks."""

import gc
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import grading
from grading import Wrong, dist, flatten, grade, import_answer, naming_errors, prefixed, torch

STEPS, TOLERANCE = 4, 1e-5
PATIENCE = 5  # seconds to wait for memory to be released
# Shapes and arguments of Adam. There are 1200, 1205 and 1207 elements. `eps` is large, because with
# a tiny one the update is almost the same for the sum of the gradients as for their mean.
CASES = [
    ([(40, 20), (40,), (20, 18)], {"lr": 0.01, "betas": (0.9, 0.999), "eps": 0.02}),
    ([(35, 24), (24,), (), (20, 17)], {"lr": 0.05, "betas": (0.8, 0.95), "eps": 0.1}),
    ([(12, 10, 10), (7,)], {"lr": 0.02, "betas": (0.7, 0.99), "eps": 0.05}),
]
RIGHT = "on 2 and 3 processes, the parameters match torch.optim.Adam, and the state is sharded"
MISTAKES = {  # {name of a reference: mistake that leads to its values}
    "sum": "the gradients of the ranks seem to be added up, but Adam needs their mean",
    "no correction": "Adam's bias correction seems to be missing: both moments start at 0",
    "first correction": "every step seems to use the bias correction of step 1",
    "restart": "the moments seem to start at 0 in every step, but they must be kept between steps",
}


def observe(answer: Path, device) -> Iterator[dict]:
    optimizer_class = import_answer(answer).ShardedAdam
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for shapes, options in CASES:
        draw = torch.Generator().manual_seed(42)
        weights = [torch.randn(shape, generator=draw) for shape in shapes]
        gradients = [  # by step, rank and parameter
            [[torch.randn(shape, generator=draw) / 10 for shape in shapes] for _ in range(ranks)]
            for _ in range(STEPS)
        ]
        references = make_references(weights, gradients, options)
        parameters = [torch.nn.Parameter(weight.to(device)) for weight in weights]
        gc.freeze()  # do not count tensors that already exist
        optimizer = optimizer_class(parameters, **options)
        for step in range(STEPS):
            for parameter, gradient in zip(parameters, gradients[step][rank], strict=True):
                parameter.grad = gradient.to(device)
            with naming_errors("step raises"):
                optimizer.step()
            yield {
                "step": step + 1,
                "options": ", ".join(f"{name}={value}" for name, value in options.items()),
                **compared(parameters, references, step),
            }
        check_memory(parameters)
        del optimizer


def make_references(weights: list, gradients: list, options: dict) -> dict[str, list]:
    """Return {name: [all elements at the start, after step 1, …]} of right and wrong results."""
    ranks = len(gradients[0])
    by_rank = [
        [flatten(step[rank]) for step in gradients] for rank in range(ranks)
    ]  # by rank and step
    sums = [sum(parts) for parts in zip(*by_rank, strict=True)]
    means = [total / ranks for total in sums]
    start = flatten(weights)

    def trained(gradients: list, correction: str = "") -> list:
        if correction:
            return [start, *adam(start, gradients, correction, **options)]
        parameter, results = torch.nn.Parameter(start.clone()), [start]
        optimizer = torch.optim.Adam([parameter], **options)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
            results.append(parameter.detach().clone())
        return results

    return {
        "right": trained(means),
        "sum": trained(sums),
        **{name: trained(means, name) for name in ("no correction", "first correction", "restart")},
        **{f"rank {rank}": trained(by_rank[rank]) for rank in range(ranks)},
    }


def adam(weights, gradients: list, mistake: str, lr: float, betas: tuple, eps: float) -> Iterator:
    """Yield the weights after each step of Adam with a mistake, which is a key of `MISTAKES`."""
    first = second = 0.0
    for gradient in gradients:
        if mistake == "restart":
            first = second = 0.0
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient.square()
        scales = (1, 1) if mistake == "no correction" else (1 - betas[0], 1 - betas[1])
        weights = weights - lr * first / scales[0] / ((second / scales[1]).sqrt() + eps)
        yield weights


def compared(parameters: list, references: dict[str, list], step: int) -> dict:
    """Compare the parameters after step `step`, counted from 0, with the references.

    Each element gets a letter: r if it is right, u if it still has the right value of the step
    before, and w if it is wrong.
    """
    flat = flatten(parameters)
    if flat.shape != references["right"][0].shape:
        raise Wrong("step changes the shape of a parameter")

    def close(name: str, at: int):
        return (flat - references[name][at]).abs() <= TOLERANCE

    is_right, is_old = close("right", step + 1), close("right", step)
    letters = torch.where(is_right, ord("r"), torch.where(is_old, ord("u"), ord("w")))
    one_rank = [close(name, step + 1) for name in references if name.startswith("rank ")]
    return {
        "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "elements": "".join(map(chr, letters.tolist())),
        "is_like": [name for name in MISTAKES if close(name, step + 1).all()],
        "is_from_one_rank": bool(torch.stack(one_rank).any(dim=0).all()),
        "has_nan": bool(flat.isnan().any()),
        "difference": (flat - references["right"][step + 1]).abs().max().item(),
    }


def check_memory(parameters: list) -> None:
    """Raise `Wrong` if this rank keeps more than three numbers per element of its share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    elements = sum(parameter.numel() for parameter in parameters)
    share = -(-elements // ranks) + len(parameters)  # each tensor may be divided and rounded up
    limit = 3 * 4 * share + 64  # 64 bytes are for numbers such as the step count
    # gloo's threads may release the tensors of a collective a little after it has returned.
    grading.wait_for(lambda: kept_bytes(parameters)[0] <= limit, PATIENCE)
    memory, free = kept_bytes(parameters)
    if memory <= limit:
        return
    kept = f"rank {rank} keeps {memory:,} bytes for {elements} elements, but may keep {limit:,}"
    if any(tensor.nbytes < memory_of(tensor).nbytes() for tensor in new_tensors(parameters)):
        raise Wrong(f"{kept}: a slice keeps the whole tensor that it was cut from in memory")
    if any(tensor.numel() == elements for tensor in new_tensors(parameters)):
        raise Wrong(f"{kept}: a tensor with all {elements} elements still exists after step")
    if memory + free >= 2 * 4 * elements:
        raise Wrong(f"{kept}: it seems to have the moments of all elements")
    raise Wrong(f"{kept}. For equal shares, a parameter has to be split between ranks")


def kept_bytes(parameters: list) -> tuple[int, int]:
    """Return the bytes of new tensors and arrays that count, and the bytes that do not.

    The gradients of tensors other than the parameters do not count, up to the size of a share,
    because `torch.optim.Adam` needs them.
    """
    new, own = new_tensors(parameters), own_memory(parameters)
    sizes = {memory_of(tensor).data_ptr(): memory_of(tensor).nbytes() for tensor in new}
    gradients = {memory_of(tensor.grad).data_ptr() for tensor in new if has_gradient(tensor)}
    share = sum(parameter.nbytes for parameter in parameters) // dist.get_world_size()
    free = min(share, sum(sizes[pointer] for pointer in gradients & sizes.keys()))
    arrays = {array.ctypes.data: array.nbytes for array in new_arrays()}
    only_arrays = sum(arrays[pointer] for pointer in arrays.keys() - sizes.keys() - own)
    return sum(sizes.values()) + only_arrays - free, free


def new_tensors(parameters: list) -> list:
    """Return the tensors that exist, without the parameters, their gradients and DTensors.

    A DTensor does not count, because it is only a wrapper of a local tensor.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors = [tensor for tensor in tensors if not hasattr(tensor, "_local_tensor")]
    gradients = [tensor.grad for tensor in tensors if has_gradient(tensor)]
    own = own_memory(parameters)
    different = {id(tensor): tensor for tensor in [*tensors, *gradients]}.values()
    return [tensor for tensor in different if memory_of(tensor).data_ptr() not in own]


def new_arrays() -> list:
    """Return the NumPy arrays that own their memory. gc only tracks the objects that hold them."""
    import numpy

    held = gc.get_referents(*gc.get_objects())
    arrays = [array for array in held if issubclass(type(array), numpy.ndarray)]
    owners = []
    for array in arrays:
        while isinstance(array.base, numpy.ndarray):
            array = array.base
        if not isinstance(array.base, torch.Tensor):
            owners.append(array)
    return owners


def own_memory(parameters: list) -> set[int]:
    """Return the addresses of the parameters and their gradients."""
    tensors = [*parameters, *(parameter.grad for parameter in parameters)]
    return {memory_of(tensor).data_ptr() for tensor in tensors if tensor is not None}


def has_gradient(tensor) -> bool:
    return tensor.is_leaf and tensor.grad is not None


def memory_of(tensor):
    return tensor.untyped_storage()


def judge(number: int, seen: list[dict]) -> None:
    count, first = len(seen[0]["elements"]), seen[0]
    with prefixed(f"after step {first['step']} with {count} elements, "):
        judge_elements([rank["elements"] for rank in seen], seen)
        if len({rank["digest"] for rank in seen}) > 1:
            raise Wrong("the ranks have the same parameters up to rounding, but not the same bits")


def judge_elements(elements: list[str], seen: list[dict]) -> None:
    """Raise `Wrong` if not all elements are right on all ranks."""
    if all(set(letters) == {"r"} for letters in elements):
        return
    if all(set(letters) == {"u"} for letters in elements):
        raise Wrong("the parameters have not changed")
    never = ["r" not in letters for letters in zip(*elements, strict=True)]
    if not any("w" in letters for letters in elements):
        if any(never):
            at_the_end = all(never[never.index(True) :])
            which = "at the end " if at_the_end else ""
            raise Wrong(
                f"{sum(never)} elements {which}have not changed on any rank: which rank "
                "should update them?"
            )
        rank = next(rank for rank, letters in enumerate(elements) if "u" in letters)
        raise Wrong(
            f"rank {rank} has new values for only {elements[rank].count('r')} elements: it needs "
            "the shares that the other ranks have updated"
        )
    if any(one["has_nan"] for one in seen):
        raise Wrong(
            "some new parameters are nan: does the bias correction divide by zero? Count the "
            "steps from 1"
        )
    for name, mistake in MISTAKES.items():
        if all(name in one["is_like"] for one in seen):
            raise Wrong(mistake)
    if all(one["is_from_one_rank"] for one in seen):
        raise Wrong(
            "each share is updated with the gradients of one rank instead of the mean over all "
            "ranks"
        )
    rank = next(rank for rank, letters in enumerate(elements) if set(letters) != {"r"})
    raise Wrong(
        f"on rank {rank}, {elements[rank].count('r')} of {len(elements[rank])} elements are right. "
        f"The others differ from the results of torch.optim.Adam with {seen[rank]['options']} by "
        f"up to {seen[rank]['difference']:.2g}"
    )


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(2, 3), judge=judge))
