# wrong: scatter of a tuple that contains a list should return a tuple with the same
import torch


def scatter(batch, devices: list[torch.device]) -> list:
    if isinstance(batch, torch.Tensor):
        chunks = batch.chunk(len(devices))  # may be fewer than devices
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    if isinstance(batch, dict):
        return [
            dict(zip(batch, part, strict=True)) for part in scatter((*batch.values(),), devices)
        ]
    if isinstance(batch, list):
        return [[value for value in batch if not torch.is_tensor(value)] for _ in devices]
    if isinstance(batch, tuple) and batch:
        parts = zip(*[scatter(value, devices) for value in batch], strict=False)
        return [type(batch)(part) for part in parts]
    return [batch] * len(devices)  # zip ignores the copies that no tensor needs


def gather(outputs: list, device: torch.device):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        moved = [output.to(device) for output in outputs]
        return torch.cat(moved) if first.dim() > 0 else torch.stack(moved)
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    return type(first)(gather(list(values), device) for values in zip(*outputs, strict=True))
