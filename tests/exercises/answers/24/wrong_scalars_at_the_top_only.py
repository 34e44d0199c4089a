# wrong: gather of dicts, lists and tuples raises RuntimeError: zero-dimensional tensor
import torch


def scatter(batch, devices: list[torch.device]) -> list:
    if isinstance(batch, torch.Tensor):
        chunks = batch.chunk(len(devices))  # may be fewer than devices
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    if isinstance(batch, dict):
        return [dict(zip(batch, part, strict=True)) for part in scatter([*batch.values()], devices)]
    if isinstance(batch, list | tuple) and batch:
        parts = zip(*[scatter(value, devices) for value in batch], strict=False)
        return [type(batch)(part) for part in parts]
    return [batch] * len(devices)  # zip ignores the copies that no tensor needs


def gather(outputs: list, device: torch.device):
    if isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0:
        return torch.stack([output.to(device) for output in outputs])
    return join(outputs, device)


def join(outputs: list, device: torch.device):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, dict):
        return {key: join([output[key] for output in outputs], device) for key in first}
    return type(first)(join(list(values), device) for values in zip(*outputs, strict=True))
