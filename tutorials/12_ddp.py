"""The same training with DDP: torchrun --standalone --nproc-per-node 2 tutorials/12_ddp.py"""

import argparse
import csv
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from accel_demo.data import packaged_set

BATCH_SIZE, ACCUMULATE = 64, 2  # of all processes together
LEARNING_RATE, CLIP_NORM, PATIENCE = 0.1, 1.0, 2
WARM_UP = 50  # optimizer steps


class Shirts(Dataset):
    def __init__(self, split):
        self.split, self.images = split, packaged_set(split)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        return {"id": f"{self.split}-{index}", "image": image, "is_shirt": (label == 6).float()}


def mirror_half(images):  # augmentation
    is_mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(is_mirrored, images.flip(-1), images)


def new_model():
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    layers += nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 5 * 5, 1))


def learning_rate_factor(step, steps):
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP) / (steps - WARM_UP))


def auc(logits, targets):
    """Share of pairs of a shirt and another garment in which the shirt has the higher logit."""
    shirts, others = logits[targets == 1], logits[targets == 0]
    return (shirts[:, None] > others).float().mean().item()


def evaluate(model, loader, device):
    model.eval()
    ids, logits, targets = [], [], []
    with torch.no_grad():
        for batch in loader:
            ids += batch["id"]
            logits.append(model(batch["image"].to(device)).flatten())
            targets.append(batch["is_shirt"].to(device))
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (ids, torch.cat(logits).cpu(), torch.cat(targets).cpu()))
    ids, logits, targets = zip(*parts, strict=True)
    return sum(ids, []), torch.cat(logits), torch.cat(targets)


def main(options):
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    train_set, test_set = Shirts("train"), Shirts("test")
    test_part = Subset(test_set, range(rank, len(test_set), world_size))  # no padding
    assert BATCH_SIZE % world_size == 0
    batch_size, workers = BATCH_SIZE // world_size, math.ceil(options.workers / world_size)
    sampler = DistributedSampler(train_set, seed=options.seed)
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, num_workers=workers)
    test_loader = DataLoader(test_part, batch_size=300, num_workers=workers)
    model = new_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    steps = options.epochs * math.ceil(len(train_loader) / ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    writer = SummaryWriter(options.folder) if rank == 0 else None

    progress = {"epoch": 0, "step": 0, "best": 0.0, "epochs_without_gain": 0}
    if options.resume:
        state = torch.load(options.folder / "last.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        progress = state["progress"]
    model = DistributedDataParallel(model)

    for epoch in range(progress["epoch"], options.epochs):
        must_stop = torch.tensor(int(progress["epochs_without_gain"] == PATIENCE), device=device)
        dist.all_reduce(must_stop, dist.ReduceOp.MAX)  # called on every rank
        if must_stop:
            if rank == 0:
                print("stopped early")
            break
        seed = options.seed + 1_000 * epoch  # a resumed run needs no random state
        sampler.set_epoch(1_000 * epoch)
        torch.manual_seed(seed + rank)  # different dropout and mirroring on each rank
        model.train()
        loss_of_step = 0.0
        bar = tqdm(train_loader, f"epoch {epoch + 1}", disable=None if rank == 0 else True)
        for number, batch in enumerate(bar, 1):
            is_last = number % ACCUMULATE == 0 or number == len(train_loader)
            with nullcontext() if is_last else model.no_sync():
                logits = model(mirror_half(batch["image"].to(device))).flatten()
                loss = F.binary_cross_entropy_with_logits(logits, batch["is_shirt"].to(device))
                (loss / ACCUMULATE).backward()
            loss_of_step += loss.detach() / ACCUMULATE
            if is_last:
                norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
                progress["step"] += 1
                optimizer.zero_grad()
                dist.all_reduce(loss_of_step, dist.ReduceOp.AVG)
                if writer:
                    writer.add_scalar("loss", loss_of_step, progress["step"])
                    writer.add_scalar("gradient norm", norm, progress["step"])
                loss_of_step = 0.0

        for buffer in model.buffers():  # running means: all ranks evaluate with rank 0's
            dist.broadcast(buffer, 0)
        ids, logits, targets = evaluate(model.module, test_loader, device)
        score = auc(logits, targets)
        if writer:
            writer.add_scalar("AUC", score, progress["step"])
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        if score > progress["best"]:
            progress.update(best=score, epochs_without_gain=0)
            if rank == 0:
                torch.save(model.module.state_dict(), options.folder / "best.pt")
                with open(options.folder / "best.csv", "w", newline="") as file:
                    csv.writer(file).writerows(zip(ids, logits.tolist(), strict=True))
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "progress": progress}
            torch.save(state, options.folder / "last.pt")
            print(f"epoch {epoch + 1}: AUC {score:.4f} on {len(ids)} test images")
    if writer:
        writer.close()
    dist.destroy_process_group()
    return model.module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="of each data loader")
    parser.add_argument("--folder", type=Path, default=Path("runs/page_12/ddp"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
