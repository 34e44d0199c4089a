"""Page 25: the numbers that compare DataParallel with DDP, and the program that plans a run."""

import inspect
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel, comm
from torch.nn.parallel.replicate import _broadcast_coalesced_reshape
from torch.profiler import ProfilerActivity, profile

from accel_demo.anatomy import memory
from accel_demo.lab.audit.command import run_checks
from tests.exercises.wrong_answers import edited
from tests.observer.test_checks import observe
from tests.pages.pages import (
    TUTORIALS,
    load_module,
    output_of,
    rows_below,
    table_rows,
    transcript,
)

PAGE = TUTORIALS / "25_dp_or_ddp.md"
TEXT = " ".join(PAGE.read_text().split())
DECIDE = load_module(TUTORIALS / "25_decide.py")


def row(name: str) -> list[str]:
    """Return the cells of the two devices and the two ranks in a row of the counted table."""
    [found] = [row[1:] for row in table_rows(PAGE.name, 5) if row[0] == name]
    return found


def numbers(name: str) -> list[int]:
    return [int(cell) for cell in row(name)]


def quoted(number: int) -> bool:
    return f"{number:,}" in TEXT


def test_the_page_counts_one_process_with_two_threads_and_two_processes():
    assert row("process") == ["1", "1", "1", "2"]
    assert row("thread that runs forward") == ["replica 0", "replica 1", "main", "main"]
    assert "2 connected processes on cpu (gloo)" in TEXT


def test_the_text_quotes_the_bytes_that_are_held():
    weights = numbers("bytes received in backward")[0]
    dp, replica, rank, other = numbers("bytes held in backward, at most")
    assert rank == other == 5 * weights and replica == 2 * weights
    outputs = dp - 5 * weights
    assert 0 < outputs < weights / 100
    assert numbers("bytes held after backward") == [4 * weights + outputs, 0, rank, rank]
    assert all(map(quoted, (weights, dp, replica)))
    views = f"gradient_as_bucket_view=True, each rank of DDP holds at most {4 * weights} bytes."
    assert f"With {views}" in TEXT


def test_the_text_quotes_the_bytes_that_are_received():
    forward, backward = (numbers(f"bytes received in {time}") for time in ("forward", "backward"))
    weights, outputs = backward[:2]  # to device 1, the gradients of its outputs
    assert backward == [weights, outputs, weights, weights]
    assert outputs == forward[0] and f"the gradients of its outputs, {outputs} bytes" in TEXT
    assert weights > forward[3] > 0
    assert forward[1] > weights and forward[2] == 0
    assert all(map(quoted, (forward[1], forward[3], weights)))


def test_averaged_gradients_are_right_for_a_mean_or_for_a_sum_times_the_number_of_processes():
    mean, total, multiplied = rows_below(PAGE, "the loss is")
    assert mean[1:] == ["1.00 times", "1.00 times"] and total[1:] == ["1.00 times", "0.25 times"]
    assert multiplied == ["4 × the sum over the samples", "4.00 times", "1.00 times"]


def test_adamw_with_foreach_briefly_takes_the_bytes_of_all_parameters():
    model = memory.make_contiguous_model("small_cnn", torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    images, labels = memory.batch(torch.device("cpu"))
    for _ in range(2):  # the first step creates the averages
        nn.functional.cross_entropy(model(images), labels).backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            optimizer.step()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]")
    weights = memory.bytes_of(model.parameters())
    assert weights <= max(allocated) < 1.01 * weights
    quote = "~ sizeof(params) more peak memory"
    assert f'"{quote}"' in TEXT and quote in (torch.optim.AdamW.__doc__ or "")


def test_wrapping_without_a_process_group_raises_the_error_on_the_page():
    with pytest.raises(ValueError, match="process group") as raised:
        DistributedDataParallel(nn.Linear(2, 2))
    assert f"`ValueError: {raised.value}`" in TEXT


def plans(*arguments):
    return DECIDE.plans(*arguments)


GRID = [
    (batch, fits, gpus) for batch in range(1, 41) for fits in range(1, 14) for gpus in range(1, 7)
]


