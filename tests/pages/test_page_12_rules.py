"""Pages 12 and 95: rules that their own scripts don't show, each tried on two processes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, RandomSampler

SEQUENCES, LENGTH, TOKENS = 8, 6, 5
STEPS = 300


def language_model() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, its inputs, and targets of which the second half has fewer that count."""
    torch.manual_seed(0)
    inputs = torch.randn(SEQUENCES, LENGTH, 4)
    targets = torch.randint(TOKENS, (SEQUENCES, LENGTH))
    targets[SEQUENCES // 2 :, 2:] = -100
    return nn.Linear(4, TOKENS), inputs, targets


def token_loss(model, inputs, targets, reduction="mean"):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def token_gradients() -> dict[str, float]:
    """Return how far the gradient of two processes is from that of one, relative to the latter."""
    model, inputs, targets = language_model()
    token_loss(model, inputs, targets).backward()
    right = model.weight.grad.clone()
    half = slice(dist.get_rank() * SEQUENCES // 2, (dist.get_rank() + 1) * SEQUENCES // 2)
    distances = {}
    for name in ("plain", "factor"):
        model.zero_grad()
        wrapper = DistributedDataParallel(model)
        if name == "factor":
            tokens = (targets[half] != -100).sum().float()
            dist.all_reduce(tokens)
            loss = token_loss(wrapper, inputs[half], targets[half], "sum")
            loss = loss / (tokens / dist.get_world_size())
        else:
            loss = token_loss(wrapper, inputs[half], targets[half])
        loss.backward()
        distances[name] = ((model.weight.grad - right).norm() / right.norm()).item()
    return distances


def weights_after_adam(dtype: torch.dtype) -> float:
    """Train attention on one process and on two, and return the largest difference of a weight."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 8, 5, 16, dtype=dtype).unbind()
    alone = nn.MultiheadAttention(16, 2, batch_first=True, dtype=dtype)
    wrapper = DistributedDataParallel(copy.deepcopy(alone))
    rank = dist.get_rank()
    for model, part in ((alone, slice(None)), (wrapper, slice(4 * rank, 4 * rank + 4))):
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(STEPS):
            optimizer.zero_grad()
            output, _ = model(*[inputs[part]] * 3)
            F.mse_loss(output, targets[part]).backward()
            optimizer.step()
    pairs = zip(alone.parameters(), wrapper.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def error_after_freezing() -> str:
    """Freeze a layer of a wrapped model, and return what its next forward but one raises."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    wrapper = DistributedDataParallel(model)
    model[0].requires_grad_(False)
    wrapper(torch.ones(2, 4)).sum().backward()
    try:
        wrapper(torch.ones(2, 4))
    except RuntimeError as error:
        return str(error)
    return ""


def difference_after_unfreezing() -> float:
    """Unfreeze a layer of a wrapped model, and return how far its gradient is from the mean."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    wrapper = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    wrapper(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    mean = model[0].weight.grad.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return (model[0].weight.grad - mean).abs().max().item()


def orders() -> tuple[list[int], list[int]]:
    """Return the order of a seeded `RandomSampler`, and this rank's `DistributedSampler`."""
    generator = torch.Generator().manual_seed(7 + 100)
    sampler = DistributedSampler(range(10), seed=7)
    sampler.set_epoch(100)
    return list(RandomSampler(range(10), generator=generator)), list(sampler)


def everything() -> dict:
    sizes = (torch.float32, torch.float64)
    adam = {str(dtype): weights_after_adam(dtype) for dtype in sizes}
    return {
        "tokens": token_gradients(),
        "adam": adam,
        "orders": orders(),
        "unfrozen": difference_after_unfreezing(),
        "frozen": error_after_freezing(),
    }


@pytest.fixture(scope="module")
def ranks(together):
    return together(everything, 2)


def test_a_mean_over_tokens_needs_the_factor(ranks):
    for rank in ranks:
        assert rank["tokens"]["plain"] > 0.01 and rank["tokens"]["factor"] < 1e-6


def test_adam_turns_rounding_into_differences_that_float64_does_not_have(ranks):
    for rank in ranks:
        assert 1e-5 < rank["adam"]["torch.float32"] < 3e-3
        assert rank["adam"]["torch.float64"] < 1e-10


def test_freezing_a_layer_of_a_wrapped_model_causes_an_error_in_the_next_step(ranks):
    for rank in ranks:
        assert "Expected to have finished reduction in the prior iteration" in rank["frozen"]


def test_the_gradients_of_a_layer_that_is_unfrozen_after_wrapping_are_not_averaged(ranks):
    assert all(rank["unfrozen"] > 0.01 for rank in ranks)


def test_a_distributed_sampler_divides_the_order_of_a_seeded_sampler(ranks):
    for number, rank in enumerate(ranks):
        order, part = rank["orders"]
        assert part == order[number::2]
