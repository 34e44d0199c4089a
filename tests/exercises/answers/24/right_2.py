"""Split a batch for DataParallel, and join the outputs."""

import torch


def sizes(value):
    """Yield the number of samples of each tensor in `value`."""
    if isinstance(value, torch.Tensor):
        yield len(value)
    elif isinstance(value, dict):
        yield from sizes(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from sizes(item)


def part_of(value, first, end, device):
    if isinstance(value, torch.Tensor):
        return value[first:end].to(device)
    if isinstance(value, dict):
        return {key: part_of(item, first, end, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(part_of(item, first, end, device) for item in value)
    return value


def scatter(batch, devices: list[torch.device]) -> list:
    samples = next(sizes(batch))
    count = min(samples, len(devices))
    bounds = [samples * index // count for index in range(count + 1)]
    return [
        part_of(batch, first, end, device)
        for first, end, device in zip(bounds[:-1], bounds[1:], devices, strict=False)
    ]


def gather(outputs: list, device: torch.device):
    sample = outputs[0]
    if isinstance(sample, torch.Tensor):
        rows = [torch.atleast_1d(output).to(device) for output in outputs]
        return torch.cat(rows)
    if isinstance(sample, dict):
        return {key: gather([output[key] for output in outputs], device) for key in sample}
    return type(sample)(gather(list(items), device) for items in zip(*outputs, strict=True))
