# wrong: scatter of 3 samples to 8 devices returns empty parts: [1, 1, 1, 0, 0, 0, 0, 0]
import torch


def scatter(batch, devices):
    if isinstance(batch, torch.Tensor):
        parts = zip(batch.tensor_split(len(devices)), devices, strict=True)
        return [part.to(device) for part, device in parts]
    if isinstance(batch, dict):
        parts = scatter(list(batch.values()), devices)
        return [dict(zip(batch, part, strict=True)) for part in parts]
    if isinstance(batch, list | tuple) and batch:
        parts = zip(*[scatter(value, devices) for value in batch], strict=True)
        return [type(batch)(part) for part in parts]
    return [batch] * len(devices)


def gather(outputs, device):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        outputs = [output.to(device) for output in outputs]
        return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in outputs])
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    return type(first)(gather(values, device) for values in zip(*outputs, strict=True))
