"""Test `accel-demo explain` with public error messages, logs of healthy runs and bad input."""

import io
import sys
import time
from pathlib import Path

import pytest
import yaml

from accel_demo.errors import UserError
from accel_demo.lab.explain.catalog import messages, places_of
from accel_demo.lab.explain.command import explain, main, read
from tests.conftest import REPOSITORY, run_to_end

FOLDER = Path(__file__).parent / "explain"
PUBLIC = {file.stem: file for file in sorted(FOLDER.glob("public/*.txt"))}
HEALTHY = {file.stem: file for file in sorted(FOLDER.glob("healthy/*.txt"))}
EXPECTED = yaml.safe_load((FOLDER / "public.yaml").read_text())
TIMEOUT = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)\n"


@pytest.fixture
def explained(tmp_path, capsys):
    """`explained(content)` returns the exit code and the output for a file with this content."""

    def explained(content: str | bytes) -> tuple[int, str]:
        file = tmp_path / "train.log"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return main([str(file)]), capsys.readouterr().out

    return explained


@pytest.mark.parametrize("name", PUBLIC)
def test_an_error_that_people_report_in_public_is_explained(name, explained):
    code, output = explained(PUBLIC[name].read_bytes())
    if isinstance(EXPECTED[name], dict):
        assert EXPECTED[name]["unknown"]
        assert (code, output.startswith("No line contains a message")) == (1, True)
    else:
        found = explain(read(PUBLIC[name]))
        pairs = zip(EXPECTED[name], found, strict=True)
        assert all(text in each.row["means"] for text, each in pairs)
        assert all(" ".join(each.row["means"].split()) in output for each in found)
        assert code == (1 if output.startswith("harmless") else 0)


def test_each_public_error_is_short_and_has_an_address():
    assert set(PUBLIC) == set(EXPECTED)
    assert len(PUBLIC) >= 20
    texts = [file.read_text().splitlines() for file in PUBLIC.values()]
    assert all(lines[0].startswith("# https://github.com/") for lines in texts)
    assert all(2 <= len(lines) <= 13 for lines in texts)
    assert len({lines[0] for lines in texts}) == len(texts)


@pytest.mark.parametrize("name", HEALTHY)
def test_no_fault_is_found_in_the_log_of_a_healthy_run(name, explained):
    code, output = explained(HEALTHY[name].read_bytes())
    assert code == 1, output


def test_there_are_logs_of_many_healthy_runs():
    assert len(HEALTHY) >= 10
    texts = [file.read_text() for file in HEALTHY.values()]
    assert any("Setting OMP_NUM_THREADS environment variable" in text for text in texts)
    assert any("The following values were not passed to" in text for text in texts)
    assert any("it/s]" in text for text in texts)


@pytest.mark.parametrize("row", messages(), ids=lambda row: row["message"])
def test_a_row_finds_its_own_message(row):
    before, after = "  0%|    | 0/9 [00:00<?, ?it/s]", " on rank 1\nthe next line"
    message = row["search"].replace("…", " 1 ") if "search" in row else row["message"]
    assert len(list(places_of(row, before + message + after))) == 1
    assert {each["means"] for each in messages() if any(places_of(each, message))} == {row["means"]}


def test_a_message_is_named_with_its_line_its_meaning_and_its_page(explained):
    code, output = explained("epoch 1\nepoch 2\n" + TIMEOUT * 3)
    assert code == 0
    first, means, page = output.splitlines()
    assert first == "line 3 (and 2 more lines): " + TIMEOUT.strip()
    assert means.startswith("  A rank waited in a collective until its time limit, because ")
    assert page == '  read: page 50, "Why nothing happens"'


def test_the_ranks_that_have_printed_a_message_are_named(explained):
    output = explained(TIMEOUT.replace("[rank0]", "[rank3]") + TIMEOUT * 2)[1]
    assert output.startswith("line 1 (and 2 more lines; from ranks 0, 3): [rank3]")


def test_messages_come_in_the_order_of_their_lines_and_the_harmless_ones_last(explained):
    harmless = "The following values were not passed to `accelerate launch`"
    code, output = explained(f"{harmless}\nCUDA out of memory. Tried to allocate 2 GiB\n{TIMEOUT}")
    starts = [line[:9] for line in output.splitlines() if line and line[0] != " "]
    assert (code, starts) == (0, ["line 2: C", "line 3: [", "harmless:"])


def test_messages_with_the_same_meaning_are_explained_once(explained):
    code, output = explained(
        "failed (exitcode: -9) local_rank: 1\nSignal 9 (SIGKILL) received by PID 7"
    )
    assert (code, output.count("has killed this rank")) == (0, 1)
    assert output.startswith("line 1 (and 1 more line): failed")


