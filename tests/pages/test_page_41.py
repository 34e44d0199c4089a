"""Page 41: recorded speed-ups, and the reasons why DDP can be slow."""

import json
import re
from dataclasses import fields

import pytest
from accelerate import DistributedDataParallelKwargs
from alpha_beta import NCCL_LINKS

from accel_demo.lab.scaling.fit import amdahl
from tests.conftest import run_to_end
from tests.pages.pages import TUTORIALS, bound_to, load_module, rows_below, table_rows, transcript

PAGE = TUTORIALS / "41_scaling.md"
SLOWER = load_module(TUTORIALS / "41_slower.py")
REASONS = rows_below(TUTORIALS / "transcripts" / "slower.txt", "reason")


@pytest.mark.parametrize("name", ["scaling", "slower"])
def test_each_transcript_matches_its_command_and_is_on_the_page(name):
    lines, recorded = PAGE.read_text().splitlines(), transcript(name)
    commands = load_module(TUTORIALS / "40_record.py").RECORDS[name]
    assert list(recorded) == commands
    [output] = recorded.values()
    assert "2 connected processes" in output
    if name == "scaling":  # the page leaves out the table of fits
        start, end = output.index("| fit "), output.index("| work, in two parts")
        output = output[:start] + output[end:]
    without_effect = [row for row in REASONS if effect(row) == "none"]
    left_out = [line for line in output.splitlines() if line not in lines]
    assert [line.split(" |")[0][2:].strip() for line in left_out] == (
        [row[0] for row in without_effect] if name == "slower" else []
    )
    for picture in re.findall(r"--plot tutorials/(\S+)", commands[0]):
        assert (TUTORIALS / picture).exists() and f"]({picture})" in PAGE.read_text()


def test_the_numbers_in_the_text_are_those_of_the_transcripts():
    text = " ".join(PAGE.read_text().split())
    [first, *_] = rows_below(PAGE, "reason")
    with_8, with_512 = re.findall(r"batch (?:8|512) (\S+) ×", first[3])
    assert f"handle {with_8} times as many images" in text
    assert f"speed-up is then {with_512}" in text
    speedups = {row[2]: row[5:7] for row in table_rows(PAGE.name, 8) if row[0] == "raw DDP"}
    (strong, strong_interval), (weak, weak_interval) = speedups["2 × 64"], speedups["2 × 128"]
    assert f"(with raw DDP, {strong} against {weak})" in text
    assert float(strong_interval.split()[-1]) < float(weak_interval.split()[0]), "no overlap"


def effect(row: list[str]) -> str:
    """Return "clear", "small" or "none", depending on the row's interval, or "" without one."""
    found = re.search(r"\(× (\S+) – (\S+)\)", row[3])
    if not found:
        return ""
    low, high = map(float, found.groups())
    return "clear" if high < 0.9 or low > 1.1 else "small" if high < 1 or low > 1 else "none"


def test_only_the_named_fixes_have_an_effect_and_three_of_them_a_clear_one():
    def reasons(kind: str) -> list[str]:
        return [row[0] for row in REASONS if effect(row) == kind]

    clear = ["all-reduce in every micro-batch", "processes share cores", "too many threads"]
    assert reasons("clear") == clear
    assert reasons("small") == ["no overlap: one big bucket", "buffers sent in every forward"]


def test_the_buckets_of_gpt_2_are_calculated_and_the_text_follows():
    text = " ".join(PAGE.read_text().split())
    program = load_module(TUTORIALS / "41_will_it_hide.py")
    backward, count, last = 1e3 * program.backward, len(program.buckets), program.buckets[-1]
    assert f"Backward takes {backward:.0f} ms on each GPU." in text
    assert f"{50257 * 768 * 4 / 1e6:.0f} MB" in text
    sent = f"DDP sends {sum(program.buckets) / 1e6:.0f} MB of gradients in {count} buckets."
    assert f"{sent} The last bucket has {last / 1e6:.0f} MB." in text
    rows = {
        row[0]: [float(cell.split()[0]) for cell in row[1:]]
        for row in rows_below(PAGE, "connection")
    }
    assert list(rows) == list(NCCL_LINKS)
    of_last = {name: 1e3 * link.ring_all_reduce(last, 8) for name, link in NCCL_LINKS.items()}
    more = [name for name, (_, exposed) in rows.items() if exposed > 1.05 * of_last[name]]
    assert more == ["Ethernet, 10 Gbit/s"] and round(rows[more[0]][0] / backward, -1) == 10
    assert all(exposed >= max(0, total - backward - 1) for total, exposed in rows.values())
    assert [name for name, (total, _) in rows.items() if total < 8] == [
        name for name in rows if "NVLink" in name
    ]


