"""A model answer to exercise 03."""

import torch


def scatter(batch, devices: list[torch.device]) -> list:
    if isinstance(batch, torch.Tensor):
        chunks = batch.chunk(len(devices))
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    if isinstance(batch, dict):
        parts = zip(*(scatter(value, devices) for value in batch.values()), strict=False)
        return [dict(zip(batch, values, strict=True)) for values in parts]
    if isinstance(batch, list | tuple):
        parts = zip(*(scatter(value, devices) for value in batch), strict=False)
        return [type(batch)(values) for values in parts]
    return [batch for _ in devices]


def gather(outputs: list, device: torch.device):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        rows = [output.unsqueeze(0) if output.dim() == 0 else output for output in outputs]
        return torch.cat([row.to(device) for row in rows], dim=0)
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    return type(first)(gather(list(values), device) for values in zip(*outputs, strict=True))
