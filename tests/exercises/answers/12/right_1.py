"""Ported to Accelerate with split_batches, and with files that a kill leaves whole."""

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, RandomSampler
from tqdm import tqdm

from accel_demo.data import packaged_set
from accel_demo.processes.devices import use_cpu

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


def evaluate(accelerator, model, loader):
    """Return the IDs, predictions and labels of all samples, in order, on every rank."""
    model.eval()
    ids, predictions, labels = [], [], []
    with torch.no_grad():
        for batch in loader:
            predicted = model(batch["rows"], batch["length"]).argmax(dim=1)
            predicted, label = accelerator.gather_for_metrics((predicted, batch["label"]))
            ids += accelerator.gather_for_metrics(batch["id"])  # on its own: it has strings
            predictions.append(predicted.cpu())
            labels.append(label.cpu())
    return ids, torch.cat(predictions), torch.cat(labels)


def replace(path, write):
    """Write a file under another name and rename it, so that a kill never leaves half a file."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.replace(path)


def main(options):
    # split_batches: 50 is the size of the global batch, and each process gets 50 / N of it. The
    # prepared scheduler then advances once per optimizer step, not once per process.
    accelerator = Accelerator(
        cpu=use_cpu(),
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    is_main = accelerator.is_main_process
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train_set, test_set, order = Rows("train", 1500), Rows("test", 999), torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    train_loader = DataLoader(train_set, 50, sampler=sampler, collate_fn=collate)
    test_loader = DataLoader(test_set, 200, collate_fn=collate)
    model = RowNet(options.dropout)
    train_loader, test_loader, model = accelerator.prepare(train_loader, test_loader, model)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
    steps = options.epochs * math.ceil(len(train_loader) / ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps))
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)

    progress = {"epoch": 0, "best": 0.0, "epochs_without_gain": 0, "log": []}
    if options.resume:  # no random state: every epoch starts with seeds of its own
        state = torch.load(options.folder / "last.pt", map_location="cpu")
        accelerator.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        progress = state["progress"]
        if is_main:  # in case of a kill between last.pt and the line in the log
            replace(
                options.folder / "log.jsonl", lambda path: path.write_text("".join(progress["log"]))
            )
        if progress["epochs_without_gain"] == options.patience:  # killed after the last epoch
            accelerator.end_training()
            return

    for epoch in range(progress["epoch"], options.epochs):
        order.manual_seed(epoch)  # the same on all ranks, which take parts of the same batches
        # Dropout: a seed that no other rank has in any epoch
        torch.manual_seed(epoch * accelerator.num_processes + accelerator.process_index)
        model.train()
        losses = []
        for batch in tqdm(train_loader, disable=not is_main):
            with accelerator.accumulate(model):
                logits = model(batch["rows"], batch["length"])
                loss = F.cross_entropy(logits, batch["label"])
                accelerator.backward(loss)  # divides by ACCUMULATE
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        # All ranks have equally many samples in each batch, so this is the mean over all samples.
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()

        # From here on, all ranks have the same values, so they take the same branches.
        ids, predictions, labels = evaluate(accelerator, model, test_loader)
        score = macro_f1(predictions, labels)
        line = {"epoch": epoch, "loss": mean_loss, "macro_f1": score}
        progress["log"].append(json.dumps(line) + "\n")
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        is_best = score > progress["best"]
        if is_best:
            progress.update(best=score, epochs_without_gain=0)
        weights = accelerator.get_state_dict(model)  # without the wrapper
        if is_main:
            if is_best:
                replace(options.folder / "best.pt", partial(torch.save, weights))
                hits = (predictions == labels).tolist()
                wrong = [id for id, is_right in zip(ids, hits, strict=True) if not is_right]
                text = "\n".join(wrong)
                replace(options.folder / "wrong.txt", lambda path, text=text: path.write_text(text))
            state = {"model": weights, "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "progress": progress}
            replace(options.folder / "last.pt", partial(torch.save, state))
            with open(options.folder / "log.jsonl", "a") as log:  # after all other files
                log.write(progress["log"][-1])
        accelerator.print(f"epoch {epoch}: loss {mean_loss:.4f}, macro F1 {score:.4f}")
        # One rank's word is enough, so that no rank ever stops alone.
        if progress["epochs_without_gain"] == options.patience:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
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
