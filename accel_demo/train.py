"""Train a model with Accelerate: in one process or several, on CPUs or GPUs.

python accel_demo/train.py
accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml accel_demo/train.py

`accelerator.prepare` moves the model and each batch to the device of this process. If there are
several processes, it also wraps the model in DistributedDataParallel (DDP), or shards it with FSDP2
if the launch config says so. The launcher, not `config`, sets the precision. With fp16, Accelerate
scales the loss.

With `--model tiny_gpt --dataset text`, the `images` are sequences of characters.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, RandomSampler

from accel_demo.batches import loader_options
from accel_demo.config import CommandLine, TrainConfig
from accel_demo.data import download, load_datasets
from accel_demo.errors import one_line_errors
from accel_demo.metrics import batch_totals
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes.connect import connect
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.fsdp import prepare_for_fsdp
from accel_demo.processes.launch_checks import check_launch
from accel_demo.processes.lost_processes import report_lost_processes
from accel_demo.processes.memory import keep_freed_memory
from accel_demo.processes.signals import catch_stop_signals
from accel_demo.results import save_results
from accel_demo.run.folder import describe_run
from accel_demo.run.run import claim_run


def main(config: TrainConfig) -> None:
    # Processes: connect them, and assign a device to each
    connect(config.collective_timeout)  # Accelerator() alone could fail after an elastic restart
    stop_signals = catch_stop_signals(config.log_every)  # Ctrl-C ends all ranks after the same step
    accelerator = Accelerator(
        cpu=use_cpu(),
        gradient_accumulation_steps=config.accumulate,
        step_scheduler_with_optimizer=False,  # or the schedule would advance once per process
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=config.seed, non_blocking=True
        ),
    )
    device, precision = accelerator.device, accelerator.mixed_precision
    check_launch(accelerator.num_processes, device, precision)
    keep_freed_memory()  # steps are faster on a CPU
    set_seed(config.seed, device_specific=True)  # so that dropout differs between processes

    # Data: each process reads a different part of each epoch
    with accelerator.local_main_process_first():
        download(config)
    train_set, test_set = load_datasets(config, accelerator.num_processes)
    options = loader_options(config, device)
    sampler = RandomSampler(train_set)
    train_loader = DataLoader(
        train_set, config.batch_size, sampler=sampler, drop_last=True, **options
    )
    test_loader = DataLoader(test_set, config.eval_batch_size, **options)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    # Model: all processes start with the weights of rank 0, and average their gradients
    model = make_model(config)
    prepare_for_fsdp(model, device)  # does nothing unless the launch config selects FSDP
    optimizer = make_optimizer(config, model, precision)  # fused, except under fp16
    scheduler = make_scheduler(config, optimizer, config.total_steps(len(train_loader)))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    # Resume: rename a finished run in the folder, or continue from a checkpoint with --resume
    method = f"distributed_type {accelerator.distributed_type.value}"
    environment = describe_run("train", method, device, precision)
    run = claim_run(config, environment, stop_signals, device, len(train_loader))
    run.settle_buckets(model, train_set)  # so that DDP continues with the same buckets
    run.load_checkpoint(accelerator.load_state, model, scheduler)
    run.begin()  # deletes all results after the start position
    train_totals = torch.zeros(3, device=device)  # loss, correct, images

    for epoch in run.epochs():
        train_set.set_epoch(epoch)  # new random augmentation, if there is any
        train_loader.set_epoch(epoch)  # new random order
        done = run.batches_to_skip
        batches = accelerator.skip_first_batches(train_loader, done) if done else train_loader
        model.train()
        for images, labels in run.batches(batches):  # ends early on --max-steps or a signal
            # Accumulate: average the gradients only on the last micro-batch of a window
            with accelerator.accumulate(model):
                logits = model(images)
                loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
                loss = loss * run.window_scale  # above 1 in a short window at the end of an epoch
                accelerator.backward(loss)  # divides the loss by config.accumulate
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), config.clip_norm)
                optimizer.step()  # step() and zero_grad() do nothing until the window ends
                optimizer.zero_grad()
            train_totals += batch_totals(logits, labels)  # without label smoothing
            if accelerator.sync_gradients:
                decision = run.finish_step(scheduler.get_last_lr()[0])
                if not accelerator.optimizer_step_was_skipped:  # fp16 skips steps that overflow
                    scheduler.step()
                if decision.must_log:
                    run.log_interval(accelerator.reduce(train_totals))
                    train_totals.zero_()
                if decision.must_save:
                    run.save(accelerator.save_state)
        if run.is_stopping:
            break

        # Evaluate: gather all predictions, and drop the samples that pad the last batch
        model.eval()
        test_totals = torch.zeros(3, device=device)  # loss, correct, images
        with torch.no_grad():
            for images, labels in test_loader:
                logits, labels = accelerator.gather_for_metrics((model(images), labels))
                test_totals += batch_totals(logits, labels)

        # Report: log the epoch, and save a checkpoint
        run.end_epoch(test_totals, accelerator.save_state)

    # Finish: unless the run was stopped, rank 0 saves and tests the model; then all exit together
    state_dict = accelerator.get_state_dict(model)  # with FSDP, all processes must call this
    if accelerator.is_main_process and not run.is_stopping:
        save_results(run.folder, state_dict, config, test_set, precision, device)
    run.finish()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    with one_line_errors(), report_lost_processes():
        config, _ = CommandLine(__doc__).read()
        main(config)
