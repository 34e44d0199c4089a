"""Page 41: recorded speed-ups, and the reasons why DDP can be slow."""

import json
import re

import pytest
from alpha_beta import NCCL_LINKS

from accel_demo.lab.scaling.fit import amdahl
from tests.conftest import run_to_end
from tests.pages.pages import TUTORIALS, load_module, rows_below, table_rows, transcript

PAGE = TUTORIALS / "41_scaling.md"
SLOWER = load_module(TUTORIALS / "41_slower.py")
REASONS = rows_below(TUTORIALS / "transcripts" / "slower.txt", "reason")


@pytest.mark.parametrize("name", ["speedup", "scaling", "slower", "spin"])
def test_each_transcript_matches_its_command_and_is_on_the_page(name):
    lines, recorded = PAGE.read_text().splitlines(), transcript(name)
    commands = load_module(TUTORIALS / "40_record.py").RECORDS[name]
    assert list(recorded) == commands
    [output] = recorded.values()
    assert "2 connected processes" in output
    assert [line for line in output.splitlines() if line not in lines] == []
    for picture in re.findall(r"--plot tutorials/(\S+)", commands[0]):
        assert (TUTORIALS / picture).exists() and f"]({picture})" in PAGE.read_text()


def test_the_numbers_in_the_text_are_those_of_the_transcripts():
    text = " ".join(PAGE.read_text().split())
    [first, *_] = rows_below(PAGE, "reason")
    pattern = r"(\S+) \((\S+) – (\S+)\) with (?:8|512)"
    (with_8, _, most), (with_512, least, _) = re.findall(pattern, first[2])
    assert float(most) < 1 < float(least), "slower, then faster than one process"
    assert f"handle {with_8} times as many images" in text
    assert f"speed-up is then {with_512}" in text
    speedups = {row[2]: row[5:7] for row in table_rows(PAGE.name, 8) if row[0] == "raw DDP"}
    (strong, strong_interval), (weak, weak_interval) = speedups["2 × 64"], speedups["2 × 128"]
    assert f"(with raw DDP, {strong} against {weak})" in text
    assert float(strong_interval.split()[-1]) < float(weak_interval.split()[0]), "no overlap"


def effect(row: list[str]) -> str:
    """Return "clear", "small" or "none", depending on the row's interval, or "" without one."""
    found = re.search(r"\(× (\S+) – (\S+)\)", row[2])
    if not found:
        return ""
    low, high = map(float, found.groups())
    return "clear" if high < 0.9 or low > 1.1 else "small" if high < 1 or low > 1 else "none"


def test_each_fix_with_an_interval_has_a_clear_effect():
    effects = {row[0]: effect(row) for row in REASONS}
    clear = [reason for reason, kind in effects.items() if kind == "clear"]
    names = ["all-reduce in every micro-batch", "more threads than cores", "processes share cores"]
    assert clear == names and set(effects.values()) == {"clear", ""}
    assert "All three intervals there are clearly below 1." in " ".join(PAGE.read_text().split())


def test_both_ranks_wait_for_the_straggler_and_only_the_first_step_is_slow():
    row = {
        reason: list(map(int, re.findall(r"\b\d{2,}\b", figure))) for reason, _, figure in REASONS
    }
    *by_rank, without = row["a straggler"]
    assert len(by_rank) == 2 and min(by_rank) > 1.3 * without
    first, later = row["the first step"]
    assert first > 1.5 * later
    assert f"rank 1 sleeps, for {1000 * SLOWER.LATE:.0f} ms" in " ".join(PAGE.read_text().split())


def test_the_size_of_the_gradients_is_that_of_the_model():
    size = sum(each.numel() for each in SLOWER.dense_model().parameters())
    text = " ".join(PAGE.read_text().split())
    assert f"has {size / 1e6:.1f} million parameters" in text
    assert f"Here that's {4 * size / 1e6:.1f} MB" in text