def test_a_pitfall_with_a_message_belongs_to_the_explanation_of_its_line(monkeypatch, explained):
    keys = ("name", "title", "cause", "cure", "message", "page", "heading")
    texts = [
        ("late", "One is late", "It waits.", "Hurry.", "Watchdog caught … timeout", 20, "Order"),
        ("own", "Nobody knows it", "It is new.", "Read.", "a message without a row", 30, "New"),
        ("absent", "Not here", "None.", "None.", "a message that is not in the log", 30, "No"),
    ]
    pitfalls = [dict(zip(keys, values, strict=True)) for values in texts]
    monkeypatch.setattr("accel_demo.lab.explain.command.pitfalls", lambda: pitfalls)
    code, output = explained(f"{TIMEOUT}a message without a row\n")
    known, new = output.split("\n\n")
    assert code == 0
    assert [line.strip() for line in known.splitlines()[2:]] == [
        "One is late",
        "cause: It waits.",
        "cure: Hurry.",
        "scripts: tutorials/pitfalls/late_broken.py and _fixed.py",
        'read: page 50, "Why nothing happens", page 20, "Order"',
    ]
    assert new.startswith(
        "line 2: a message without a row\n  Nobody knows it\n    cause: It is new."
    )
    assert "Not here" not in output


def test_an_exit_code_that_is_no_signal_is_not_taken_for_one(explained):
    code, output = explained("failed (exitcode: 1) local_rank: 0 (pid: 917) of binary: python")
    assert code == 1, output


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (" 10%|█   |\r 20%|██  |\r" + TIMEOUT, 1),
        ("a\r\nb\r\n" + TIMEOUT.replace("\n", "\r\n"), 3),
        (("a\nb\n" + TIMEOUT).encode("utf-16"), 3),
        ("a\n\x1b[31mWatchdog caught \x1b[0m\x1b[1;32mcollective operation timeout\x1b[0m", 2),
        (b"\x00\xff\xfe\x80 a\n" + TIMEOUT.encode(), 2),
        ("│ " + TIMEOUT.strip() + " │", 1),
    ],
    ids=["progress bar", "Windows", "UTF-16", "colors", "binary", "frame"],
)
def test_a_message_is_found_in_any_form_of_a_log(content, number, explained):
    code, output = explained(content)
    assert (code, output.partition(":")[0]) == (0, f"line {number}")
    assert output.replace("\n", "").isprintable()
    assert "10%" not in output


@pytest.mark.parametrize("content", [b"", b"\n", b"\r", bytes(range(256)) * 40, b"\xff\xfea"])
def test_a_file_without_a_message_has_exit_code_1(content, explained):
    code, output = explained(content)
    assert (code, output.startswith("No line contains a message")) == (1, True)


def test_standard_input_is_read_if_no_file_is_named(monkeypatch, capsys):
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TIMEOUT.encode())))
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("line 1: [rank0]")


def test_input_that_cannot_be_read_is_an_error_of_one_line(tmp_path, start, monkeypatch):
    missing = tmp_path / "missing.log"
    for file, reason in ((missing, "No such file or directory"), (tmp_path, "Is a directory")):
        run = start(["accel-demo", "explain", file])
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr == f"error: {file} can't be read: {reason}\n"
    run = start(["accel-demo", "explain", "a.log", "b.log"])
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    monkeypatch.setattr(sys, "stdin", None)  # as after `accel-demo explain <&-`
    with pytest.raises(UserError, match="there is no standard input"):
        main([])


def test_the_exit_code_of_the_command_is_that_of_main(tmp_path, start):
    for content, code in (("", 1), (TIMEOUT + "█ CUDA out of memory. Tried to allocate", 0)):
        (tmp_path / "train.log").write_text(content)
        run = start(["accel-demo", "explain", tmp_path / "train.log"], PYTHONIOENCODING="ascii")
        assert (run.returncode, run.stderr) == (code, "")


def test_a_pipe_that_is_closed_early_is_no_error(tmp_path, start):
    (tmp_path / "train.log").write_text(TIMEOUT)
    command = f"accel-demo explain < {tmp_path}/train.log | head -c 1"
    run = start(["bash", "-c", command])
    assert (run.stdout, run.stderr) == ("l", "")


def test_a_line_of_a_million_characters_is_read_once(explained):
    """Searching for two parts of a message again and again would take hours."""
    begin = time.process_time()
    code, output = explained("rank 0 has more batches (" * 40_000 + TIMEOUT)
    assert time.process_time() - begin < 2
    assert (code, len(output.splitlines()[0]) < 200) == (0, True)


