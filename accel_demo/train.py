"""The loop, written once against Accelerator. One process or many, CPU or GPU: this same file.

accelerate launch --config_file accelerate_configs/cpu.yaml accel_demo/train.py
accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml accel_demo/train.py
"""

import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from accel_demo.batches import check_batches, loader_options
from accel_demo.checkpoint import Run
from accel_demo.config import CommandLine, TrainConfig
from accel_demo.data import download, load_datasets
from accel_demo.errors import one_line_errors
from accel_demo.metrics import TrainLog, batch_totals
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes import check_processes, connect, describe_run, keep_freed_memory, use_cpu
from accel_demo.results import save_results
from accel_demo.stopping import StopSignals, resume_command


def main(config: TrainConfig) -> None:
    # Processes: which one am I, and which device is mine?
    keep_freed_memory()
    connect(config.collective_timeout)  # Accelerate would too, but fail after a worker's restart
    stop = StopSignals(config.log_every)
    accelerator = Accelerator(
        cpu=use_cpu(),
        gradient_accumulation_steps=config.accumulate,
        step_scheduler_with_optimizer=False,  # or it steps once per process
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=config.seed, non_blocking=True
        ),
        log_with=None if config.track == "no" else config.track,
        project_dir="runs",  # a tracker needs a folder now; it gets the run's own below
    )
    device, world_size = accelerator.device, accelerator.num_processes
    check_processes(world_size, device, accelerator.mixed_precision)
    set_seed(config.seed, device_specific=True)  # dropout differs between processes

    # Data: every process reads a different part of each epoch
    with accelerator.local_main_process_first():
        download(config)
    train_set, test_set = load_datasets(config)
    check_batches(config, train_set, world_size)
    options = loader_options(config, device)
    train_loader = DataLoader(train_set, config.batch_size, shuffle=True, drop_last=True, **options)
    test_loader = DataLoader(test_set, config.eval_batch_size, **options)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    # Model: every process starts from the same weights and shares its gradients
    model = make_model(config)
    if config.compile:
        model.compile()
    steps_per_epoch = math.ceil(len(train_loader) / config.accumulate)
    total_steps = min(config.epochs * steps_per_epoch, config.max_steps or math.inf)
    optimizer = make_optimizer(config, model, accelerator.mixed_precision)
    scheduler = make_scheduler(config, optimizer, total_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    # Resume: from a checkpoint where --resume names one, and with the same bits from there on
    backend = f"distributed_type {accelerator.distributed_type.value}"
    backend += f", {accelerator.state.backend}" if world_size > 1 else ""
    environment = describe_run("train", world_size, backend, device, accelerator.mixed_precision)
    run = Run(config, environment, steps_per_epoch, accelerator.is_main_process)
    run.settle_buckets(model, train_set, device)
    run.load(accelerator.load_state, accelerator.process_index, scheduler.scheduler)
    accelerator.project_configuration.logging_dir = run.folder
    options = {"purge_step": run.start.step + 1}  # a viewer forgets what came after that
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": options})
    log = TrainLog(run.folder, accelerator.is_main_process, run.start.log)
    step, is_stopping = run.start.step, False

    for epoch in range(run.start.epoch, config.epochs):
        train_set.set_epoch(epoch)
        train_loader.set_epoch(epoch)
        done = run.batches_done(epoch)
        batches = accelerator.skip_first_batches(train_loader, done) if done else train_loader
        model.train()
        totals = torch.zeros(3, device=device)
        bar = log.start_epoch(epoch, config, len(train_loader), done)
        for index, (images, labels) in enumerate(batches, start=done):
            # Accumulate: gradients are shared on the last micro-batch only
            first = index - index % config.accumulate  # of its window; the last may be short
            window = min(config.accumulate, len(train_loader) - first)
            with accelerator.accumulate(model):
                logits = model(images)
                loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
                loss = loss * (config.accumulate / window)  # backward divides by accumulate
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), config.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            totals += batch_totals(logits, labels)
            bar.update()
            if not accelerator.sync_gradients:
                continue
            step += 1
            learning_rate = scheduler.get_last_lr()[0]
            if not accelerator.optimizer_step_was_skipped:  # fp16 skips a step that overflowed
                scheduler.step()
            is_last = index + 1 == len(train_loader) or step == total_steps
            is_stopping = step < total_steps and stop.after(step)
            is_saved = is_stopping or (run.is_due(step) and not is_last)
            if step % config.log_every == 0 or is_last or is_saved:
                values = log.interval(step, learning_rate, accelerator.reduce(totals))
                accelerator.log(values, step=step)
                totals.zero_()
            if is_saved:
                run.save(accelerator.save_state, epoch, index + 1, step, log)
            if step == total_steps or is_stopping:
                break
        if is_stopping:
            break

        # Evaluate: gather every process's predictions, and drop the padding of the last batch
        model.eval()
        test_totals = torch.zeros(3, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                logits, labels = accelerator.gather_for_metrics((model(images), labels))
                test_totals += batch_totals(logits, labels)

        # Report: one process speaks for all
        accelerator.log(log.end_epoch(step, test_totals), step=step)
        run.save(accelerator.save_state, epoch + 1, 0, step, log)
        if step == total_steps:
            break

    # Finish: one process saves, and all leave together
    state_dict = accelerator.get_state_dict(model)
    if is_stopping:
        log.stopped(step, resume_command(run.folder))
    elif accelerator.is_main_process:
        save_results(run.folder, state_dict, config, test_set, device)
        log.finish(world_size, device)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    with one_line_errors():
        main(CommandLine(__doc__).read()[0])
