"""Train a GAN with DDP and with Accelerate, and compare its weights with those of one process.

python tutorials/32_gan.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.anatomy.batch_norm import convert
from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import results_by_rank
from accel_demo.show import table

GLOBAL_BATCH, STEPS = 24, 50
EQUAL = 1e-9  # sums in another order differ by about 1e-16, and each step enlarges this


def make_models():
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(4, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)
    )
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return convert(generator).double(), discriminator.double()


def make_optimizers(*models):
    return [torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9)) for model in models]


def make_loader() -> DataLoader:
    """Return batches of points on a circle, and of random inputs for the generator."""
    numbers = torch.Generator().manual_seed(1)
    samples = GLOBAL_BATCH * STEPS
    angles = 2 * torch.pi * torch.rand(samples, generator=numbers, dtype=torch.float64)
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    noise = torch.randn(samples, 4, generator=numbers, dtype=torch.float64)
    return DataLoader(TensorDataset(points, noise), batch_size=GLOBAL_BATCH)


def discriminator_step(discriminator, optimizer, real, fake, backward):
    logits = discriminator(torch.cat([real, fake.detach()]))  # one forward for real and fake points
    labels = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(fake[:, :1])])
    backward(loss_of(logits, labels))
    optimizer.step()
    optimizer.zero_grad()


def generator_step(discriminator, optimizer, fake, backward, freeze):
    discriminator.requires_grad_(not freeze)  # backward then computes and sends no gradients for it
    logits = discriminator(fake)
    backward(loss_of(logits, torch.ones_like(logits)))
    discriminator.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()


def train(models, optimizers, batches, backward=torch.Tensor.backward, freeze=True):
    generator, discriminator = models
    for real, noise in batches:
        fake = generator(noise)
        discriminator_step(discriminator, optimizers[1], real, fake, backward)
        generator_step(discriminator, optimizers[0], fake, backward, freeze)


def with_ddp(models, device, freeze):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    models = [DistributedDataParallel(model.to(device)) for model in models]
    batches = [[each.chunk(ranks)[rank].to(device) for each in batch] for batch in make_loader()]
    train(models, make_optimizers(*models), batches, freeze=freeze)


def with_accelerate(models, _, freeze):
    config = DataLoaderConfiguration(split_batches=True)  # the loader's batches are global ones
    accelerator = Accelerator(cpu=use_cpu(), dataloader_config=config)
    everything = *models, *make_optimizers(*models), make_loader()
    *models, optimizer_g, optimizer_d, loader = accelerator.prepare(*everything)
    train(models, (optimizer_g, optimizer_d), loader, accelerator.backward, freeze)


METHODS = {
    "DDP": (with_ddp, True),
    "Accelerate": (with_accelerate, True),
    "DDP, without `requires_grad_(False)`": (with_ddp, False),
}


def train_all(device):
    """Return {method: its weights and buffers, and its number of all-reduces per step}."""
    results = {}
    for name, (method, freeze) in METHODS.items():
        models = make_models()
        with recorded() as collectives:
            method(models, device, freeze)
        all_reduces = [each.name for each in collectives].count("all_reduce")
        results[name] = (tensors_of(models), all_reduces / STEPS)
    return results


def tensors_of(models):
    return [each.cpu() for model in models for each in model.state_dict().values()]


def compared(tensors, by_ddp, whole) -> str:
    if all(map(torch.equal, tensors, by_ddp)) and tensors is not by_ddp:
        return "the same bits as with DDP"
    off = max((a - b).abs().max().item() for a, b in zip(tensors, whole, strict=True))
    return f"equal to one process within {EQUAL:g}" if off < EQUAL else "**different**"


def main() -> None:
    models = make_models()
    train(models, make_optimizers(*models), make_loader())
    rows = []
    for processes in (1, 2, 3):
        by_rank = results_by_rank(train_all, processes)
        assert len(by_rank) == processes
        for name, (tensors, all_reduces) in by_rank[0].items():
            result = compared(tensors, by_rank[0]["DDP"][0], tensors_of(models))
            for results in by_rank:
                assert all(map(torch.equal, results[name][0], tensors)), "the ranks differ"
            rows.append([processes, name, f"{all_reduces:g}", result])
    print(table(["processes", "method", "all-reduces per step", "weights and buffers"], rows))


if __name__ == "__main__":
    main()