def test_the_recorded_script_keeps_its_batch_and_two_processes_are_faster():
    [(command, output)] = transcript("speedup").items()
    assert command in PAGE.read_text() and "2 connected processes on cpu" in output
    assert "Weak scaling, because each process keeps its batch" in output
    rows = rows_below(TUTORIALS / "transcripts" / "speedup.txt", "processes")
    assert [row[0] for row in rows] == ["1", "2"]
    speedup, efficiency = float(rows[1][3]), float(rows[1][5].rstrip("%"))
    assert abs(speedup / 2 - efficiency / 100) < 0.006
    assert 1 < float(rows[1][4].split()[0]) < speedup < 2


def test_more_threads_than_cores_are_slow_only_if_waiting_threads_spin():
    rows = [re.split(" – ", row[2]) for row in rows_below(PAGE, "environment")]
    (_, one_thread), (spinning, _), (_, sleeping) = [map(float, row) for row in rows]
    assert spinning > 3 * max(one_thread, sleeping)


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
    assert list(rows) == [name for name in NCCL_LINKS if name != "NVLink of an A100"]
    of_last = {name: 1e3 * NCCL_LINKS[name].ring_all_reduce(last, 8) for name in rows}

    def with_more_exposed(backward: float) -> list[str]:
        exposed = {name: max(of_last[name], total - backward) for name, (total, _) in rows.items()}
        return [name for name in rows if exposed[name] > 1.05 * of_last[name]]

    assert with_more_exposed(backward) == [name for name in rows if "Ethernet" in name]
    assert f"with `TOKENS = 2048`, backward takes {backward / 8:.1f} ms, less than NVLink's" in text
    assert backward / 8 < rows["NVLink of an H100"][0] == min(total for total, _ in rows.values())
    assert all(exposed >= max(0, total - backward - 1) for total, exposed in rows.values())


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


def test_every_row_of_reasons_has_a_cure_and_a_number():
    assert len(REASONS) == 7 and "measures seven things" in " ".join(PAGE.read_text().split())
    for reason, cure, figure in REASONS:
        assert reason and cure and re.search(r"\d", figure)


def test_a_reason_for_slow_ddp_is_shown_with_two_times_and_the_interval_of_their_ratio():
    names = "DDP|small batch|large batch|share every micro-batch|no_sync|straggler|all threads|"
    names += "one process, large batch|one process, small batch"
    ms = {name: [10.0] * 5 for name in names.split("|")}
    ms["one process, small batch"] = [4.0] * 5  # two processes take 10 ms for twice the images
    ms["no_sync"] = [4.0, 5.0, 5.0, 5.0, 6.0]
    place = {"repeats": 5, "processes": 2, "threads": 1, "device": "cpu", "backend": "gloo"}
    start = {"seconds_to_first_step": 5.0, "first_steps_ms": [50.0, 10.0, 10.0, 10.0]}
    measured = {"ms_per_step": ms, "straggler_ms_by_rank": [30.0, 31.0]}
    result = SLOWER.ReasonsResult(**place, **start, **measured)
    rows = {row[0]: row[2] for row in SLOWER.reason_rows(result)}
    assert len(rows) == 6  # one more can be measured only on Linux
    expected = "speed-up 0.80 (0.80 – 0.80) with 8 images, 2.00 (2.00 – 2.00) with 512 images"
    assert rows["more to send than to compute"] == expected
    expected = "10.0 → 5.0 (× 0.40 – 0.60)"
    assert rows["all-reduce in every micro-batch"] == expected
    assert rows["start-up"] == "5 s to step 1, as long as 500 steps"
    ms["half of the cores"] = [20.0] * 5
    rows = {row[0]: row[2] for row in SLOWER.reason_rows(result)}
    assert rows["processes share cores"] == "20.0 → 10.0 (× 0.50 – 0.50)"


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
    reasons = 6 + ("half of the cores" in found["ms_per_step"])  # only Linux can pin processes
    assert len([line for line in result.stdout.splitlines() if line.startswith("|")]) == 2 + reasons
