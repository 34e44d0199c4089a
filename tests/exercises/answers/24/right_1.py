"""Exercise 24: split a batch for DataParallel, and join the outputs."""

import torch


def first_tensor(value):
    """Return the first tensor in a nested batch, or None."""
    if isinstance(value, torch.Tensor):
        return value
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        found = (first_tensor(child) for child in children)
        return next((tensor for tensor in found if tensor is not None), None)
    return None


def map_structure(function, values):
    """Call `function` with the values at each place of equally nested `values`, and rebuild."""
    model = values[0]
    if isinstance(model, dict):
        return {key: map_structure(function, [value[key] for value in values]) for key in model}
    if isinstance(model, list | tuple):
        return type(model)(map_structure(function, group) for group in zip(*values, strict=True))
    return function(values)


def scatter(batch, devices: list[torch.device]) -> list:
    samples = len(first_tensor(batch))
    part_count = min(samples, len(devices))
    bounds = [samples * index // part_count for index in range(part_count + 1)]

    def part(start, end, device):
        def take(values):
            (value,) = values
            return value[start:end].to(device) if isinstance(value, torch.Tensor) else value

        return map_structure(take, [batch])

    return [
        part(start, end, device)
        for start, end, device in zip(bounds[:-1], bounds[1:], devices[:part_count], strict=True)
    ]


def gather(outputs: list, device: torch.device):
    def join(tensors):
        rows = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
        return torch.cat([row.to(device) for row in rows])

    return map_structure(join, outputs)
