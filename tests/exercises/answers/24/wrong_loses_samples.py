# wrong: scatter of 10 samples to 4 devices loses samples: the part sizes are [2, 2, 2, 2]
import torch


def scatter(batch, devices):
    if isinstance(batch, torch.Tensor):
        size = max(len(batch) // len(devices), 1)
        starts = range(0, len(batch), size)
        parts = zip(starts, devices, strict=False)
        return [batch[start : start + size].to(device) for start, device in parts]
    if isinstance(batch, dict):
        parts = scatter(list(batch.values()), devices)
        return [dict(zip(batch, part, strict=True)) for part in parts]
    if isinstance(batch, list | tuple) and batch:
        parts = zip(*[scatter(value, devices) for value in batch], strict=False)
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
