"""Test that the four train files train to the same weights and write a complete run folder."""

import gzip
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from accel_demo.config import MODELS, TrainConfig
from accel_demo.data import ASSETS, load_datasets
from accel_demo.errors import UserError
from accel_demo.metrics import batch_totals
from accel_demo.models import make_model
from accel_demo.processes.devices import replica_devices
from accel_demo.processes.launch import free_port
from accel_demo.run.folder import load_config, load_model
from accel_demo.run.resume import make_folder
from tests.conftest import GPUS, REPOSITORY, VISIBLE_GPUS, launcher, train_in
from tests.runs import VERSIONS, lines_of, read, same_weights, train_here, weights

# 11 batches on one process, or 5 on each of two. Both are odd, so an epoch's last window is short.
STEPS = "--max-steps 8 --accumulate 2 --batch-size 32 --train-samples 360 --test-samples 201"
STEPS += " --eval-batch-size 100 --label-smoothing 0.1 --clip-norm 0.5 --dropout 0.2 --augment"
STEPS = STEPS.split()
TEXT = [word for word in STEPS if word != "--augment"] + "--model tiny_gpt --dataset text".split()
DATASETS = pytest.mark.parametrize("flags", [STEPS, TEXT], ids=["images", "text"])


def largest_difference(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def dataset_of(model: str) -> str:
    return "text" if model == "tiny_gpt" else "synthetic"


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(r"\d[\d.,]*", "#", line).split("; saved in ")[0] for line in lines]


def test_the_four_train_files_have_the_same_sections_in_the_same_order():
    """Only the names are equal. What follows them is true in its own file."""
    names = ["Processes", "Data", "Model", "Resume", "Accumulate", "Evaluate", "Report", "Finish"]
    for module in VERSIONS.values():
        text = Path(module.__file__).read_text()
        assert re.findall(r"^ +# ([A-Z][a-z]+): ", text, re.MULTILINE) == names


@DATASETS
def test_the_four_versions_train_to_the_same_weights_in_one_process(flags, train):
    assert same_weights(*(train(file, *flags) for file in VERSIONS))


@pytest.fixture(scope="module", params=[STEPS, TEXT], ids=["images", "text"])
def in_two_processes(request, tmp_path_factory):
    """Return the run of train.py and the run of train_ddp.py, with two processes each."""
    folder = tmp_path_factory.mktemp("two")
    return [
        train_in(folder / file, file, *request.param, processes=2)
        for file in ("train.py", "train_ddp.py")
    ]


def test_accelerate_and_raw_ddp_train_to_the_same_weights_in_two_processes(in_two_processes):
    assert same_weights(*in_two_processes)


def test_each_option_of_the_parity_runs_changes_the_weights(tmp_path):
    """The parity tests prove nothing about an option that has no effect."""
    choices = {"batch_size": 32, "train_samples": 320, "max_steps": 4, "test_samples": 100}
    choices |= {"accumulate": 2, "clip_norm": 0.5, "dropout": 0.2, "augment": True}
    on = train_here("train_plain.py", tmp_path / "on", **choices)
    for name, off in {"accumulate": 1, "clip_norm": 1e9, "dropout": 0.0, "augment": False}.items():
        changed = train_here("train_plain.py", tmp_path / name, **{**choices, name: off})
        assert not same_weights(on, changed), name


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("tiny_cnn", "no"),
        ("small_cnn", "no"),
        ("small_cnn", "bf16"),
        ("tiny_gpt", "bf16"),
        *(pytest.param(name, "no", marks=pytest.mark.slow) for name in MODELS[2:]),
    ],
)
def test_every_model_trains_to_the_same_weights_in_all_versions(model, precision, tmp_path):
    choices = {"dataset": dataset_of(model), "train_samples": 21, "test_samples": 8}
    choices |= {
        "batch_size": 4,
        "model": model,
        "accumulate": 3,
        "epochs": 1,
        "dropout": 0.2,
    }  # 5 micro-batches
    runs = (train_here(file, tmp_path / file, precision, **choices) for file in VERSIONS)
    assert same_weights(*runs)


