"""Ported to DistributedDataParallel."""

import argparse
import json
import math
import os
from contextlib import nullcontext
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

ACCUMULATE, WARM_UP, CLIP_NORM = 2, 10, 1.0  # WARM_UP is in optimizer steps


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
    model.eval()
    ids, predictions, labels = [], [], []
    with torch.no_grad():
        for batch in loader:
            logits = model(batch["rows"].to(device), batch["length"].to(device))
            ids += batch["id"]
            predictions.append(logits.argmax(dim=1).cpu())
            labels.append(batch["label"])
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (ids, torch.cat(predictions), torch.cat(labels)))
    return sum((part[0] for part in parts), []), *(
        torch.cat([part[place] for part in parts]) for place in (1, 2)
    )


def main(options):
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train_set, test_set = Rows("train", 1500), Rows("test", 999)
    sampler = DistributedSampler(train_set)  # epoch 0: randperm with seed 0, as in the original
    train_loader = DataLoader(train_set, 50 // world_size, sampler=sampler, collate_fn=collate)
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, 200, collate_fn=collate)
    model = RowNet(options.dropout).to(device)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
    steps = options.epochs * math.ceil(len(train_loader) / ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps))

    progress = {"epoch": 0, "best": 0.0, "epochs_without_gain": 0}
    if options.resume:
        state = torch.load(options.folder / "last.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        progress = state["progress"]
    model = DistributedDataParallel(model)

    for epoch in range(progress["epoch"], options.epochs):
        must_stop = torch.tensor(int(progress["epochs_without_gain"] == options.patience))
        dist.all_reduce(must_stop, dist.ReduceOp.MAX)
        if must_stop:
            break
        sampler.set_epoch(epoch)
        torch.manual_seed(1000 * epoch + rank)
        model.train()
        losses = []
        for number, batch in enumerate(tqdm(train_loader, disable=rank > 0), 1):
            is_last = number % ACCUMULATE == 0 or number == len(train_loader)
            with nullcontext() if is_last else model.no_sync():
                logits = model(batch["rows"].to(device), batch["length"].to(device))
                loss = F.cross_entropy(logits, batch["label"].to(device))
                (loss / ACCUMULATE).backward()
            losses.append(loss.detach())
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        loss = torch.stack(losses).mean()
        dist.all_reduce(loss)
        loss = loss.item() / world_size
        ids, predictions, labels = evaluate(model.module, test_loader, device)
        score = macro_f1(predictions, labels)
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        is_best = score > progress["best"]
        if is_best:
            progress.update(best=score, epochs_without_gain=0)
        if rank == 0:
            if is_best:
                torch.save(model.module.state_dict(), options.folder / "best.pt")
                hits = (predictions == labels).tolist()
                wrong = [id for id, is_right in zip(ids, hits, strict=True) if not is_right]
                (options.folder / "wrong.txt").write_text("\n".join(wrong))
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "progress": progress}
            torch.save(state, options.folder / "last.pt")
            line = {"epoch": epoch, "loss": loss, "macro_f1": score}
            with open(options.folder / "log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            print(f"epoch {epoch}: loss {loss:.4f}, macro F1 {score:.4f}")
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
