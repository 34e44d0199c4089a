"""Our answer to exercise 12: ported to Accelerate."""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, RandomSampler
from tqdm import tqdm

from accel_demo.data import packaged_set

BATCH_SIZE, ACCUMULATE, WARM_UP, CLIP_NORM = 50, 2, 10, 1.0  # WARM_UP is in optimizer steps


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


class Progress(dict):
    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.update(state)


def evaluate(model, loader, accelerator):
    model.eval()
    ids, predictions, labels = [], [], []
    with torch.no_grad():
        for batch in loader:
            logits = model(batch["rows"], batch["length"])
            results = accelerator.gather_for_metrics((logits.argmax(dim=1), batch["label"]))
            ids += accelerator.gather_for_metrics(batch["id"])
            predictions.append(results[0].cpu())
            labels.append(results[1].cpu())
    return ids, torch.cat(predictions), torch.cat(labels)


def main(options):
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=ACCUMULATE,
        step_scheduler_with_optimizer=False,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train_set, test_set, order = Rows("train", 1500), Rows("test", 999), torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    batch_size = BATCH_SIZE // accelerator.num_processes
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, collate_fn=collate)
    test_loader = DataLoader(test_set, 200, collate_fn=collate)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)
    model = RowNet(options.dropout)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
    steps = options.epochs * math.ceil(len(train_loader) / ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    progress = Progress(epoch=0, best=0.0, epochs_without_gain=0)
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.folder / "last")

    for epoch in range(progress["epoch"], options.epochs):
        if accelerator.is_main_process and progress["epochs_without_gain"] == options.patience:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
        order.manual_seed(epoch)
        set_seed(1000 * epoch, device_specific=True)
        model.train()
        losses = []
        for batch in tqdm(train_loader, disable=None if accelerator.is_main_process else True):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["rows"], batch["length"]), batch["label"])
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
        loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()

        ids, predictions, labels = evaluate(model, test_loader, accelerator)
        score = macro_f1(predictions, labels)
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        if score > progress["best"]:
            progress.update(best=score, epochs_without_gain=0)
            accelerator.save(accelerator.get_state_dict(model), options.folder / "best.pt")
            hits = (predictions == labels).tolist()
            wrong = [id for id, is_right in zip(ids, hits, strict=True) if not is_right]
            if accelerator.is_main_process:
                (options.folder / "wrong.txt").write_text("\n".join(wrong))
        accelerator.save_state(options.folder / "last")
        if accelerator.is_main_process:
            line = {"epoch": epoch, "loss": loss, "macro_f1": score}
            with open(options.folder / "log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            print(f"epoch {epoch}: loss {loss:.4f}, macro F1 {score:.4f}")
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
