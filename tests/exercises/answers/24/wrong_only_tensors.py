# wrong: scatter of dicts, lists and tuples raises AttributeError: 'str' object has no attribute
import torch


def scatter(batch, devices):
    if isinstance(batch, dict):
        values = [scatter(value, devices) for value in batch.values()]
        return [dict(zip(batch, part, strict=True)) for part in zip(*values, strict=True)]
    if isinstance(batch, list | tuple):
        values = [scatter(value, devices) for value in batch]
        return [type(batch)(part) for part in zip(*values, strict=True)]
    parts = zip(batch.chunk(len(devices)), devices, strict=False)
    return [part.to(device) for part, device in parts]


def gather(outputs, device):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        outputs = [output.to(device) for output in outputs]
        return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in outputs])
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    return type(first)(gather(values, device) for values in zip(*outputs, strict=True))
