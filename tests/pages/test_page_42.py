"""Page 42: the memory of a script, what each remedy saves, and the bytes per parameter."""

import pytest
import torch

from tests.pages.pages import TUTORIALS, load_module, rows_below, section, transcript

PAGE = TUTORIALS / "42_what_fits.md"
TEXT = " ".join(PAGE.read_text().split())
REMEDIES = load_module(TUTORIALS / "42_remedies.py")


def measured_rows(output: str, heading: str) -> list[list[float]]:
    """Return the numbers of a table in a transcript, without its first column. A dash is 0."""
    lines = output.splitlines()
    [start] = [n for n, line in enumerate(lines) if line.startswith(f"| {heading} ")]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        rows.append([0.0 if cell == "–" else float(cell) for cell in cells])
    return rows


def test_the_transcript_is_that_of_the_commands_on_the_page():
    recorded = transcript("fits")
    assert list(recorded) == load_module(TUTORIALS / "40_record.py").RECORDS["fits"]
    for command, output in recorded.items():
        assert f"\n{command}\n" in PAGE.read_text(), "in a code block"
        assert output.startswith("2 connected processes on cpu, AdamW")


def test_the_text_follows_from_what_the_script_holds():
    plain, checkpointing = (measured_rows(each, "rank") for each in transcript("fits").values())
    parameters, gradients, state, buckets, others, activations, in_step = plain[0]
    assert parameters == gradients == buckets and others == 0
    assert abs(state - 2 * parameters) <= 0.1
    assert max(plain[0][:-1]) == activations, "the largest column"
    kept, after = checkpointing[0][-2:]
    assert checkpointing[0][:4] == plain[0][:4]
    assert f"The activations take {kept:.0f} MiB instead of {activations:.0f}." in TEXT
    assert f"The peak falls less, from {in_step:.0f} MiB to {after:.0f}" in TEXT


def test_no_strategy_divides_the_activations():
    rows = measured_rows(next(iter(transcript("fits").values())), "strategy")
    ddp, fsdp = rows[0], rows[-1]
    assert len(rows) == 4 and len({row[-2] for row in rows}) == 1
    for kind in range(3):
        assert fsdp[kind] == pytest.approx(ddp[kind] / 8, abs=0.05)


def remedies() -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in rows_below(PAGE, "remedy")}


def test_each_remedy_saves_its_part_and_micro_batches_the_most():
    peaks = {name: [float(cell) for cell in row[:2]] for name, row in remedies().items()}
    parameters = sum(p.numel() for p in REMEDIES.make_model("none").parameters())
    mib = parameters / 2**20
    none, sgd = peaks["none"], peaks["SGD"]
    assert f"a step needs {none[0]} MiB. At most {16 * mib:.0f} MiB of that are weights" in TEXT
    assert f"SGD saves {none[0] - sgd[0]:.1f} MiB of {none[0]}" in TEXT
    assert none[1] - sgd[1] == pytest.approx(none[0] - sgd[0], abs=0.5)
    assert peaks["none"][1] == pytest.approx(16 * mib, abs=1)
    assert peaks["SGD"][1] == pytest.approx(8 * mib, abs=1)
    choices = ["SGD", "bf16 autocast", "activation checkpointing", "4 micro-batches"]
    assert min(choices, key=lambda name: peaks[name][0]) == "4 micro-batches"
    assert peaks["both"][0] < peaks["4 micro-batches"][0]
    assert peaks["bf16 weights and all"][1] == peaks["none"][1] / 2
    assert peaks["none"][0] - peaks["update in backward"][0] < 0.5 < peaks["none"][1] - 8.8 + 0.5


def test_only_checkpointing_costs_operations_and_not_a_bit_of_the_weights():
    rows = remedies()
    costly = {name: row[2] for name, row in rows.items() if row[2] != "1.00"}
    assert costly == dict.fromkeys(("activation checkpointing", "both"), "1.34")
    assert {name for name, row in rows.items() if row[3] == "the same bits"} == {
        *("none", "activation checkpointing", "update in backward")
    }
    assert rows["4 micro-batches"][3] == "the same, but for rounding"


def test_the_bytes_per_parameter_are_those_of_the_optimizers():
    sizes = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    for name, weight, gradient, state, total in rows_below_without_name():
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        settings = {"momentum": 0.9} if "momentum" in name else {}
        optimizer = sizes[name.split(",")[0].split()[0]]([parameter], lr=0.1, **settings)
        optimizer.step()
        held = sum(
            value.nbytes
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and value.numel() == 1000
        )
        assert [weight, gradient, state] == [
            parameter.nbytes / 1000,
            parameter.grad.nbytes / 1000,
            held / 1000,
        ], name
        assert total == weight + gradient + state


def rows_below_without_name() -> list[list]:
    """Return the rows of the table of bytes per parameter, whose first heading is empty."""
    lines = section(PAGE.read_text(), "How many bytes a training step needs").splitlines()
    rows = [[c.strip() for c in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    return [[name, *map(float, numbers)] for name, *numbers in rows[2:]]


def test_the_answers_are_right():
    assert f"therefore needs {16 * 7} GB" in TEXT
    assert f"16 × 3 = {16 * 3} GB with AdamW, and 8 × 3 = {8 * 3} GB with SGD" in TEXT
