"""The same loop in raw torch.distributed: what train.py is without Accelerate, line for line.

torchrun --standalone --nproc-per-node 2 accel_demo/train_ddp.py
python accel_demo/train_ddp.py --nproc 2
"""

import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.batches import (
    BatchShardSampler,
    check_batches,
    loader_options,
    skip_first_batches,
)
from accel_demo.checkpoint import Run
from accel_demo.config import CommandLine, TrainConfig
from accel_demo.data import download, load_datasets
from accel_demo.errors import UserError, one_line_errors
from accel_demo.metrics import TrainLog, batch_totals
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes import (
    autocast_for,
    check_processes,
    connect,
    describe_run,
    is_launched,
    keep_freed_memory,
    spawn,
)
from accel_demo.results import save_results
from accel_demo.state import TrainingState
from accel_demo.stopping import StopSignals, resume_command


def main(config: TrainConfig, precision: str = "no") -> None:
    # Processes: which one am I, and which device is mine?
    keep_freed_memory()
    device = connect(config.collective_timeout)
    stop = StopSignals(config.log_every)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_processes(world_size, device, precision)
    torch.manual_seed(config.seed + rank)  # dropout differs between processes

    # Data: every process reads a different part of each epoch
    if int(os.environ["LOCAL_RANK"]) == 0:
        download(config)
    dist.barrier()
    train_set, test_set = load_datasets(config)
    check_batches(config, train_set, world_size)
    options = loader_options(config, device)
    sampler = BatchShardSampler(train_set, config.batch_size, world_size, rank, config.seed)
    train_loader = DataLoader(
        train_set, config.batch_size, sampler=sampler, drop_last=True, **options
    )
    test_sampler = DistributedSampler(test_set, world_size, rank, shuffle=False)
    test_loader = DataLoader(test_set, config.eval_batch_size, sampler=test_sampler, **options)

    # Model: every process starts from the same weights and shares its gradients
    model = make_model(config).to(device)
    if config.compile:
        model.compile()
    device_ids = None if device.type == "cpu" else [device.index]
    model = DistributedDataParallel(model, device_ids=device_ids)
    steps_per_epoch = math.ceil(len(train_loader) / config.accumulate)
    total_steps = min(config.epochs * steps_per_epoch, config.max_steps or math.inf)
    optimizer = make_optimizer(config, model, precision)
    scheduler = make_scheduler(config, optimizer, total_steps)
    autocast = autocast_for(device, precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    # Resume: from a checkpoint where --resume names one, and with the same bits from there on
    backend = f"DistributedDataParallel, {dist.get_backend()}"
    environment = describe_run("train_ddp", world_size, backend, device, precision)
    run = Run(config, environment, steps_per_epoch, is_main=rank == 0)
    state = TrainingState(rank, model.module, optimizer, scheduler, scaler)
    run.settle_buckets(model, train_set, device)
    run.load(state.load, rank, scheduler)
    log = TrainLog(run.folder, rank == 0, run.start.log, config.track)
    step, is_stopping = run.start.step, False

    for epoch in range(run.start.epoch, config.epochs):
        train_set.set_epoch(epoch)
        sampler.set_epoch(epoch)
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
            with nullcontext() if sync_gradients else model.no_sync():
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
                dist.all_reduce(totals)
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
        with torch.no_grad(), autocast:
            logits = torch.cat([model(images.to(device)).float() for images, _ in test_loader])
        gathered = [torch.empty_like(logits) for _ in range(world_size)]
        dist.all_gather(gathered, logits)
        logits = torch.stack(gathered, dim=1).flatten(0, 1)[: len(test_set)]
        test_totals = batch_totals(logits, test_set.labels.to(device))

        # Report: one process speaks for all
        log.end_epoch(step, test_totals)
        run.save(state.save, epoch + 1, 0, step, log)
        if step == total_steps:
            break

    # Finish: one process saves, and all leave together
    if is_stopping:
        log.stopped(step, resume_command(run.folder))
    elif rank == 0:
        save_results(run.folder, model.module.state_dict(), config, test_set, device)
        log.finish(world_size, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_line_errors():
        command_line = CommandLine(__doc__, precision=True)
        help = "without torchrun: how many processes to spawn (default: 1)"
        command_line.add_argument("--nproc", type=int, metavar="N", help=help)
        config, options = command_line.read()
        if not is_launched():
            processes = 1 if options.nproc is None else options.nproc
            spawn(main, processes, config, options.mixed_precision)
        elif options.nproc is None:  # torchrun has started this process, and others like it
            main(config, options.mixed_precision)
        else:
            raise UserError("--nproc is for starting without torchrun: leave it out")