@pytest.mark.parametrize("gpus", range(1, 7))
def test_no_plan_is_closer_to_the_global_batch_or_needs_fewer_micro_batches(gpus):
    """Compare with all plans that fit and have at most twice the necessary micro-batches."""
    for batch, fits, _ in (case for case in GRID if case[2] == gpus):
        for plan in plans(batch, fits, gpus):
            assert 1 <= plan.batch_size <= fits
            most = 2 * -(-batch // (plan.processes * fits))
            possible = [
                (abs(plan.processes * size * micro_batches - batch), micro_batches)
                for size in range(1, fits + 1)
                for micro_batches in range(1, most + 1)
            ]
            assert (abs(plan.global_batch - batch), plan.micro_batches) == min(possible)


@pytest.mark.parametrize(("batch", "fits", "gpus"), [(256, 64, 2), (256, 60, 4), (1000, 7, 3)])
def test_there_is_one_plan_for_one_gpu_and_one_for_all(batch, fits, gpus):
    alone, together = plans(batch, fits, gpus)
    assert (alone.processes, together.processes) == (1, gpus)
    assert together.micro_batches < alone.micro_batches
    assert alone.method == "accumulation (page 23)" and together.method.startswith("DDP")


def test_a_batch_that_fits_needs_nothing_and_nothing_fits_into_no_memory():
    (plan,) = plans(64, 64, 1)
    assert (plan.batch_size, plan.micro_batches) == (64, 1) and plan.method == "plain training"
    assert plans(64, 0, 8) == []
    assert [plan.processes for plan in plans(3, 64, 8)] == [1, 3]  # no process without a sample
    assert [plan.processes for plan in plans(1, 1, 8)] == [1]


def test_no_advice_is_to_use_data_parallel():
    advice = {plan.method for case in GRID for plan in plans(*case)} | {DECIDE.TOO_LARGE}
    assert len(advice) == 5
    assert not any("DataParallel" in text for text in advice)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--global-batch 0 --fits 1", "--global-batch must be at least 1, got 0"),
        ("--global-batch 8 --fits -1", "--fits must be at least 0, got -1"),
        ("--global-batch 8 --fits 1 --gpus 0", "--gpus must be at least 1, got 0"),
        ("--global-batch 8", "the following arguments are required: --fits"),
        ("--global-batch 8.5 --fits 1", "argument --global-batch: invalid int value: '8.5'"),
    ],
)
def test_wrong_numbers_are_refused_in_one_line(start, options, said):
    result = start(["python", "tutorials/25_decide.py", *options.split()])
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {said}\n")


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ("256 0 2", "over several GPUs (page 42)"),
        ("100 64 3", "33 |             1 |           99 |     -1 |"),
        ("100 64 2", "50 |             1 |          100 |      0 |"),
        ("3 64 8", "A batch this small leaves 5 GPUs without a sample."),
    ],
)
def test_the_program_prints_the_plans(start, options, ending):
    batch, fits, gpus = options.split()
    flags = ["--global-batch", batch, "--fits", fits, "--gpus", gpus]
    result = start(["python", "tutorials/25_decide.py", *flags])
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.rstrip().endswith(ending)


def test_if_no_sample_fits_the_page_and_the_program_advise_the_same_in_the_same_order():
    (advice,) = re.findall(r"1\. \*\*Not even one sample fits\.\*\*(.*?) 2\. ", TEXT)
    on_page = "activations in backward", "16 bits", "shard the model"
    printed = "activations in backward", "bf16", "FSDP, which shards weights"
    for text, methods in ((advice, on_page), (DECIDE.TOO_LARGE, printed)):
        places = [text.index(method) for method in methods]
        assert places == sorted(places)


def test_the_first_plan_has_the_gradient_of_the_whole_batch():
    """Accumulate as planned, with the mean of each micro-batch divided by their number."""
    (plan,) = plans(24, 10, 1)
    assert (plan.global_batch, plan.micro_batches) == (24, 3)
    torch.manual_seed(0)
    network, inputs, labels = nn.Linear(6, 3), torch.randn(24, 6), torch.randn(24, 3)
    nn.functional.mse_loss(network(inputs), labels).backward()
    expected = network.weight.grad.clone()
    network.zero_grad()
    for x, y in zip(inputs.split(plan.batch_size), labels.split(plan.batch_size), strict=True):
        (nn.functional.mse_loss(network(x), y) / plan.micro_batches).backward()
    torch.testing.assert_close(network.weight.grad, expected)


def test_data_parallel_copies_all_weights_in_one_operation_and_sums_gradients_in_new_memory():
    copying = inspect.getsource(_broadcast_coalesced_reshape)
    assert "Broadcast.apply(devices, *tensors)" in copying
    summing = inspect.getsource(comm.reduce_add)
    with_nccl, without = summing.split("if nccl.is_available(inputs):")[1].split("else:")
    assert "result = torch.empty_like(inputs[root_index])" in with_nccl
    assert "nccl.reduce(inputs, output=result" in with_nccl
    assert "result = inputs[root_index] + nonroot[0]" in without
    assert "flat_result = reduce_add(" in inspect.getsource(comm.reduce_add_coalesced)
    default = inspect.signature(comm.reduce_add_coalesced).parameters["buffer_size"].default
    assert default == 10 * 2**20 and "copies of up to 10 MB" in TEXT


