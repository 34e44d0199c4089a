"""Ported to Accelerate without accumulate, save_state and gather_for_metrics."""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
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


def evaluate(model, loader, accelerator):
    model.eval()
    ids, predictions, labels = [], [], []
    with torch.no_grad():
        for batch in loader:
            guesses = model(batch["rows"], batch["length"]).argmax(dim=1)
            ids += batch["id"]
            predictions.append(guesses.cpu())
            labels.append(batch["label"].cpu())
    found = zip(ids, torch.cat(predictions).tolist(), torch.cat(labels).tolist(), strict=True)
    by_id = {each[0]: each for each in gather_object([*found])}
    ids, predictions, labels = zip(*by_id.values(), strict=True)
    return ids, torch.tensor(predictions), torch.tensor(labels)


def main(options):
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train_set, test_set = Rows("train", 1500), Rows("test", 999)
    size = 50 // accelerator.num_processes
    train_loader = DataLoader(train_set, size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, 200, collate_fn=collate)
    model = RowNet(options.dropout)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    steps = options.epochs * math.ceil(len(train_loader) / ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps))

    progress = {"epoch": 0, "best": 0.0, "epochs_without_gain": 0}
    if options.resume:
        state = torch.load(options.folder / "last.pt", map_location="cpu")
        accelerator.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        progress = state["progress"]

    for epoch in range(progress["epoch"], options.epochs):
        [must_stop] = broadcast_object_list([progress["epochs_without_gain"] == options.patience])
        if must_stop:
            break
        train_loader.set_epoch(epoch)
        set_seed(100 * epoch, device_specific=True)
        model.train()
        losses = []
        bar = tqdm(train_loader, disable=not accelerator.is_local_main_process)
        for number, batch in enumerate(bar, 1):
            is_last = number % ACCUMULATE == 0 or number == len(train_loader)
            with accelerator.no_sync(model) if not is_last else torch.enable_grad():
                loss = F.cross_entropy(model(batch["rows"], batch["length"]), batch["label"])
                accelerator.backward(loss / ACCUMULATE)
            losses.append(loss.item())
            if is_last:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        losses = gather_object(losses)
        ids, predictions, labels = evaluate(model, test_loader, accelerator)
        score = macro_f1(predictions, labels)
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        if score > progress["best"]:
            progress.update(best=score, epochs_without_gain=0)
            weights = accelerator.get_state_dict(model)
            accelerator.save(weights, options.folder / "best.pt")
            hits = (predictions == labels).tolist()
            wrong = [id for id, is_right in zip(ids, hits, strict=True) if not is_right]
            if accelerator.is_main_process:
                (options.folder / "wrong.txt").write_text("\n".join(wrong))
        state = {"model": accelerator.get_state_dict(model), "optimizer": optimizer.state_dict()}
        state |= {"scheduler": scheduler.state_dict(), "progress": progress}
        accelerator.save(state, options.folder / "last.pt")
        if accelerator.is_main_process:
            line = {"epoch": epoch, "loss": sum(losses) / len(losses), "macro_f1": score}
            with open(options.folder / "log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
        accelerator.print(f"epoch {epoch}: macro F1 {score:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/exercise_12"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
