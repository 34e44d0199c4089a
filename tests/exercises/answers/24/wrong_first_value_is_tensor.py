# wrong: with 10 samples to 4 devices raises
import torch


def sample_count(batch):
    if isinstance(batch, torch.Tensor):
        return len(batch)
    return sample_count(next(iter(batch.values() if isinstance(batch, dict) else batch)))


def scatter(batch, devices: list[torch.device]) -> list:
    size = -(-sample_count(batch) // len(devices))
    starts = range(0, sample_count(batch), size)

    def part(value, start, device):
        if isinstance(value, torch.Tensor):
            return value[start : start + size].to(device)
        if isinstance(value, dict):
            return {k: part(v, start, device) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(part(v, start, device) for v in value)
        return value

    return [part(batch, start, device) for start, device in zip(starts, devices, strict=False)]


def gather(outputs: list, device: torch.device):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        tensors = [output.to(device) for output in outputs]
        return torch.stack(tensors) if first.dim() == 0 else torch.cat(tensors)
    if isinstance(first, dict):
        return {k: gather([output[k] for output in outputs], device) for k in first}
    return type(first)(gather(list(values), device) for values in zip(*outputs, strict=True))
