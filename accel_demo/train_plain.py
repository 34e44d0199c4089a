"""Train in one process with plain PyTorch: the loop from train.py without Accelerate.

python accel_demo/train_plain.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from accel_demo.batches import loader_options, skip_first_batches
from accel_demo.config import CommandLine, TrainConfig
from accel_demo.data import download, load_datasets
from accel_demo.errors import one_line_errors
from accel_demo.metrics import batch_totals
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes.devices import autocast_for, own_device
from accel_demo.processes.launch_checks import check_launch
from accel_demo.processes.memory import keep_freed_memory
from accel_demo.processes.signals import catch_stop_signals
from accel_demo.results import save_results
from accel_demo.run.folder import describe_run
from accel_demo.run.run import claim_run
from accel_demo.run.state import TrainingState


def main(config: TrainConfig, precision: str = "no") -> None:
    # Processes: there is only this one; choose its device
    device = own_device()
    stop_signals = catch_stop_signals(config.log_every)  # Ctrl-C ends the run after a whole step
    check_launch(1, device, precision)  # fails if a launcher started several
    keep_freed_memory()  # steps are faster on a CPU
    torch.manual_seed(config.seed)

    # Data: read the training images in a new random order in each epoch
    download(config)
    train_set, test_set = load_datasets(config, world_size=1)
    options = loader_options(config, device)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    train_loader = DataLoader(
        train_set, config.batch_size, sampler=sampler, drop_last=True, **options
    )
    test_loader = DataLoader(test_set, config.eval_batch_size, **options)

    # Model: one model on one device
    model = make_model(config).to(device)
    optimizer = make_optimizer(config, model, precision)  # fused, except under fp16
    scheduler = make_scheduler(config, optimizer, config.total_steps(len(train_loader)))
    autocast = autocast_for(device, precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    # Resume: rename a finished run in the folder, or continue from a checkpoint with --resume
    environment = describe_run("train_plain", "plain", device, precision)
    run = claim_run(config, environment, stop_signals, device, len(train_loader))
    state = TrainingState(model, optimizer, scheduler, scaler)
    run.load_checkpoint(state.load, model, scheduler)
    run.begin()  # deletes all results after the start position
    train_totals = torch.zeros(3, device=device)  # loss, correct, images

    for epoch in run.epochs():
        train_set.set_epoch(epoch)  # new random augmentation, if there is any
        order.manual_seed(config.seed + epoch)  # new random order
        done = run.batches_to_skip
        batches = skip_first_batches(train_loader, done, options) if done else train_loader
        model.train()
        for images, labels in run.batches(batches):  # ends early on --max-steps or a signal
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # Accumulate: update the weights only after the last micro-batch of a window
            ends_window = run.ends_window
            with autocast:
                logits = model(images)
            logits = logits.float()
            loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
            loss = loss * run.window_scale / config.accumulate
            scaler.scale(loss).backward()
            if ends_window:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            train_totals += batch_totals(logits, labels)  # without label smoothing
            if ends_window:
                decision = run.finish_step(scheduler.get_last_lr()[0])
                if scaler.get_scale() >= scale:  # fp16 skips steps that overflow
                    scheduler.step()
                if decision.must_log:
                    run.log_interval(train_totals)
                    train_totals.zero_()
                if decision.must_save:
                    run.save(state.save)
        if run.is_stopping:
            break

        # Evaluate: add up the metrics of all test images
        model.eval()
        test_totals = torch.zeros(3, device=device)  # loss, correct, images
        with torch.no_grad(), autocast:
            for images, labels in test_loader:
                logits = model(images.to(device))
                test_totals += batch_totals(logits, labels.to(device))

        # Report: log the epoch, and save a checkpoint
        run.end_epoch(test_totals, state.save)

    # Finish: save and test the model, unless the run was stopped
    if not run.is_stopping:
        save_results(run.folder, model.state_dict(), config, test_set, precision, device)
    run.finish()


if __name__ == "__main__":
    with one_line_errors():
        command_line = CommandLine(__doc__, precision=True)
        config, arguments = command_line.read()
        main(config, arguments.mixed_precision)
