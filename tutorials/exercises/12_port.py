"""Exercise 12: port a training script.

This script trains on one device. Port it to Accelerate or to DDP. The check hides all GPUs and
starts your script with this command, with N = 1 and with N = 2:

    torchrun --standalone --nproc-per-node N tutorials/exercises/12_port.py --folder F --dropout 0

and with other values of `--epochs`, `--patience`, `--learning-rate` and `--resume`. F is empty
unless `--resume` is given. Your script need not run without torchrun. Without a GPU, Accelerate
needs `cpu=True` (page 10). Graded:

1. The audit finds no errors and no warnings.
2. Training. The global batch has the same 50 sequences as in one process, so the batch per process
   is 50 / N. Without dropout, the weights in best.pt then differ from those of this script by
   rounding only. (The check allows 1e-3.) With dropout, the masks differ between the ranks.
3. Files. best.pt, wrong.txt and log.jsonl have the same format as here, and the same values up to
   rounding, however many processes there are. The lines of wrong.txt may have any order, and what
   is needed to resume any format.
4. Resuming. If all processes are killed when an epoch's line is in log.jsonl and started again with
   `--resume`, the run ends with the same files as without a kill.
5. Stopping. All processes end after the same epoch if `--patience` epochs bring no gain. Started
   again with `--resume`, they do not train another epoch.

accel-demo check 12
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, RandomSampler
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
    return ids, torch.cat(predictions), torch.cat(labels)


def main(options):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train_set, test_set, order = Rows("train", 1500), Rows("test", 999), torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    train_loader = DataLoader(train_set, 50, sampler=sampler, collate_fn=collate)
    test_loader = DataLoader(test_set, 200, collate_fn=collate)
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

    for epoch in range(progress["epoch"], options.epochs):
        if progress["epochs_without_gain"] == options.patience:  # stops a resumed run, too
            break
        order.manual_seed(epoch)
        torch.manual_seed(epoch)
        model.train()
        losses = []
        for number, batch in enumerate(tqdm(train_loader, disable=None), 1):
            logits = model(batch["rows"].to(device), batch["length"].to(device))
            loss = F.cross_entropy(logits, batch["label"].to(device))
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            if number % ACCUMULATE == 0 or number == len(train_loader):
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        ids, predictions, labels = evaluate(model, test_loader, device)
        score = macro_f1(predictions, labels)
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        if score > progress["best"]:
            progress.update(best=score, epochs_without_gain=0)
            torch.save(model.state_dict(), options.folder / "best.pt")
            hits = (predictions == labels).tolist()
            wrong = [id for id, is_right in zip(ids, hits, strict=True) if not is_right]
            (options.folder / "wrong.txt").write_text("\n".join(wrong))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"scheduler": scheduler.state_dict(), "progress": progress}
        torch.save(state, options.folder / "last.pt")
        line = {"epoch": epoch, "loss": sum(losses) / len(losses), "macro_f1": score}
        with open(options.folder / "log.jsonl", "a") as log:
            log.write(json.dumps(line) + "\n")
        print(f"epoch {epoch}: loss {line['loss']:.4f}, macro F1 {score:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/exercise_12"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
