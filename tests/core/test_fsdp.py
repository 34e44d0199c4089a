"""Test training with FSDP2 on CPUs: its losses, checkpoints and messages.

The processes run Accelerate's own code for FSDP2: see fsdp2_on_cpu.py.
"""

import re
import shutil
from pathlib import Path

import pytest

from accel_demo.run.manifest import Damaged, checkpoints_of, newest_complete, verify
from tests.conftest import run_ranks
from tests.runs import interrupt_after, lines_of, read, same_weights, weights

PROGRAMS = {"FSDP2": ["-m", "tests.core.fsdp2_on_cpu"], "DDP": ["accel_demo/train.py"]}
FLAGS = "--max-steps 4 --train-samples 192 --test-samples 40 --batch-size 16 --accumulate 2"
FLAGS = f"{FLAGS} --dropout 0.2 --checkpoint-every 2 --keep-last 9 --log-every 1".split()


def train(kind: str, run: Path, *flags: str):
    return run_ranks([*PROGRAMS[kind], *FLAGS, "--run-dir", run, *flags], processes=2)


def losses(run: Path) -> list[float]:
    names = ("train_loss", "test_loss")
    return [line[name] for line in lines_of(run) for name in names if name in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folders of two finished runs of two processes: {"FSDP2": …, "DDP": …}."""
    folder = tmp_path_factory.mktemp("finished")
    for kind in PROGRAMS:
        result = train(kind, folder / kind)
        assert result.returncode == 0, result.stdout + result.stderr
        environment = read(folder / kind / "environment.json")
        distribution = "FSDP" if kind == "FSDP2" else "MULTI_CPU"
        assert environment["processes"] == 2
        assert environment["backend"] == f"distributed_type {distribution}, gloo"
        if kind == "FSDP2":
            held = re.findall(r"rank (\d) of 2 holds (\d+) of (\d+)", result.stdout)
            assert sorted(rank for rank, _, _ in held) == ["0", "1"]
            assert sum(int(part) for _, part, _ in held) == int(held[0][2])
            assert all(0.4 < int(part) / int(whole) < 0.6 for _, part, whole in held)
    return {kind: folder / kind for kind in PROGRAMS}


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the FSDP2 run, as if it had stopped after its first checkpoint, in step 2."""
    run = shutil.copytree(finished["FSDP2"], tmp_path / "run")
    return interrupt_after(run, checkpoints_of(run)[-1].name)


def test_fsdp2_trains_like_ddp(finished):
    """Both average the same gradients, in a different order."""
    assert losses(finished["FSDP2"]) == pytest.approx(losses(finished["DDP"]), rel=1e-4)
    trained, expected = map(weights, finished.values())
    assert trained.keys() == expected.keys()
    for name, value in trained.items():
        assert value.float().sub(expected[name].float()).abs().max() < 1e-3, name


def test_a_resumed_fsdp2_run_ends_with_the_same_bits(finished, run):
    """A file that FSDP2 does not read is ignored."""
    (checkpoints_of(run)[0] / ".DS_Store").touch()
    result = train("FSDP2", run, "--resume", "auto")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "epoch-0000-batch-000004, after step 2" in result.stdout
    assert len(re.findall("^ignored .*: .DS_Store$", result.stdout, re.M)) == 1
    assert losses(run) == losses(finished["FSDP2"])
    assert same_weights(run, finished["FSDP2"])


def test_damage_to_any_shard_is_detected(run):
    (checkpoint,) = checkpoints_of(run)
    shards = [path for path in checkpoint.rglob("*") if path.parent != checkpoint]
    assert len(shards) == 6  # one of each process and one with metadata, of weights and optimizer
    for shard in shards:
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(Damaged, match=f"the checksum of {shard.parent.name}/{shard.name}"):
            verify(checkpoint)
        shard.unlink()
        with pytest.raises(Damaged, match=f"{shard.parent.name}/{shard.name} is missing"):
            verify(checkpoint)
        shard.write_bytes(content)
    (shards[0].parent / "extra").mkdir()
    with pytest.raises(Damaged, match=f"{shards[0].parent.name}/extra is not in the manifest"):
        verify(checkpoint)
    (shards[0].parent / "extra").rmdir()
    assert newest_complete(run) == (checkpoint, [])


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("FSDP2", "DDP"), pytest.param("DDP", "FSDP2", marks=pytest.mark.slow)],
)
def test_a_checkpoint_of_the_other_kind_is_refused(finished, tmp_path, saved, resumed):
    run = shutil.copytree(finished[saved], tmp_path / "run")
    result = train(resumed, run, "--resume", "auto")
    assert result.returncode == 2
    state = "with" if saved == "FSDP2" else "without"
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line.endswith(f"was saved {state} FSDP. Resume it with the launch config that saved it.")


REFUSED = {
    "--compile is not supported with FSDP2. Leave it out.": (["--compile"], "no"),
    "FSDP2 with mixed_precision bf16 is not supported for models with batch norm.": ([], "bf16"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_with_fsdp2_is_refused(tmp_path, message):
    flags, precision = REFUSED[message]
    command = [*PROGRAMS["FSDP2"], *FLAGS, *flags, "--run-dir", tmp_path / "run"]
    result = run_ranks(command, processes=1, ACCELERATE_MIXED_PRECISION=precision)
    assert result.returncode == 2
    assert f"error: {message}" in result.stderr
    assert not (tmp_path / "run").exists()
