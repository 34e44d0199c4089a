"""Train a GAN with DDP and with Accelerate, and compare the weights on one to three processes.

python tutorials/32_gan.py
"""

from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_demo.anatomy.batch_norm import convert
from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import results_by_rank
from accel_demo.show import table

GLOBAL_BATCH, STEPS = 24, 40
EQUAL = 1e-9  # sums in another order differ by about 1e-16, and each step enlarges this


def make_models():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return convert(generator).double(), discriminator.double()


def make_optimizers(models):
    return [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]


def make_data() -> TensorDataset:
    """Return points on a circle, and random inputs for the generator."""
    numbers = torch.Generator().manual_seed(1)
    angles, *noise = torch.randn(5, GLOBAL_BATCH * STEPS, generator=numbers, dtype=torch.float64)
    points = torch.stack([(9 * angles).cos(), (9 * angles).sin()], dim=1)
    return TensorDataset(points, torch.stack(noise, dim=1))


def discriminator_step(discriminator, optimizer, real, fake, backward):
    logits = discriminator(torch.cat([real, fake.detach()]))  # one forward for real and fake points
    labels = torch.arange(len(logits)) < len(real)
    backward(loss_of(logits, labels[:, None].to(logits)))
    optimizer.step()
    optimizer.zero_grad()


def generator_step(discriminator, optimizer, fake, backward, freeze=True):
    discriminator.requires_grad_(not freeze)  # backward then computes and sends no gradients for it
    logits = discriminator(fake)
    backward(loss_of(logits, torch.ones_like(logits)))
    discriminator.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()


def train(models, loader, backward=torch.Tensor.backward, *, freeze=True, clear_first=False):
    optimizers = make_optimizers(models)
    for real, noise in loader:
        fake = models[0](noise)
        if clear_first:
            optimizers[1].zero_grad()
        discriminator_step(models[1], optimizers[1], real, fake, backward)
        generator_step(models[1], optimizers[0], fake, backward, freeze)


def with_ddp(models, device, **options):
    models = [DistributedDataParallel(model.to(device)) for model in models]
    data = TensorDataset(*(each.to(device) for each in make_data().tensors))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    train(models, loader, **options)


def with_accelerate(models, _, window=1):
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=window)
    loader = DataLoader(make_data(), GLOBAL_BATCH // window // accelerator.num_processes)
    generator, discriminator, *optimizers, loader = accelerator.prepare(
        *models, *make_optimizers(models), loader
    )
    for real, noise in loader:
        with accelerator.accumulate(generator, discriminator):
            fake = generator(noise)
            discriminator_step(discriminator, optimizers[1], real, fake, accelerator.backward)
            generator_step(discriminator, optimizers[0], fake, accelerator.backward)


METHODS = {
    "DDP": with_ddp,
    "Accelerate": with_accelerate,
    "DDP, without `requires_grad_(False)`": partial(with_ddp, freeze=False),
    "… and `zero_grad()` first": partial(with_ddp, freeze=False, clear_first=True),
    "Accelerate, 2 micro-batches": partial(with_accelerate, window=2),
}


def train_all(device):
    """Return {method: (its weights and buffers, its number of all-reduces per step)}."""
    results = {}
    for name, method in METHODS.items():
        with recorded() as collectives:
            method(models := make_models(), device)
        results[name] = values_of(models), [c.name for c in collectives].count("all_reduce") / STEPS
    return results


def values_of(models):
    tensors = nn.ModuleList(models).state_dict().values()
    return torch.cat([each.cpu().flatten() for each in tensors])


def main() -> None:
    models = make_models()
    train(models, DataLoader(make_data(), GLOBAL_BATCH))
    one, two, three = (results_by_rank(train_all, ranks) for ranks in (1, 2, 3))
    assert len(two) == 2 and len(three) == 3
    rows = []
    for name, (values, all_reduces) in two[0].items():
        for ranks in (two, three):
            assert all(torch.equal(each[name][0], ranks[0][name][0]) for each in ranks)
        on_one, on_three = one[0][name][0], three[0][name][0]
        pairs = (on_one, values_of(models)), (values, on_one), (on_three, on_one)
        equal = ["equal" if (a - b).abs().max() < EQUAL else "different" for a, b in pairs]
        rows.append([name, f"{all_reduces:.0f}", *equal])
    head = "1 process and plain PyTorch", "2 processes and 1", "3 processes and 1"
    print(table(["method", "all-reduces per step", *head], rows))


if __name__ == "__main__":
    main()
