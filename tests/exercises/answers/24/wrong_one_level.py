# wrong: scatter of a dict with 10 samples to 4 devices should split the second tensor of a tuple
import torch


def scatter(batch, devices):
    def part_of(value, i):
        if isinstance(value, torch.Tensor):
            return value.tensor_split(count)[i].to(devices[i])
        if isinstance(value, tuple):
            return tuple(part_of(one, i) for one in value)
        return value

    if isinstance(batch, torch.Tensor):
        count = min(len(batch), len(devices))
        return [part_of(batch, i) for i in range(count)]
    values = list(batch.values()) if isinstance(batch, dict) else batch
    first = values[0][0] if isinstance(values[0], tuple) else values[0]
    count = min(len(first), len(devices))
    if isinstance(batch, dict):
        return [{key: part_of(batch[key], i) for key in batch} for i in range(count)]
    return [type(batch)(part_of(value, i) for value in batch) for i in range(count)]


def gather(outputs, device):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        outputs = [output.to(device) for output in outputs]
        return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in outputs])
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    return type(first)(gather(values, device) for values in zip(*outputs, strict=True))
