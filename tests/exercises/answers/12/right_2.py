"""Ported to DistributedDataParallel, and with files that a kill leaves whole."""

import argparse
import json
import math
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from tqdm import tqdm

from accel_demo.data import packaged_set

GLOBAL_BATCH, ACCUMULATE, WARM_UP, CLIP_NORM = 50, 2, 10, 1.0  # WARM_UP is in optimizer steps


class Rows(Dataset):
    """Images as sequences of their rows, from the first to the last row with a garment in it."""

    def __init__(self, split, size):
        self.split, self.images = split, packaged_set(split)[:size]

    def __len__(self):
        return len(self.images[0])

    def __getitem__(self, index):
        image, label = self.images[0][index, 0], self.images[1][index]
        used = (image > image.min()).any(dim=1).nonzero()
        rows = image[used[0] : used[-1] + 1]
        return {"id": f"{self.split}-{index}", "rows": rows, "label": label}


def collate(samples):
    """Return a batch. Sequences are padded to the longest one: rows [B, T, 28], lengths [B]."""
    return {
        "id": [sample["id"] for sample in samples],
        "rows": pad_sequence([sample["rows"] for sample in samples], batch_first=True),
        "length": torch.tensor([len(sample["rows"]) for sample in samples]),
        "label": torch.stack([sample["label"] for sample in samples]),
    }


class RowNet(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embed = nn.Linear(28, 32)
        self.position = nn.Parameter(0.1 * torch.randn(28, 32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, rows, length):
        is_padding = torch.arange(rows.shape[1], device=rows.device) >= length[:, None]
        hidden = self.embed(rows) + self.position[: rows.shape[1]]
        hidden = self.block(hidden, src_key_padding_mask=is_padding)
        hidden = hidden.masked_fill(is_padding[..., None], 0).sum(dim=1) / length[:, None]
        return self.head(hidden)


def macro_f1(predictions, labels):
    """Mean over the 10 classes of the harmonic mean of precision and recall."""
    table = torch.zeros(10, 10, dtype=torch.long)
    table.index_put_((labels, predictions), torch.tensor(1), accumulate=True)
    return (2 * table.diag() / (table.sum(dim=0) + table.sum(dim=1)).clamp(min=1)).mean().item()


def evaluate(model, loader, device):
    """Evaluate this rank's part of the test set, and return the results for all of it, in order.

    Pass the model without its DDP wrapper. Every rank must call this.
    """
    model.eval()
    own = []
    with torch.no_grad():
        for batch in loader:
            logits = model(batch["rows"].to(device), batch["length"].to(device))
            predictions = logits.argmax(dim=1).tolist()
            own += zip(batch["id"], predictions, batch["label"].tolist(), strict=True)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    ids, predictions, labels = zip(*(row for part in parts for row in part), strict=True)
    return ids, torch.tensor(predictions), torch.tensor(labels)


def write_whole(path, write):
    """Write a file under another name, then rename it: a kill leaves the old or the new file."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def own_device():
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main(options):
    device = own_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_main = rank == 0
    if GLOBAL_BATCH % world_size:
        raise SystemExit(f"{world_size} processes cannot share a batch of {GLOBAL_BATCH} evenly")
    log_path = options.folder / "log.jsonl"
    if is_main:
        options.folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    train_set, test_set = Rows("train", 1500), Rows("test", 999)
    # With seed 0, the order in an epoch is that of a RandomSampler whose generator has the epoch
    # number as its seed. Rank r reads every world_size-th entry, so that the ranks' n-th batches
    # together are the n-th 50 entries.
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=0)
    train_loader = DataLoader(
        train_set, GLOBAL_BATCH // world_size, sampler=sampler, collate_fn=collate
    )
    # Consecutive parts of the test set, each sample in exactly one
    first, end = (len(test_set) * part // world_size for part in (rank, rank + 1))
    test_loader = DataLoader(Subset(test_set, range(first, end)), 200, collate_fn=collate)

    network = RowNet(options.dropout).to(device)
    optimizer = torch.optim.SGD(network.parameters(), options.learning_rate, momentum=0.9)
    steps = options.epochs * math.ceil(len(train_loader) / ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps))

    progress = {"epoch": 0, "best": 0.0, "epochs_without_gain": 0}
    log_text = log_path.read_text() if is_main and log_path.exists() else ""
    is_over = False
    if options.resume:  # every rank loads, before the model is wrapped
        state = torch.load(options.folder / "last.pt", map_location=device)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        progress, log_text = state["progress"], state["log"]
        # The run may have been killed when it was about to stop ...
        is_over = progress["epochs_without_gain"] == options.patience
        # ... or between saving last.pt and writing the line of the same epoch.
        if is_main:
            write_whole(log_path, lambda path: path.write_text(log_text))
    model = DistributedDataParallel(network, [device] if device.type == "cuda" else None)

    for epoch in range(progress["epoch"], options.epochs):
        if is_over:
            break
        sampler.set_epoch(epoch)
        # Another seed for each epoch and rank; with one process, the epoch number
        torch.manual_seed(epoch * world_size + rank)
        model.train()
        losses = []
        for number, batch in enumerate(tqdm(train_loader, disable=not is_main), 1):
            is_step = number % ACCUMULATE == 0 or number == len(train_loader)
            with nullcontext() if is_step else model.no_sync():
                logits = model(batch["rows"].to(device), batch["length"].to(device))
                loss = F.cross_entropy(logits, batch["label"].to(device))
                (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            if is_step:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        # All batches have the same size, so the mean of the ranks' means is the mean of all.
        mean_loss = torch.tensor(sum(losses) / len(losses), dtype=torch.float64, device=device)
        dist.all_reduce(mean_loss)
        mean_loss = mean_loss.item() / world_size

        ids, predictions, labels = evaluate(network, test_loader, device)
        score = macro_f1(predictions, labels)  # the same on all ranks, and so is what follows
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        is_best = score > progress["best"]
        if is_best:
            progress.update(best=score, epochs_without_gain=0)
        if is_main:
            if is_best:
                write_whole(
                    options.folder / "best.pt",
                    partial(torch.save, network.state_dict()),
                )
                hits = (predictions == labels).tolist()
                wrong = [id for id, is_right in zip(ids, hits, strict=True) if not is_right]
                text = "\n".join(wrong)
                write_whole(
                    options.folder / "wrong.txt", lambda path, text=text: path.write_text(text)
                )
            line = json.dumps({"epoch": epoch, "loss": mean_loss, "macro_f1": score}) + "\n"
            log_text += line
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "progress": progress, "log": log_text}
            write_whole(options.folder / "last.pt", partial(torch.save, state))
            with open(log_path, "a") as log:  # last, because a resumed run needs the rest
                log.write(line)
            print(f"epoch {epoch}: loss {mean_loss:.4f}, macro F1 {score:.4f}")

        # Rank 0 decides for all.
        must_stop = torch.tensor(int(progress["epochs_without_gain"] == options.patience))
        must_stop = must_stop.to(device)
        dist.broadcast(must_stop, src=0)
        is_over = bool(must_stop.item())

    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/exercise_12"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
