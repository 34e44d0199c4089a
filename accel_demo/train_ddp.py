"""Train with raw torch.distributed: the loop from train.py without Accelerate.

torchrun --standalone --nproc-per-node 2 accel_demo/train_ddp.py
python accel_demo/train_ddp.py --nproc 2
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.batches import BatchShardSampler, loader_options, skip_first_batches
from accel_demo.config import CommandLine, TrainConfig
from accel_demo.data import download, load_datasets
from accel_demo.errors import UserError, one_line_errors
from accel_demo.metrics import batch_totals
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes.devices import autocast_for, own_device
from accel_demo.processes.environment import is_launched
from accel_demo.processes.launch import spawn
from accel_demo.processes.launch_checks import check_launch
from accel_demo.processes.lost_processes import report_lost_processes
from accel_demo.processes.memory import keep_freed_memory
from accel_demo.processes.peers import exchange_process_ids
from accel_demo.processes.rendezvous import join_rendezvous
from accel_demo.processes.signals import catch_stop_signals
from accel_demo.results import save_results
from accel_demo.run.folder import describe_run
from accel_demo.run.run import claim_run
from accel_demo.run.state import TrainingState


def main(config: TrainConfig, precision: str = "no") -> None:
    # Processes: connect them, and assign a device to each
    device = own_device()
    gpu = None if device.type == "cpu" else device
    if gpu:
        torch.accelerator.set_device_index(gpu)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, device_id=gpu, **join_rendezvous(config.collective_timeout))
    exchange_process_ids()  # so that an error can name a process that has died
    stop_signals = catch_stop_signals(config.log_every)  # Ctrl-C ends all ranks after the same step
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_launch(world_size, device, precision)
    keep_freed_memory()  # steps are faster on a CPU
    torch.manual_seed(config.seed + rank)  # so that dropout differs between processes

    # Data: each process reads a different part of each epoch
    if int(os.environ["LOCAL_RANK"]) == 0:
        download(config)
    dist.barrier()
    train_set, test_set = load_datasets(config, world_size)
    options = loader_options(config, device)
    sampler = BatchShardSampler(train_set, config.batch_size, world_size, rank, config.seed)
    train_loader = DataLoader(
        train_set, config.batch_size, sampler=sampler, drop_last=True, **options
    )
    test_sampler = DistributedSampler(test_set, world_size, rank, shuffle=False)
    test_loader = DataLoader(test_set, config.eval_batch_size, sampler=test_sampler, **options)

    # Model: all processes start with the weights of rank 0, and average their gradients
    model = make_model(config).to(device)
    model = DistributedDataParallel(model, device_ids=[gpu] if gpu else None)
    optimizer = make_optimizer(config, model, precision)  # fused, except under fp16
    scheduler = make_scheduler(config, optimizer, config.total_steps(len(train_loader)))
    autocast = autocast_for(device, precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    # Resume: rename a finished run in the folder, or continue from a checkpoint with --resume
    environment = describe_run("train_ddp", "DistributedDataParallel", device, precision)
    run = claim_run(config, environment, stop_signals, device, len(train_loader))
    state = TrainingState(model.module, optimizer, scheduler, scaler, rank)
    run.settle_buckets(model, train_set)  # so that DDP continues with the same buckets
    run.load_checkpoint(state.load, model, scheduler)
    run.begin()  # deletes all results after the start position
    train_totals = torch.zeros(3, device=device)  # loss, correct, images

    for epoch in run.epochs():
        train_set.set_epoch(epoch)  # new random augmentation, if there is any
        sampler.set_epoch(epoch)  # new random order
        done = run.batches_to_skip
        batches = skip_first_batches(train_loader, done, options) if done else train_loader
        model.train()
        for images, labels in run.batches(batches):  # ends early on --max-steps or a signal
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # Accumulate: average the gradients only on the last micro-batch of a window
            ends_window = run.ends_window
            with nullcontext() if ends_window else model.no_sync():
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
                    dist.all_reduce(train_totals)
                    run.log_interval(train_totals)
                    train_totals.zero_()
                if decision.must_save:
                    run.save(state.save)
        if run.is_stopping:
            break

        # Evaluate: gather all predictions, and drop the samples that pad the test set
        model.eval()
        with torch.no_grad(), autocast:
            logits = torch.cat([model(images.to(device)).float() for images, _ in test_loader])
        gathered = [torch.empty_like(logits) for _ in range(world_size)]
        dist.all_gather(gathered, logits)
        logits = torch.stack(gathered, dim=1).flatten(0, 1)[: len(test_set)]  # in dataset order
        test_totals = batch_totals(logits, test_set.labels.to(device))

        # Report: log the epoch, and save a checkpoint
        run.end_epoch(test_totals, state.save)

    # Finish: unless the run was stopped, rank 0 saves and tests the model; then all exit together
    if rank == 0 and not run.is_stopping:
        save_results(run.folder, model.module.state_dict(), config, test_set, precision, device)
    run.finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_line_errors(), report_lost_processes():
        command_line = CommandLine(__doc__, precision=True)
        help = "number of processes to spawn if torchrun is not used (default: 1)"
        command_line.add_argument("--nproc", type=int, metavar="N", help=help)
        config, arguments = command_line.read()
        if not is_launched():
            processes = 1 if arguments.nproc is None else arguments.nproc
            spawn(main, processes, config, arguments.mixed_precision)
        elif arguments.nproc is None:  # started by torchrun or a similar launcher
            main(config, arguments.mixed_precision)
        else:
            raise UserError("--nproc cannot be used with torchrun. Leave it out.")