def test_two_processes_equal_one_process_with_twice_the_batch_size(train, tmp_path):
    """The weights agree within 1e-5 if no sample's gradient depends on the rest of its batch.

    With batch norm, they differ, because each process computes its own batch statistics. The test
    uses SGD, because AdamW divides gradients by their magnitude, which amplifies rounding errors.
    """
    choices = {"max_steps": 8, "train_samples": 512, "test_samples": 100, "log_every": 1}
    choices |= {"optimizer": "sgd", "learning_rate": 0.1}
    flags = [word for name in choices for word in (f"--{name.replace('_', '-')}", choices[name])]
    difference = {}
    for model in ("tiny_cnn", "tiny_gpt", "small_cnn"):
        own = {"model": model, "dataset": dataset_of(model)}
        one = train_here("train.py", tmp_path / "one" / model, **choices, **own, batch_size=64)
        more = ["--model", model, "--dataset", own["dataset"], "--batch-size", 32]
        two = train("train.py", *flags, *more, processes=2, name=model)
        difference[model] = largest_difference(weights(one), weights(two))
        rates = [
            [line["learning_rate"] for line in lines_of(run, "train_loss")] for run in (one, two)
        ]
        assert rates[0] == rates[1] and len(rates[0]) == 8
    assert difference["tiny_cnn"] < 1e-5 and difference["tiny_gpt"] < 1e-5
    assert difference["small_cnn"] > 1e-4


def test_a_short_last_window_averages_over_its_own_images(tmp_path):
    """With 5 micro-batches and accumulate=4, the second step has only one micro-batch."""
    choices = {"model": "tiny_cnn", "dropout": 0.0, "label_smoothing": 0.0, "warmup": 0.0}
    choices |= {"dataset": "synthetic", "train_samples": 40, "batch_size": 8, "accumulate": 4}
    choices |= {"epochs": 1, "clip_norm": math.inf, "optimizer": "sgd", "weight_decay": 0.0}
    choices |= {"learning_rate": 0.5}
    run_dir = train_here("train.py", tmp_path / "run", **choices)

    config = TrainConfig(**choices)
    torch.manual_seed(config.seed)
    model = make_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(config.seed)).tolist()
    train_set, _ = load_datasets(config)
    for window, learning_rate in ((order[:32], 0.5), (order[32:], 0.25)):  # halfway down the cosine
        images, labels = train_set.__getitems__(window)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert largest_difference(weights(run_dir), model.state_dict()) < 1e-6


def test_padding_does_not_affect_the_accuracy(in_two_processes):
    """With 201 test samples in batches of 100 on two processes, the last batches are padded."""
    config = load_config(in_two_processes[0])
    model = make_model(config).eval()
    load_model(in_two_processes[0], model)
    _, test_set = load_datasets(config)
    images, labels = test_set.__getitems__(range(len(test_set)))
    with torch.no_grad():
        _, correct, count = batch_totals(model(images), labels).tolist()
    assert len(test_set) == 201 and count == test_set.labels.numel()
    for run in in_two_processes:
        assert read(run / "summary.json")["test_accuracy"] == correct / count


@pytest.mark.parametrize("file", VERSIONS)
def test_the_run_folder_contains_the_config_the_metrics_and_the_results(file, tmp_path, capsys):
    choices = {"dataset": "synthetic", "model": "tiny_cnn", "epochs": 2, "log_every": 6}
    run_dir = train_here(file, tmp_path / "run", **choices)
    assert load_config(run_dir) == TrainConfig(**choices, run_dir=str(run_dir))
    train_lines, test_lines = lines_of(run_dir, "train_loss"), lines_of(run_dir, "test_loss")
    assert [line["step"] for line in train_lines] == [6, 12, 16, 18, 24, 30, 32]
    assert all(0 <= line["train_accuracy"] <= 1 for line in train_lines)
    assert [line["epoch"] for line in test_lines] == [1, 2]
    summary = read(run_dir / "summary.json")
    assert summary["test_accuracy"] == test_lines[-1]["test_accuracy"]
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"done: test accuracy {summary['test_accuracy']:.4f}, ")
    assert "1 process on cpu" in last


