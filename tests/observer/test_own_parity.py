"""Test which first difference `accel-demo parity` names between two runs of a script."""

import json

import pytest

from accel_demo.errors import UserError
from accel_demo.lab.observed.launches import single_command
from accel_demo.lab.observed.ranks import Rank
from accel_demo.lab.parity.command import main
from accel_demo.lab.parity.own import compare, factor_of, with_batch_flag
from accel_demo.lab.parity.steps import StepsOfRun, samples_of
from tests.conftest import run_to_end
from tests.observer.test_checks import observe

# Trains for three steps, in one process or in several.
SCRIPT = """
import os, random, numpy, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.arange(48.0).reshape(24, 2) / 48, torch.arange(24) % 3)
first, last = torch.nn.Linear(2, 8), torch.nn.Linear(8, 3)
model = torch.nn.Sequential(first, torch.nn.Dropout(0.5), NORM, last)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for inputs, labels in DataLoader(data, 4, sampler=DistributedSampler(data)):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
RUN = "-m torch.distributed.run"
LIMITS = {
    "ACCEL_DEMO_AUDIT_STEPS": "3",
    "ACCEL_DEMO_AUDIT_BATCHES": "0",
    "ACCEL_DEMO_AUDIT_EPOCHS": "1000000",
}


def test_a_real_script_is_equal_and_batch_norm_is_named(tmp_path):
    """Two processes with batches of 4 are compared with two that have batches of 8, on rank 0."""
    for norm, kind in (("torch.nn.ReLU()", None), ("torch.nn.BatchNorm1d(8)", "buffers")):
        runs = []
        for factor, name in (("1", "several"), ("2", "one")):
            folder = tmp_path / f"{name}-{kind}"
            folder.mkdir()
            script = SCRIPT.replace("NORM", norm)
            if name == "one":  # each process trains alone, with all samples
                script = script.replace(
                    'dist.init_process_group("gloo")',
                    'dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())',
                )
            evidence = observe(script, folder, **LIMITS, ACCEL_DEMO_PARITY=factor)
            if name == "several":
                assert [rank.connected_world for rank in evidence.ranks] == [2, 2]
            runs.append(evidence.ranks)
        several, one = StepsOfRun(runs[0]), StepsOfRun(runs[1][:1])
        result = compare(one, several, factor_of(several.ranks), ["x"], ["y"])
        assert result.factor == 2 and len(result.steps) == 3
        assert all(step.same_samples for step in result.steps)
        assert result.kind == kind, result.text
        assert ("BatchNorm uses the mean and variance" in result.text) == (kind is not None)


# A usual script: a sampler only in several processes, the same global batch in any number of them,
# dropout in attention, and augmentation.
USUAL = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

class Augmented(torch.utils.data.Dataset):
    samples = torch.randn(64, 4, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return self.samples[number] + torch.randn(4, 8) / 10, number % 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seed = rank if "--fault" in sys.argv else 7
sampler = DistributedSampler(Augmented(), seed=seed) if world > 1 else None
loader = DataLoader(Augmented(), 16 // world, shuffle=sampler is None, sampler=sampler)
model = torch.nn.Sequential(
    torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.nn.Flatten(),
    torch.nn.Linear(32, 2),
)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind"), [("", None), ("--fault", "samples")])
def test_what_a_usual_script_does_is_no_difference(fault, kind, tmp_path):
    (tmp_path / "train.py").write_text(USUAL)
    words = ["accel-demo", "parity", "--quick", "--json", tmp_path / "x.json", "--processes", "2"]
    ended = run_to_end([*words, tmp_path / "train.py", *fault.split()], timeout=100, cwd=tmp_path)
    assert ended.returncode == (kind is not None), ended.stderr
    result = json.loads((tmp_path / "x.json").read_text())
    assert (result["processes"], result["subject"], result["factor"]) == (2, "script", 1)
    assert [finding["kind"] for finding in result["findings"]] == [kind] * (kind is not None)
    assert "larger batches, or more of them, by itself" in ended.stderr


# Synthetic runs


def tensor(*values: float) -> list:
    return [sum(value**2 for value in values) ** 0.5, len(values), list(values)]


def a_run(ranks=1, steps=3, **changes) -> StepsOfRun:
    """Return a run. `changes` are `field=function(step, value)` for the events of its steps."""
    found = []
    for number in range(ranks):
        events = []
        for step in range(steps):
            about = {
                "optimizer": 0,
                "losses": [2.0],
                "names": ["0.weight", "0.bias"],
                "gradients": [tensor(1.0, 2.0), tensor(0.5)],
                "weights": [tensor(1.0, 1.0 + step), tensor(0.1)],
                "settings": [{"lr": 0.1}],
                "low_precision": False,
            }
            about |= {key: change(step, about[key]) for key, change in changes.items()}
            events.append({"kind": "gradients", "time": 0.0, **about})
            after = {"optimizer": 0, "weights": [tensor(1.0, 2.0 + step), tensor(0.1)]}
            after |= {"buffers": [tensor(1.0)], "buffer_names": ["1.running_mean"]}
            events.append({"kind": "updated", "time": 0.0, **after})
        found.append(Rank(number + 1, number, ranks, events))
    return StepsOfRun(found)


@pytest.mark.parametrize(
    "change, kind, text",
    [
        ({}, None, "no difference that the order of additions does not explain"),
        ({"losses": lambda step, value: [2.0 + 1e-6]}, None, "no difference"),
        ({"losses": lambda step, value: [1.0]}, "loss scale", "step 1: the loss is 1/2 as large"),
        ({"losses": lambda step, value: [2.3]}, "loss", "step 1: the mean loss is 2.3 in 2 proc"),
        (
            {"gradients": lambda step, value: [tensor(2.0, 4.0), tensor(1.0)]},
            "gradient scale",
            "step 1: all gradients are 2 times as large in 2 processes",
        ),
        (
            {"gradients": lambda step, value: [value[0], tensor(0.5 + 0.1 * (step == 1))]},
            "a layer",
            "step 2: the gradients of 0.bias differ most, by 20.0% of their size",
        ),
        (
            {"gradients": lambda step, value: [value[0], None]},
            "a layer",
            "step 1: 0.bias has a gradient in only one of the runs",
        ),
        (
            {"settings": lambda step, value: [{"lr": 0.1 * (1 + step)}]},
            "settings",
            "step 2: lr of the optimizer is 0.1 in one process, and 0.2 in several",
        ),
        (
            {"settings": lambda step, value: [{"lr": 0.1, "initial_lr": 0.1}]},
            None,
            "no difference",
        ),
        (
            {"weights": lambda step, value: [tensor(1.0, 7.0), tensor(0.1)]},
            "start",
            "step 1: the runs do not start with the same weights: 0.weight differs",
        ),
    ],
)
def test_the_first_difference_is_named(change, kind, text):
    result = compare(a_run(), a_run(2, **change), 2.0, ["x"], ["y"])
    assert (result.kind, result.processes) == (kind, 2)
    assert result.text.startswith(text)


def test_a_rank_that_differs_from_the_others_is_named():
    for key, value, kind, text in (
        ("settings", [{"lr": 0.2}], "settings", "lr of the optimizer is 0.1 on rank 0, and 0.2"),
        ("weights", [tensor(1.0, 2.1), tensor(0.1)], "ranks", "after it, 0.weight differs betw"),
    ):
        several = a_run(2)
        (several.gradients if key == "settings" else several.updates)[1][0][key] = value
        result = compare(a_run(), several, 2.0, [], [])
        assert (result.kind, result.first_step) == (kind, 1)
        assert text in result.text


def test_the_steps_of_two_optimizers_are_compared_with_those_of_the_same_one():
    runs = [a_run(1, 4), a_run(2, 4)]
    for run in runs:
        for events in (*run.gradients, *run.updates):
            for event in events[1::2]:  # the second optimizer has a larger weight, and no bias
                event |= {"optimizer": 1, "weights": [tensor(*range(1, 9))]}
                event |= {"gradients": [tensor(*range(1, 9))]} if "gradients" in event else {}
    assert compare(*runs, 2.0, [], []).kind is None


def test_a_loss_that_is_not_a_number_in_only_one_run_is_named():
    nan = {"losses": lambda step, value: [float("nan")]}
    assert compare(a_run(), a_run(2, **nan), 2.0, [], []).kind == "loss"
    assert compare(a_run(**nan), a_run(2, **nan), 2.0, [], []).kind is None


def test_rounding_may_grow_from_step_to_step_but_not_without_limit():
    def drifting(step, value):
        return [tensor(1.0, 2.0 + 1e-4 * 3**step), value[1]]

    assert compare(a_run(steps=6), a_run(2, 6, gradients=drifting), 2.0, [], []).kind is None
    result = compare(
        a_run(steps=6), a_run(2, 6, gradients=lambda s, v: [tensor(1, 2.2), v[1]]), 2, [], []
    )
    assert (result.kind, result.first_step) == ("a layer", 1)


def test_samples_are_those_of_the_batches_of_a_step():
    batches = [
        {"kind": "batch", "time": 0.0, "loader": 0, "number": 0, "samples": [[n, n + 1]]}
        for n in range(0, 8, 2)
    ]
    steps = []
    for place in (0, 2):
        steps += [*batches[place : place + 2], {"kind": "backward", "time": 0.0}]
        steps.append({"kind": "gradients", "time": 0.0, "losses": [1.0, 1.0]})
        steps.append({"kind": "step", "time": 0.0, "optimizer": 0})
    first, second = samples_of(Rank(1, 0, 1, steps))
    assert first is not None and second is not None
    assert (first.contents.total(), second.contents.total()) == (4, 4)
    assert not first.contents & second.contents


@pytest.mark.parametrize(
    "command, expected",
    [
        (
            "torchrun --standalone t.py --lr 1",
            "torchrun --standalone --nproc-per-node 1 t.py --lr 1",
        ),
        ("accelerate launch t.py", "accelerate launch --num_processes 1 t.py"),
        (f"python {RUN} t.py", f"python {RUN} --nproc-per-node 1 t.py"),
        ("torchrun --nproc_per_node=4 t.py", "torchrun --nproc-per-node 1 t.py"),
        (
            "accelerate launch --num_processes 2 --cpu t.py --num_processes 3",
            "accelerate launch --cpu --num_processes 1 t.py --num_processes 3",
        ),
        ("torchrun -m package.train", "torchrun --nproc-per-node 1 -m package.train"),
        (f"python {RUN} -m train", f"python {RUN} --nproc-per-node 1 -m train"),
    ],
)
def test_the_command_with_one_process(command, expected):
    assert single_command(command.split(), None, "parity") == expected.split()


@pytest.mark.parametrize("command", ["python t.py", "bash t.sh", "torchrun train", "python -m t"])
def test_a_command_that_cannot_run_in_one_process_is_refused(command):
    with pytest.raises(UserError, match="parity must choose the number of processes"):
        single_command(command.split(), None, "parity")


def test_the_batch_flag_is_multiplied():
    words = ["t.py", "--batch-size", "16"]
    assert with_batch_flag(words, "--batch-size", 2.0) == ["t.py", "--batch-size", "32"]
    assert with_batch_flag(["t.py", "--b=8"], "--b", 4.0) == ["t.py", "--b=32"]
    for wrong in (["t.py"], ["t.py", "--batch-size"], ["t.py", "--batch-size", "many"]):
        with pytest.raises(UserError, match="has no --batch-size with a number"):
            with_batch_flag(wrong, "--batch-size", 2.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model vgg11 SCRIPT", "--model is only for our training loops: leave it out"),
        ("--model small_cnn SCRIPT", "--model is only for our training loops: leave it out"),
        ("--batch-flag=--b", "--batch-flag is only for your script"),
        ("--processes 1,2 SCRIPT", "invalid int value: '1,2'"),
        ("--batch-flag=--bs SCRIPT --batch-size 8", "the command has no --bs with a number"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.replace("SCRIPT", __file__).split())
