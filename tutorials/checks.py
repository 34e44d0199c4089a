"""Twelve checks for a copy of your training script, as on page 51.

Each stops the script if its ranks have come to differ from one process. All ranks must call the
same checks in the same order, because all but the first one compare the ranks with each other.
"""

import hashlib
import os
from collections import Counter

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported early, or gloo may abort at the end
from torch.utils.data import Dataset

_orders: list = []  # of each epoch


class Numbered(Dataset):
    """Return each sample of a dataset with its number."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return number, self.samples[number]


def connected(processes=None):
    """1. Are the processes connected?"""
    started = processes or int(os.environ.get("WORLD_SIZE", 1))
    connected = dist.get_world_size() if dist.is_initialized() else 1
    assert connected == started > 1, f"{started} started, {connected} connected"


def equal_start(model, *datasets):
    """2. Do all ranks start with the same samples and weights?"""
    for samples in datasets:
        few = range(0, len(samples), len(samples) // 16 or 1)
        digests = of_all_ranks([digest(samples[number]) for number in few])
        assert are_equal(digests), "different samples have equal numbers"
    assert_equal("weights", model.named_parameters())


def equal_lengths(loader):
    """3. Do all ranks have equally many batches?"""
    lengths = of_all_ranks(len(loader))
    assert are_equal(lengths), f"{lengths} batches"


def random_numbers():
    """4. Do the ranks draw different random numbers?"""
    on_gpu = torch.cuda.is_initialized()
    state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
    states = of_all_ranks(state.numpy().tobytes())
    assert len(set(states)) == len(states), "equal random numbers, so equal dropout"


def global_batch(samples, expected):
    """5. Does a step use as many samples as in one process?"""
    sizes = of_all_ranks(samples)
    text = f"{sizes} samples, not {expected} in equal parts"
    assert sum(sizes) == expected and are_equal(sizes), text


def gradients(model):
    """6. Are the gradients equal?"""
    found = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
    assert any(of_all_ranks(len(found))), "no gradients: call this before zero_grad"
    assert_equal("gradients", found)


def weights(model):
    """7. Are the weights still equal?"""
    assert_equal("weights", model.named_parameters())


def read_once(numbers, samples, most_repeated):
    """8. Was each sample read once, except for those that fill up the last batch?"""
    times = Counter(sum(of_all_ranks(list(numbers)), []))
    assert len(times) == samples, f"{len(times)} of {samples} samples were read"
    repeated = times.total() - samples
    assert repeated <= most_repeated, f"{repeated} samples more than there are"


def new_order(numbers):
    """9. Is the order a new one?"""
    assert numbers not in _orders, f"epoch {len(_orders)} repeats an order"
    _orders.append(numbers)


def schedule(steps, advanced, planned):
    """10. Does the schedule end with the training?"""
    lengths = f"{steps} steps, advanced {advanced} times, planned for {planned}"
    assert steps == advanced == planned, lengths


def evaluation(model, numbers, samples):
    """11. Is the score computed with one model, and from each sample once?"""
    assert_equal("buffers", model.named_buffers())
    times = Counter(numbers)
    wrong = [number for number in range(samples) if times[number] != 1]
    text = f"{len(wrong)} of {samples} samples not once: {wrong[:3]}"
    assert not wrong and len(times) == samples, text


def equal_score(score):
    """12. Do all ranks have the same score?"""
    scores = of_all_ranks(float(score))
    assert are_equal(scores), scores


def of_all_ranks(value):
    """Return a list with the value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def are_equal(values):
    return len(set(map(str, values))) == 1  # as text, because NaN isn't equal to itself


def assert_equal(kind, tensors):
    """Compare the bits of each named tensor on all ranks."""
    of_ranks = of_all_ranks({name: digest(each) for name, each in tensors})
    names = sorted({name for each in of_ranks for name in each})
    wrong = [name for name in names if not are_equal([each.get(name) for each in of_ranks])]
    assert not wrong, f"{len(wrong)} {kind} differ: {wrong[:3]}"


def digest(sample):
    return hashlib.sha256(content(sample)).hexdigest()


def content(sample):
    """Return the bytes of tensors, arrays and images, and the text of all else in a sample."""
    if isinstance(sample, torch.Tensor):
        return sample.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(sample, dict):
        sample = list(sample.items())
    if isinstance(sample, (list, tuple)):
        return b"".join(map(content, sample))
    if hasattr(sample, "__array__") or hasattr(sample, "__array_interface__"):
        array = numpy.asarray(sample)
        return content(array.tolist()) if array.dtype == object else array.tobytes()
    return str(sample).encode()
