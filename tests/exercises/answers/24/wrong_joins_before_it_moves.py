# wrong: gather from two devices raises RuntimeError: Tensor on device
import torch


def scatter(batch, devices):
    if isinstance(batch, torch.Tensor):
        parts = zip(batch.chunk(len(devices)), devices, strict=False)
        return [part.to(device) for part, device in parts]
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
        rows = [output.reshape(1) if output.dim() == 0 else output for output in outputs]
        return torch.cat(rows).to(device)
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    return type(first)(gather(values, device) for values in zip(*outputs, strict=True))