def test_a_log_of_100_megabytes_takes_a_few_seconds():
    line = "2026-01-01 12:00:00 INFO step 12345: loss 0.123456 on rank 1 of 8, device cuda:1\n"
    text = line * (10**8 // len(line)) + TIMEOUT
    begin = time.process_time()
    [found] = explain(text)
    assert time.process_time() - begin < 10
    assert found.lines == [text.count("\n")]


@pytest.mark.slow
def test_the_installed_command_works_outside_the_repository(tmp_path):
    """pip builds a package, as for users, so this test needs the network."""
    pip = ["python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site"]
    installed = run_to_end([*pip, REPOSITORY], timeout=300, real=True)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "train.log").write_text(TIMEOUT)
    code = f"""
import sys
sys.path.insert(0, "{tmp_path}/site")
import accel_demo.cli
assert accel_demo.cli.__file__ == "{tmp_path}/site/accel_demo/cli.py"
sys.argv = ["accel-demo", "explain", "train.log"]
accel_demo.cli.main()
"""
    run = run_to_end(["python", "-c", code], cwd=tmp_path, real=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert 'read: page 50, "Why nothing happens"' in run.stdout


def test_the_first_error_that_is_not_explained_is_shown_beside_its_consequence(explained):
    own = "[rank1]: KeyError: 'label'\n"
    code, output = explained(f"epoch 1\n{own}{TIMEOUT}")
    assert code == 0
    first, *_, last = output.splitlines()
    assert first.startswith("line 3: ")
    assert last == (f"An earlier error, which the course doesn't explain: line 2: {own.strip()}")
    assert explained(own)[0] == 1  # alone, it is not a message that the course explains


EARLIER = "An earlier error, which the course doesn't explain: line "


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("[default1]:[rank1]: KeyError: 'label'", 2),
        ("[rank1]: AssertionError", 2),
        ("my.package.OwnError: no such image", 2),
        (" 10%|█   |\rValueError: no such image", 2),
    ],
)
def test_an_earlier_error_is_found_in_any_form(error, line, explained):
    output = explained(f"epoch 1\n{error}\n[rank0]: retry\n{TIMEOUT}")[1]
    assert output.splitlines()[-1] == f"{EARLIER}{line}: {error.rpartition(chr(13))[2]}"


@pytest.mark.parametrize(
    "log",
    [
        f"{TIMEOUT}KeyError: 'label'\n",  # not earlier
        f"subprocess.CalledProcessError: Command 'train' failed\n{TIMEOUT}",
        f"torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0\n{TIMEOUT}",
        'RuntimeError: Error(s) in loading:\n\tUnexpected key(s) in state_dict: "module.a"',
        f"raise KeyError: with other words\n{TIMEOUT}",
    ],
)
def test_an_error_that_is_no_other_cause_is_not_shown(log, explained):
    code, output = explained(log)
    assert (code, EARLIER in output) == (0, False), output


def test_what_is_printed_of_the_log_is_short_and_has_no_control_characters(explained):
    code, output = explained(
        f"KeyError: 'a\x07\x08{'b' * 400}'\nretry\n{TIMEOUT.strip()}{'c' * 400}\n"
    )
    first, *_, last = output.splitlines()
    assert code == 0 and output.replace("\n", "").isprintable()
    assert all(line.endswith(" …") and 150 < len(line) < 230 for line in (first, last))


@pytest.mark.parametrize(
    "line",
    [
        "server started, waiting for clients",
        "cp: can't open file 'a.txt'",
        "urllib3: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "curl: (56) Recv failure: Connection closed by peer",
        "UserWarning: CUDA initialization: Found no NVIDIA driver on your system. Please check",
        "unhandled error: no such user",
        "TypeError: forward() takes 2 positional arguments but 3 were given",
        "DataLoader worker 3 has started",
        "AttributeError: 'MyModel' object has no attribute 'generate'",
        "failed (exitcode: -90)",
        "Missing key 'module.weight'",
        "KeyError: 'RANKS'",
    ],
)
def test_a_line_that_only_resembles_a_message_is_no_fault(line, explained):
    code, output = explained(f"epoch 1\n{line}\nepoch 2\n")
    assert code == 1, output


def test_harmless_lines_are_told_from_faults_in_the_last_sentence(explained):
    harmless = "ERROR: gpuGetDeviceCount failed with code 100"
    assert explained(harmless)[1].splitlines()[-1].startswith("No other line contains a message")
    assert explained("nothing")[1].startswith("No line contains a message")


def test_a_terminal_is_told_how_to_end_the_message(monkeypatch, capsys):
    terminal = io.TextIOWrapper(io.BytesIO(TIMEOUT.encode()))
    for is_terminal in (True, False):
        terminal.seek(0)
        monkeypatch.setattr(terminal, "isatty", [lambda: False, lambda: True][is_terminal])
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main([]) == 0
        assert ("Ctrl-D" in capsys.readouterr().err) == is_terminal


def test_a_log_full_of_errors_takes_a_few_seconds(explained):
    begin = time.process_time()
    code, _ = explained("[rank1]: KeyError: 'label'\n" * 400_000 + TIMEOUT)
    assert (code, time.process_time() - begin < 10) == (0, True)


def test_a_function_that_spawn_calls_is_recognized_by_its_traceback(
    explained,
):
    traceback = (
        '  File "/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap\r\n'
        "    fn(i, *args)\r\nTypeError: train() takes 1 positional argument but 2 were given\r\n"
    )
    code, output = explained(traceback)
    assert code == 0 and "spawn_argument_broken.py" in output
