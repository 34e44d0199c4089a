"""Ported to Accelerate with an own batch sampler, and two folders for save_state in turn."""

import argparse
import contextlib
import json
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler, Subset
from tqdm import tqdm

from accel_demo.data import packaged_set

ACCUMULATE, WARM_UP, CLIP_NORM = 2, 10, 1.0  # WARM_UP is in optimizer steps
GLOBAL_BATCH, TEST_BATCH = 50, 200


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


class ShardedBatches(Sampler):
    """This rank's slice of every global batch, in the order of RandomSampler(generator=epoch)."""

    def __init__(self, size, global_batch, rank, world):
        if global_batch % world or size % global_batch:
            raise ValueError(f"{world} processes cannot share batches of {global_batch} equally")
        self.size, self.global_batch, self.rank, self.world = size, global_batch, rank, world
        self.epoch = 0

    def __len__(self):
        return self.size // self.global_batch

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        for batch in order.split(self.global_batch):
            yield batch[self.rank :: self.world].tolist()


class Progress:
    def __init__(self):
        self.epoch, self.best, self.epochs_without_gain = 0, 0.0, 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def replace_file(path, write):
    """Write the file under another name first, so that a kill leaves the old or the new one."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


class Trainer:
    def __init__(self, options):
        self.options, self.folder = options, options.folder
        self.accelerator = accelerator = Accelerator(cpu=not torch.cuda.is_available())
        rank, world = accelerator.process_index, accelerator.num_processes
        self.folder.mkdir(parents=True, exist_ok=True)

        torch.manual_seed(0)
        train_set, test_set = Rows("train", 1500), Rows("test", 999)
        # The loaders are sharded here, not by prepare(): no sample is repeated or dropped.
        self.batches = ShardedBatches(len(train_set), GLOBAL_BATCH, rank, world)
        self.train_loader = DataLoader(train_set, batch_sampler=self.batches, collate_fn=collate)
        share = Subset(test_set, range(rank, len(test_set), world))
        self.test_loader = DataLoader(share, math.ceil(TEST_BATCH / world), collate_fn=collate)

        model = RowNet(options.dropout)
        optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        steps = options.epochs * math.ceil(len(self.train_loader) / ACCUMULATE)
        # Not prepared: one call is one optimizer step, whatever the number of processes.
        self.scheduler = LambdaLR(
            self.optimizer.optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps)
        )
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.scheduler, self.progress)
        if options.resume:
            self.restore()

    def fit(self):
        while not self.is_finished():
            epoch = self.progress.epoch
            loss = self.train_epoch(epoch)
            results = self.evaluate()
            predictions = torch.tensor([prediction for _, _, prediction, _ in results])
            labels = torch.tensor([label for _, _, _, label in results])
            # Every rank has all the results, hence the same score and the same decision to stop.
            score = macro_f1(predictions, labels)
            self.progress.epoch += 1
            self.progress.epochs_without_gain += 1
            if score > self.progress.best:
                self.progress.best, self.progress.epochs_without_gain = score, 0
                self.write_best(results)
            self.save({"epoch": epoch, "loss": loss, "macro_f1": score})
            self.accelerator.print(f"epoch {epoch}: loss {loss:.4f}, macro F1 {score:.4f}")
        self.accelerator.end_training()

    def is_finished(self):
        """Also true in a run that is resumed after its last epoch."""
        epoch, patience = self.progress.epoch, self.options.patience
        is_out_of_patience = epoch > 0 and self.progress.epochs_without_gain == patience
        return epoch >= self.options.epochs or is_out_of_patience

    def forward(self, model, batch):
        device = self.accelerator.device
        return model(batch["rows"].to(device), batch["length"].to(device))

    def train_epoch(self, epoch):
        accelerator, last = self.accelerator, len(self.train_loader)
        self.batches.epoch = epoch
        # Another seed on every rank and in every epoch, for dropout. It is set anew in each epoch,
        # so a resumed run needs no generator's state.
        torch.manual_seed(epoch + 1_000_003 * accelerator.process_index)
        self.model.train()
        total = torch.zeros((), dtype=torch.float64)
        bar = tqdm(self.train_loader, disable=not accelerator.is_main_process)
        for number, batch in enumerate(bar, 1):
            is_step = number % ACCUMULATE == 0 or number == last
            with contextlib.nullcontext() if is_step else accelerator.no_sync(self.model):
                logits = self.forward(self.model, batch)
                loss = F.cross_entropy(logits, batch["label"].to(accelerator.device))
                accelerator.backward(loss / ACCUMULATE)
            total += loss.item()
            if is_step:
                accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        mean = (total / last).float().to(accelerator.device)
        return accelerator.reduce(mean, "mean").item()

    @torch.no_grad()
    def evaluate(self):
        """Return (index, id, prediction, label) for each test image, in order, on every rank."""
        accelerator = self.accelerator
        model = accelerator.unwrap_model(self.model)
        model.eval()
        mine, indices = [], iter(self.test_loader.dataset.indices)
        for batch in self.test_loader:
            predictions = self.forward(model, batch).argmax(dim=1).tolist()
            labels = batch["label"].tolist()
            for id, prediction, label in zip(batch["id"], predictions, labels, strict=True):
                mine.append((next(indices), id, prediction, label))
        return sorted(gather_object(mine))

    def write_best(self, results):
        if not self.accelerator.is_main_process:
            return
        weights = self.accelerator.unwrap_model(self.model).state_dict()
        wrong = [id for _, id, prediction, label in results if prediction != label]
        replace_file(self.folder / "best.pt", lambda path: torch.save(weights, path))
        replace_file(self.folder / "wrong.txt", lambda path: path.write_text("\n".join(wrong)))

    def save(self, line):
        """Save the state in the slot that is not in use, point to it, then log the epoch."""
        slot = f"state_{self.progress.epoch % 2}"
        self.accelerator.save_state(self.folder / slot)
        self.accelerator.wait_for_everyone()  # all ranks' files are there
        if self.accelerator.is_main_process:
            log = self.folder / "log.jsonl"
            log_size = log.stat().st_size if log.exists() else 0
            pointer = {"slot": slot, "log_size": log_size, "line": json.dumps(line)}
            replace_file(
                self.folder / "last.json", lambda path: path.write_text(json.dumps(pointer))
            )
            with open(log, "a") as file:
                file.write(pointer["line"] + "\n")

    def restore(self):
        pointer = json.loads((self.folder / "last.json").read_text())
        self.accelerator.load_state(self.folder / pointer["slot"])
        if self.accelerator.is_main_process:  # a kill may have come in the middle of the line
            with open(self.folder / "log.jsonl", "a") as file:
                file.truncate(pointer["log_size"])
                file.write(pointer["line"] + "\n")
        self.accelerator.wait_for_everyone()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/exercise_12"))
    parser.add_argument("--resume", action="store_true")
    Trainer(parser.parse_args()).fit()
