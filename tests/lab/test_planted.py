"""Test that the measuring commands name what is planted in scripts that know nothing of them."""

import json

import pytest

from tests.conftest import REPOSITORY, run_to_end

SCRIPTS = REPOSITORY / "tests/lab/planted"
PLANTED = {  # script: the command that names its fault, and what it says
    "slow_loader": ("timeline", "each rank waits for its DataLoader"),
    "delayed_rank": ("timeline", "rank 1 is slow: it computes"),
    "item_each_step": ("timeline", "calls item in each step"),
    "tiny_buckets": ("timeline", "buckets of 64.8 KiB on average"),
    "micro_batches": ("timeline", "4 backward passes of a step average the gradients"),
    "duplicated_samples": ("shards", "96 samples are read more than once in an epoch"),
    "uneven_batch": ("shards", "Rank 0 has more batches (7) than rank 1 (6)."),
    "summed_loss": ("parity", "step 1: the loss is 1/2 as large in 2 processes"),
    "hurried_schedule": ("parity", "step 2: lr of the optimizer is 0.0001 in one process"),
    "kept_losses": ("memory", "the memory grows by"),
}
# Whether the machine is idle does not matter to these commands.
STEADY = [name for name, (command, _) in PLANTED.items() if command != "timeline"]
each_script = pytest.mark.parametrize(
    "script", PLANTED, ids=[f"{command}-{script}" for script, (command, _) in PLANTED.items()]
)


def named_in(script: str, fault: bool, folder) -> tuple[list[str], dict]:
    """Return what the script's command names, and the content of its JSON file."""
    command, _ = PLANTED[script]
    words = ["accel-demo", command, "--json", folder / "x.json"]
    words += ["--output", folder] if command == "timeline" else []
    words += [SCRIPTS / f"{script}.py", *["--fault"] * fault]
    ended = run_to_end(words, timeout=100, cwd=folder)
    result = json.loads((folder / "x.json").read_text())
    assert result["processes"] == 2, "the processes of the script are connected"
    assert result["subject"] == "script"
    named = [finding["text"] for finding in result["findings"]]
    assert ended.returncode == (bool(named) and command in ("shards", "parity")), ended.stderr
    return named, result


@pytest.mark.slow
@each_script
def test_a_planted_fault_is_named(script, tmp_path):
    named, _ = named_in(script, True, tmp_path)
    assert any(PLANTED[script][1] in text for text in named), named


@pytest.mark.slow
@each_script
def test_nothing_is_named_without_it(script, tmp_path):
    """On a busy machine, ranks may wait for each other: then the command must say so."""
    named, result = named_in(script, False, tmp_path)
    assert named == [] or (script not in STEADY and result["load"]["is_busy"]), named
