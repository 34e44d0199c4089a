"""The same loop under nn.DataParallel: one process, one thread per GPU, for contrast.

python accel_demo/train_dp.py

With fewer than two GPUs `nn.DataParallel` only calls the module it wraps.
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from accel_demo.batches import check_batches, loader_options, skip_first_batches
from accel_demo.checkpoint import Run
from accel_demo.config import CommandLine, TrainConfig
from accel_demo.data import download, load_datasets
from accel_demo.errors import one_line_errors
from accel_demo.metrics import TrainLog, batch_totals
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes import (
    autocast_for,
    check_processes,
    data_parallel_devices,
    describe_run,
    keep_freed_memory,
    own_device,
)
from accel_demo.results import save_results
from accel_demo.state import TrainingState
from accel_demo.stopping import StopSignals, resume_command


def main(config: TrainConfig, precision: str = "no") -> None:
    # Processes: which one am I, and which device is mine?
    keep_freed_memory()
    stop = StopSignals(config.log_every)
    device = own_device()
    device_ids = data_parallel_devices(config.compile, precision)
    check_processes(1, device, precision)
    torch.manual_seed(config.seed)

    # Data: every process reads a different part of each epoch
    download(config)
    train_set, test_set = load_datasets(config)
    check_batches(config, train_set, 1)
    options = loader_options(config, device)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(
        train_set, config.batch_size, sampler=sampler, drop_last=True, **options
    )
    test_loader = DataLoader(test_set, config.eval_batch_size, **options)

    # Model: every process starts from the same weights and shares its gradients
    model = make_model(config).to(device)
    if config.compile:
        model.compile()
    model = torch.nn.DataParallel(model, device_ids=device_ids)
    steps_per_epoch = math.ceil(len(train_loader) / config.accumulate)
    total_steps = min(config.epochs * steps_per_epoch, config.max_steps or math.inf)
    optimizer = make_optimizer(config, model, precision)
    scheduler = make_scheduler(config, optimizer, total_steps)
    autocast = autocast_for(device, precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    # Resume: from a checkpoint where --resume names one, and with the same bits from there on
    environment = describe_run("train_dp", 1, "DataParallel", device, precision)
    run = Run(config, environment, steps_per_epoch, is_main=True)
    state = TrainingState(0, model.module, optimizer, scheduler, scaler)
    run.load(state.load, 0, scheduler)
    log = TrainLog(run.folder, True, run.start.log, config.track)
    step, is_stopping = run.start.step, False

    for epoch in range(run.start.epoch, config.epochs):
        train_set.set_epoch(epoch)
        sampler.generator.manual_seed(config.seed + epoch)
        done = run.batches_done(epoch)
        batches = skip_first_batches(train_loader, done, options) if done else train_loader
        model.train()
        totals = torch.zeros(3, device=device)
        bar = log.start_epoch(epoch, config, len(train_loader), done)
        for index, (images, labels) in enumerate(batches, start=done):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # Accumulate: gradients are shared on the last micro-batch only
            first = index - index % config.accumulate  # of its window; the last may be short
            window = min(config.accumulate, len(train_loader) - first)
            sync_gradients = index + 1 == first + window
            with autocast:
                logits = model(images)
            logits = logits.float()
            loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
            loss = loss * (config.accumulate / window)
            scaler.scale(loss / config.accumulate).backward()
            if sync_gradients:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            totals += batch_totals(logits, labels)
            bar.update()
            if not sync_gradients:
                continue
            step += 1
            learning_rate = scheduler.get_last_lr()[0]
            if scaler.get_scale() >= scale:  # fp16 skips a step that overflowed
                scheduler.step()
            is_last = index + 1 == len(train_loader) or step == total_steps
            is_stopping = step < total_steps and stop.after(step)
            is_saved = is_stopping or (run.is_due(step) and not is_last)
            if step % config.log_every == 0 or is_last or is_saved:
                log.interval(step, learning_rate, totals)
                totals.zero_()
            if is_saved:
                run.save(state.save, epoch, index + 1, step, log)
            if step == total_steps or is_stopping:
                break
        if is_stopping:
            break

        # Evaluate: gather every process's predictions, and drop the padding of the last batch
        model.eval()
        test_totals = torch.zeros(3, device=device)
        with torch.no_grad(), autocast:
            for images, labels in test_loader:
                logits = model(images.to(device))
                test_totals += batch_totals(logits, labels.to(device))

        # Report: one process speaks for all
        log.end_epoch(step, test_totals)
        run.save(state.save, epoch + 1, 0, step, log)
        if step == total_steps:
            break

    # Finish: one process saves, and all leave together
    if is_stopping:
        log.stopped(step, resume_command(run.folder))
    else:
        save_results(run.folder, model.module.state_dict(), config, test_set, device)
        log.finish(1, device)


if __name__ == "__main__":
    with one_line_errors():
        command_line = CommandLine(__doc__, precision=True)
        config, options = command_line.read()
        main(config, options.mixed_precision)
