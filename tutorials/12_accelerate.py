"""The same training with Accelerate.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml tutorials/12_accelerate.py
"""

import argparse
import csv
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, RandomSampler
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


class Progress(dict):
    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.update(state)


def evaluate(model, loader, accelerator):
    model.eval()
    ids, logits, targets = [], [], []
    with torch.no_grad():
        for batch in loader:
            ids += accelerator.gather_for_metrics(batch["id"])
            logits.append(accelerator.gather_for_metrics(model(batch["image"]).flatten()))
            targets.append(accelerator.gather_for_metrics(batch["is_shirt"]))
    return ids, torch.cat(logits), torch.cat(targets)


def main(options):
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=ACCUMULATE,
        step_scheduler_with_optimizer=False,
        log_with="tensorboard",
        project_dir=options.folder,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    train_set, test_set, order = Shirts("train"), Shirts("test"), torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    processes = accelerator.num_processes
    assert BATCH_SIZE % processes == 0
    batch_size, workers = BATCH_SIZE // processes, math.ceil(options.workers / processes)
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, num_workers=workers)
    test_loader = DataLoader(test_set, batch_size=300, num_workers=workers)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    steps = options.epochs * math.ceil(len(train_loader) / ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.init_trackers("log")

    progress = Progress(epoch=0, step=0, best=0.0, epochs_without_gain=0)
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.folder / "last")

    for epoch in range(progress["epoch"], options.epochs):
        if accelerator.is_main_process and progress["epochs_without_gain"] == PATIENCE:
            accelerator.set_trigger()
        if accelerator.check_trigger():  # called on every rank
            accelerator.print("stopped early")
            break
        seed = options.seed + 1_000 * epoch  # a resumed run needs no random state
        order.manual_seed(seed)
        set_seed(seed, device_specific=True)  # different dropout and mirroring on each rank
        model.train()
        loss_of_step = 0.0
        is_quiet = None if accelerator.is_main_process else True  # None: a bar on a terminal only
        for batch in tqdm(train_loader, f"epoch {epoch + 1}", disable=is_quiet):
            with accelerator.accumulate(model):
                logits = model(mirror_half(batch["image"])).flatten()
                loss = F.binary_cross_entropy_with_logits(logits, batch["is_shirt"])
                accelerator.backward(loss)  # divides it by ACCUMULATE
                loss_of_step += loss.detach() / ACCUMULATE
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()  # both do nothing before the last micro-batch of a step
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
                progress["step"] += 1
                loss_of_step = accelerator.reduce(loss_of_step, "mean").item()
                values = {"loss": loss_of_step, "gradient norm": norm.item()}
                accelerator.log(values, progress["step"])
                loss_of_step = 0.0

        ids, logits, targets = evaluate(model, test_loader, accelerator)
        score = auc(logits, targets)
        accelerator.log({"AUC": score}, progress["step"])
        progress["epoch"] = epoch + 1
        progress["epochs_without_gain"] += 1
        if score > progress["best"]:
            progress.update(best=score, epochs_without_gain=0)
            weights = accelerator.get_state_dict(model)  # called on every rank
            accelerator.save(weights, options.folder / "best.pt")  # the main process writes
            if accelerator.is_main_process:
                with open(options.folder / "best.csv", "w", newline="") as file:
                    csv.writer(file).writerows(zip(ids, logits.tolist(), strict=True))
        accelerator.save_state(options.folder / "last")  # called on every rank
        accelerator.print(f"epoch {epoch + 1}: AUC {score:.4f} on {len(ids)} test images")
    accelerator.end_training()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="of each data loader")
    parser.add_argument("--folder", type=Path, default=Path("runs/page_12/accelerate"))
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