def test_the_answer_on_amdahls_law_is_right():
    for processes in (8, 1000):
        speedup = f"1 / (0.1 + 0.9 / {processes}) = {amdahl(0.1, processes):.1f} times"
        assert speedup in PAGE.read_text()


def test_in_the_transcript_two_threads_of_python_code_keep_one_core_busy():
    [said] = transcript("scaling").values()
    rows = [[cell.strip() for cell in line.split("|")] for line in said.splitlines()]
    busy = {row[2]: float(row[5]) for row in rows if row[1:2] == ["preprocessing in Python"]}
    assert "This Python has the global interpreter lock." in said
    assert list(busy) == ["one after the other", "two threads", "two processes"]
    assert busy["two threads"] < 1.15


def test_every_row_of_reasons_has_a_sign_a_cure_and_a_number():
    assert len(REASONS) == 13
    for reason, sign, cure, figure in REASONS:
        assert reason and sign and cure and re.search(r"\d", figure)


def test_a_reason_for_slow_ddp_is_shown_with_two_times_and_the_interval_of_their_ratio():
    names = "DDP|small batch|large batch|share every micro-batch|no_sync|one bucket|small buckets|"
    names += "bf16 hook|gradient_as_bucket_view|find_unused_parameters|no buffers|straggler|"
    names += "all threads|Python in the loop|one process, large batch|one process, small batch"
    ms = {name: [10.0] * 5 for name in names.split("|")}
    ms["one process, small batch"] = [4.0] * 5  # two processes take 10 ms for twice the images
    ms["no_sync"] = [4.0, 5.0, 5.0, 5.0, 6.0]
    place = {"repeats": 5, "processes": 2, "threads": 1, "device": "cpu", "backend": "gloo"}
    start = {"seconds_to_first_step": 5.0, "first_steps_ms": [50.0, 10.0, 10.0, 10.0]}
    measured = {"megabytes": 7.5, "ms_per_step": ms, "straggler_ms_by_rank": [30.0, 31.0]}
    result = SLOWER.ReasonsResult(**place, **start, **measured)
    rows = {row[0]: row[3] for row in SLOWER.reason_rows(result)}
    assert len(rows) == 12  # one more can be measured only on Linux
    assert rows["more to send than to compute"].endswith("batch 8 0.80 ×, batch 512 2.00 ×")
    expected = "8 × 8 images: 10.0 → 5.0 ms (× 0.40 – 0.60)"
    assert rows["all-reduce in every micro-batch"] == expected
    assert rows["start-up"] == "5 s to step 1, as long as 500 steps"
    ms["half of the cores"] = [20.0] * 5
    rows = {row[0]: row[3] for row in SLOWER.reason_rows(result)}
    assert rows["processes share cores"].endswith("20.0 → 10.0 ms (× 0.50 – 0.50)")


@pytest.mark.slow
def test_the_benchmark_measures_each_reason_in_two_connected_processes(tmp_path):
    command = ["python", TUTORIALS / "41_slower.py", "--quick"]
    # real=True, because the command sets TORCH_CPP_LOG_LEVEL, which torch reads on import.
    result = run_to_end([*command, "--json", tmp_path / "found.json"], timeout=600, real=True)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["processes"], found["device"], found["backend"]) == (2, "cpu", "gloo")
    assert all(ms > 0 for values in found["ms_per_step"].values() for ms in values)
    assert found["straggler_ms_by_rank"][1] >= 20  # rank 1 sleeps for 20 ms in each step
    # One row sets find_unused_parameters=True on purpose, so the command suppresses the warning.
    assert "find_unused_parameters=True was specified" not in result.stderr
    reasons = 12 + ("half of the cores" in found["ms_per_step"])  # only Linux can pin processes
    assert len([line for line in result.stdout.splitlines() if line.startswith("|")]) == 2 + reasons


def test_accelerate_has_only_the_old_argument_for_buffers():
    bound_to(
        "accelerate", PAGE.name, "Accelerate {version} doesn't have `forward_sync_buffers` yet"
    )
    arguments = [field.name for field in fields(DistributedDataParallelKwargs)]
    assert "broadcast_buffers" in arguments and "forward_sync_buffers" not in arguments