@pytest.mark.slow
def test_loader_workers_do_not_change_the_weights(train):
    alone = train("train.py", *STEPS, "--num-workers", 0, name="alone")
    helped = train("train.py", *STEPS, "--num-workers", 2, name="helped")
    assert same_weights(alone, helped)


def test_a_run_folder_refuses_a_different_version_or_precision(tmp_path):
    choices = {"dataset": "synthetic", "model": "tiny_cnn", "max_steps": 2, "test_samples": 50}
    run = train_here("train_plain.py", tmp_path / "run", **choices)
    before = (run / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="contains a run with script train_plain, not train_dp"):
        train_here("train_dp.py", run, **choices)
    with pytest.raises(UserError, match="contains a run with mixed_precision no, not bf16"):
        train_here("train_plain.py", run, "bf16", **choices)
    assert before == (run / "model.safetensors").read_bytes()


def test_different_runs_get_different_folders_in_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_process = {"script": "train", "processes": 1, "mixed_precision": "no"}
    two_processes = one_process | {"processes": 2, "mixed_precision": "bf16"}
    assert make_folder(TrainConfig(), one_process)[0] == Path("runs/train")
    assert make_folder(TrainConfig(), two_processes)[0] == Path("runs/train-2-processes-bf16")
    folders = {
        make_folder(TrainConfig(seed=seed), launch)
        for seed in range(3)
        for launch in (one_process, two_processes)
    }
    assert len(folders) == 6


def test_data_parallel_uses_every_gpu_and_refuses_unsupported_options(monkeypatch):
    for gpus in range(4):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda gpus=gpus: gpus)
        assert replica_devices(compiled=False, precision="no") == [*range(gpus)]
    with pytest.raises(UserError, match="--compile does not affect the replicas"):
        replica_devices(compiled=True, precision="no")
    with pytest.raises(UserError, match="would compute in fp16 instead of bf16"):
        replica_devices(compiled=False, precision="bf16")


def needs(gpus: int):
    return pytest.mark.skipif(GPUS < gpus, reason=f"needs {gpus} GPU(s)")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("file", VERSIONS)
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=needs(1)), pytest.param(2, marks=needs(2))])
def test_every_version_learns_on_gpus(file, precision, gpus, start, tmp_path):
    count = gpus if file in ("train.py", "train_ddp.py") else 1
    command = [*launcher(file, count), f"accel_demo/{file}"]
    if file == "train.py":
        name = {1: "single_gpu", 2: "multi_gpu"}[gpus]
        config = f"accelerate_configs/{name}.yaml"
        command = ["accelerate", "launch", "--config_file", config]
        command += ["--mixed_precision", precision, f"accel_demo/{file}"]
    else:
        command += ["--mixed-precision", precision]
    visible = VISIBLE_GPUS
    if gpus == 1 and GPUS > 1:
        visible = {
            "CUDA_VISIBLE_DEVICES": (VISIBLE_GPUS["CUDA_VISIBLE_DEVICES"] or "0").split(",")[0]
        }
    flags = ["--max-steps", 60, "--train-samples", 8192, "--run-dir", tmp_path / "run"]
    result = start([*command, *flags], **visible)
    if file == "train_dp.py" and precision == "bf16" and gpus == 2:
        assert result.returncode == 2 and "fp16 instead of bf16" in result.stderr
        return
    assert result.returncode == 0, result.stdout + result.stderr
    environment = read(tmp_path / "run" / "environment.json")
    assert (environment["device"], environment["processes"]) == ("cuda", count)
    assert environment["mixed_precision"] == precision
    assert read(tmp_path / "run" / "summary.json")["test_accuracy"] > 0.6