def test_both_wrappers_are_printed_with_the_model_and_hide_its_attributes():
    output = output_of(PAGE.name, "python tutorials/25_wrapper.py")
    linear = "  (module): Linear(in_features=10, out_features=1, bias=True)"
    for wrapper in ("DataParallel", "DistributedDataParallel"):
        error = f"AttributeError: '{wrapper}' object has no attribute 'weight'"
        assert f"\n{wrapper}(\n{linear}\n)\nmodel.weight: {error}\n" in f"\n{output}"
    assert output.count("model.module.weight: [1, 10]\n") == 2
    assert output.count("model.state_dict(): module.weight, module.bias\n") == 2


def test_spawn_passes_the_rank_before_the_arguments():
    error = output_of(PAGE.name, "python tutorials/25_spawn_without_rank.py")
    assert error == "TypeError: main() takes 2 positional arguments but 3 were given\n"
    connected = output_of(PAGE.name, "python tutorials/25_spawn.py")
    assert connected == "2 epochs, 64 images per process, sum of all ranks: 1\n"


def test_the_documentation_of_data_parallel_recommends_ddp():
    documentation = " ".join((nn.DataParallel.__doc__ or "").split())
    assert "It is recommended to use :class:`~torch.nn.parallel.DistributedDataParallel`" in (
        documentation
    )
    quote = "even if there is only a single node"
    assert quote in documentation and f'"{quote}"' in TEXT


def test_the_answer_to_the_exercise_has_the_bytes_of_four_devices():
    weights = numbers("bytes received in backward")[0]
    elements = weights // 4
    assert quoted(3 * weights) and quoted(2 * weights * 3 // 4)
    assert elements % 4 == 2


def test_the_transcript_has_the_recorded_command():
    records = load_module(TUTORIALS / "40_record.py").RECORDS
    recorded = transcript("dp_or_ddp")
    assert list(recorded) == records["dp_or_ddp"]
    assert all(f"$ {command}\n" in PAGE.read_text() for command in recorded)


def test_in_the_transcript_threads_speed_up_torch_and_only_processes_speed_up_python():
    ((_, output),) = transcript("dp_or_ddp").items()
    in_torch, in_python = (
        {row[0]: float(row[3]) for row in recorded_rows(output, f"Forward pass of {network}, ")}
        for network in ("small_cnn", "small_cnn with Python code in it")
    )
    threads, processes = "DataParallel, 2 threads", "DDP, 2 processes"
    assert in_torch[threads] > 1
    assert 0.75 < in_python[threads] < 1.25  # the text says that they are about as fast
    assert in_python[processes] > max(1.2, in_python[threads])


def recorded_rows(output: str, title: str) -> list[list[str]]:
    """Return the rows of the table with this title, without headings."""
    table = output[output.index(title) :].split("\n\n")[1]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


CONVERTED = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.randint(2, (128,)))
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 2), nn.Dropout(0.1)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""


def forgotten(findings: list[str]) -> set[str]:
    """Return what is missing according to the page's table, and check that nothing else is."""
    missing = set()
    for text in findings:
        rows = [
            row
            for row in rows_below(PAGE, "finding")
            if all(part in text for part in re.split(" ?… ?", row[0].strip("`")))
        ]
        assert len(rows) == 1, text
        missing.add(rows[0][1])
    return missing


def test_the_audit_names_what_was_forgotten_in_the_change(tmp_path):
    saving = {"saving on rank 0 only", "`model.module.state_dict()`"}
    without_sampler = edited(CONVERTED, "16, sampler=sampler", "16, shuffle=True")
    old = edited(CONVERTED, 'dist.init_process_group("gloo")\n', "")
    old = edited(old, "dist.destroy_process_group()\n", "")
    old = edited(old, "= DistributedDataParallel(nn", "= nn.DataParallel(nn")
    old = edited(
        edited(old, "sampler = DistributedSampler(data)\n", ""), "sampler=sampler", "shuffle=True"
    )
    cases = {
        CONVERTED: {"`set_epoch`", "a seed for each rank"} | saving,
        without_sampler: {"the sampler"} | saving,
        old: {"`init_process_group` and DDP"},
    }
    for number, (script, missing) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        findings, _ = run_checks(observe(script, tmp_path / str(number)))
        assert forgotten([finding.sentence for finding in findings]) == missing
    assert set().union(*cases.values()) == {row[1] for row in rows_below(PAGE, "finding")}