@pytest.mark.slow
def test_a_compiled_model_trains_to_nearly_the_same_weights(start, tmp_path):
    """Use a real Python process, because only a full shutdown stops torch's compile workers."""
    flags = "--dataset synthetic --model tiny_cnn --max-steps 4 --dropout 0".split()
    for name, more in (("plain", []), ("compiled", ["--compile"])):
        command = ["python", "accel_demo/train.py", *flags, *more, "--run-dir", tmp_path / name]
        cache = tmp_path / f"{name}-kernels"
        result = start(command, real=True, TORCHINDUCTOR_CACHE_DIR=cache)
        assert result.returncode == 0 and "1 process on cpu" in result.stdout, result.stderr
        assert any(cache.rglob("*.cpp")) == (name == "compiled")
    plain, compiled = (weights(tmp_path / name) for name in ("plain", "compiled"))
    assert largest_difference(plain, compiled) < 1e-4


@pytest.mark.parametrize("model", ["resnet18", pytest.param("resnet101", marks=pytest.mark.slow)])
def test_the_command_of_the_article_trains_on_mnist_in_two_processes(model, start, tmp_path):
    """MNIST cannot be downloaded everywhere, so the packaged images take its place."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in ASSETS.glob("*.gz"):
        (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    port = str(free_port())  # the default port may be in use by a test that runs at the same time
    command = ["torchrun", "--master-port", port, "--nproc-per-node", 2]
    command.append(REPOSITORY / "accel_demo" / "train_ddp.py")
    article = f"--model {model} --dataset mnist --batch-size 256 --optimizer adam"
    article += " --learning-rate 1e-3 --schedule constant --print-every 1"
    short = ["--max-steps", 2, "--test-samples", 100, "--run-dir", "run"]
    result = start([*command, *article.split(), *short], cwd=tmp_path, timeout=230)
    assert result.returncode == 0, result.stderr
    for line in (
        f"2 processes on cpu (DistributedDataParallel, gloo): {model} on mnist, 512 images",
        "epoch 1/10, step 1: train loss",
        "epoch 1/10, step 2: train loss",
    ):
        assert line in result.stdout, result.stdout
    assert read(tmp_path / "run" / "environment.json")["processes"] == 2
    assert read(tmp_path / "run" / "config.json")["weight_decay"] == 0.0
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "run", "train_loss")]
    assert rates == [1e-3, 1e-3]


def test_the_old_launcher_is_answered_with_the_new_one(start):
    port = str(free_port())
    command = ["python", "-m", "torch.distributed.launch", "--master_port", port]
    result = start([*command, "--nproc_per_node=2", "accel_demo/train_ddp.py", "--max-steps", 1])
    assert result.returncode == 1  # that of the launcher, which reports that of train_ddp.py
    assert re.findall(r"exitcode\s*: (\d+)", result.stderr)[0] == "2"
    advice = "Use `torchrun --nproc-per-node 2 accel_demo/train_ddp.py`, which sets "
    assert result.stderr.count(f"error: there is no --local-rank. {advice}") == 1


@pytest.mark.slow
def test_the_main_job_reaches_a_similar_accuracy_in_one_process_and_in_two(start, tmp_path):
    accuracy = {}
    cases = (("cpu", 128, "first_run"), ("cpu_two_processes", 64, "two_processes"))
    for config, batch_size, transcript in cases:
        command = ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}.yaml"]
        flags = ["--batch-size", batch_size, "--run-dir", tmp_path / config]
        command = [*command, "accel_demo/train.py", *flags]
        result = start(command, timeout=200)
        assert result.returncode == 0, result.stderr
        summary = read(tmp_path / config / "summary.json")
        assert summary["processes"] == 128 // batch_size
        accuracy[config] = summary["test_accuracy"]
        recorded = REPOSITORY / "tutorials" / "transcripts" / f"{transcript}.txt"
        _, *lines = recorded.read_text().splitlines()
        assert without_numbers(lines) == without_numbers(result.stdout.splitlines())
    assert accuracy["cpu"] >= 0.88
    assert abs(accuracy["cpu"] - accuracy["cpu_two_processes"]) <= 0.015
