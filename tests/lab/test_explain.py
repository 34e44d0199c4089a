"""Test `accel-demo explain` with public error messages, logs of healthy runs and bad input."""

import io
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from accel_demo.errors import UserError
from accel_demo.lab.explain.catalog import messages, places_of
from accel_demo.lab.explain.command import explain, main
from tests.conftest import REPOSITORY, run_to_end

FOLDER = Path(__file__).parent / "explain"
PUBLIC = {file.stem: file for file in sorted(FOLDER.glob("public/*.txt"))}
HEALTHY = {file.stem: file for file in sorted(FOLDER.glob("healthy/*.txt"))}
EXPECTED = yaml.safe_load((FOLDER / "public.yaml").read_text())
TIMEOUT = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)\n"
UNSCALE = "ValueError: Attempting to unscale FP16 gradients.\n"
TRACEBACK = "Traceback (most recent call last):\n"


@pytest.fixture
def explained(tmp_path, capsys):
    """`explained(content)` returns the exit code and the output for a file with this content."""

    def explained(content: str | bytes) -> tuple[int, str]:
        file = tmp_path / "train.log"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return main([str(file)]), capsys.readouterr().out

    return explained


def texts_of(log: str) -> list[str]:
    """Return what each explanation of a log says, and the names of its pitfalls."""
    texts = []
    for each in explain(log):
        texts += [each.row["means"]] if each.row else []
        texts += [pitfall["name"] for pitfall in each.pitfalls]
    return texts


def assert_says(log: str, phrases: list[str]) -> None:
    texts = texts_of(log)
    assert len(texts) == len(phrases), texts
    for text, phrase in zip(texts, phrases, strict=True):
        assert phrase in text


@pytest.mark.parametrize("name", PUBLIC)
def test_an_error_that_people_report_in_public_is_explained(name, explained):
    log = PUBLIC[name].read_text()
    assert_says(log, EXPECTED[name])
    code, output = explained(log)
    assert code == (not EXPECTED[name] or output.startswith("harmless"))
    assert "doesn't explain" not in output  # the errors that a wrapper or a header repeats


@pytest.mark.parametrize(
    ("log", "phrases"),
    [
        ("No backend type associated with device type mps", ["No backend of the process group"]),
        ('Missing key(s) in state_dict: "_orig_mod.0.bias".', ["load them before `torch.compile`"]),
        ('Unexpected key(s) in state_dict: "_orig_mod.0.bias".', ["were saved from a compiled"]),
        ('Missing key(s) in state_dict: "module.0.bias".', ["most often, the weights of a plain"]),
        ('Missing key(s) in state_dict: "layer.weight".', []),
        ("f() takes 1 positional argument but 2 were given", ["If `mp.spawn`", "spawn_argument"]),
        ("f() takes 0 positional arguments but 1 was given", ["If `mp.spawn`", "spawn_argument"]),
        ("Weights only load failed. GLOBAL numpy.scalar", ["which the rest of the message names"]),
        (
            "Weights only load failed.\n"
            "Unsupported global: GLOBAL torch.nn.parallel.distributed.DistributedDataParallel",
            ["which the rest of the message names", "whole_model"],
        ),
        ("KeyError: 'LOCAL_RANK'\nKeyError: 'RANK'", ["only if it starts several processes"]),
        ("Can't pickle <function <lambda> at 0x7f>", ["or saved with `torch.save`"]),
        (
            "'DistributedDataParallel' object has no attribute 'config'",
            ["The wrapper hides", "hidden_method"],
        ),
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 9 ms", ["is still busy before it"]),
        (
            "UserWarning: c10d::allreduce_: an autograd kernel was not registered to",
            ["Autograd ignores this collective", "all_reduce_without_gradient"],
        ),
        ("c10d::allgather_: an autograd kernel was not registered", ["Autograd ignores this"]),
        ("torchvision::nms: an autograd kernel was not registered", []),
        ("NCCL error in: a.cpp:1, unhandled system error, NCCL version 2.25.1", []),
        (
            "unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed",
            ["CUDA has"],
        ),
        ("[/src/gloo/tcp/pair.cc:1] Read error [::1]:9: Connection reset by peer", ["has ended"]),
        ("DistNetworkError: recv failed: Connection reset by peer", ["Another rank has ended"]),
        ("RuntimeError: Connection reset by peer", ["Another rank has ended"]),
        ("RuntimeError: Address already in use", ["The port is in use"]),
        ("RuntimeError: Found no NVIDIA driver on your system.", ["this machine has none"]),
        ("freeze_support()", []),
    ],
)
def test_a_message_is_explained_by_what_is_true_for_each_of_its_causes(log, phrases):
    assert_says(log, phrases)


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


def test_what_the_profiler_prints_without_a_gpu_is_harmless(explained):
    code, output = explained(HEALTHY["profiler"].read_bytes())
    harmless, none = output.splitlines()
    assert harmless.startswith("harmless: line 5: The profiler has found no GPU")
    assert none.startswith("No other line contains a message that the course explains. ")


def test_a_launcher_whose_store_left_the_exit_barrier_first_is_harmless(explained):
    log = HEALTHY["exit_barrier"].read_text()
    ended = "Connection reset by peer"
    reset, replaced = re.subn(r"(?<=DistNetworkError: )Failed to recv, got 0 bytes\.", ended, log)
    assert replaced == 1
    for each in (log, reset):
        code, output = explained(each)
        assert code == 1 and "had already exited. If a launcher has failed" in output
    code, output = explained(f"torch.distributed.DistNetworkError: {ended}\n{log}")
    assert code == 0 and output.startswith("line 1: torch") and "harmless: line" in output


def test_a_launcher_that_waits_in_vain_at_the_exit_barrier_has_a_fault(explained):
    log = HEALTHY["exit_barrier"].read_text()
    timeout = "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /last_member"
    log, replaced = re.subn("torch.distributed.DistNetworkError.*", timeout, log)
    assert replaced == 1
    code, output = explained(log)
    assert code == 0 and "waited in vain" in output and "harmless" not in output


def test_there_are_logs_of_many_healthy_runs():
    assert len(HEALTHY) >= 10
    texts = [file.read_text() for file in HEALTHY.values()]
    assert any("Setting OMP_NUM_THREADS environment variable" in text for text in texts)
    assert any("The following values were not passed to" in text for text in texts)
    assert any("it/s]" in text for text in texts)


@pytest.mark.parametrize("row", messages(), ids=lambda row: row["message"])
def test_a_row_finds_its_own_message_and_is_the_only_one(row):
    line = row.get("search", row["message"]).replace("…", " 2 ")
    [found] = explain(f"  0%|    | 0/9 [00:00<?, ?it/s]{line} on rank 1\nthe next line")
    assert (found.row["means"], found.lines) == (row["means"], [1])


def test_only_the_ellipsis_of_a_message_stands_for_any_text():
    for text in ("cuda:1", "cpu", "rank 2", "3"):
        assert list(places_of("cuda:0 on rank … failed", f"{text} on rank 1 failed")) == []
    text = "a\ncuda:0 on rank 1 has failed\nb"
    assert list(places_of("cuda:0 on rank … failed", text)) == [(2, len(text) - 2)]
    assert list(places_of("cuda:0 on rank … failed", text.replace(" 1 ", " 1\n"))) == []
    assert list(places_of("… has failed", text)) == [(2, len(text) - 2)]


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
    code, output = explained(f"{harmless}\nError: CUDA out of memory\n{TIMEOUT}")
    starts = [line[:9] for line in output.splitlines() if line and line[0] != " "]
    assert (code, starts) == (0, ["line 2: E", "line 3: [", "harmless:"])


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
        "possible fault: One is late",
        "cause: It waits.",
        "cure: Hurry.",
        "scripts: tutorials/pitfalls/late_broken.py and _fixed.py",
        'read: page 50, "Why nothing happens", page 20, "Order"',
    ]
    assert new.startswith(
        "line 2: a message without a row\n  possible fault: Nobody knows it\n    cause: It is new."
    )
    assert "Not here" not in output


def test_a_row_without_a_page_names_that_of_the_row_with_the_same_meaning(explained):
    log = "KeyError: 'LOCAL_RANK'\nKeyError: 'RANK'\nKeyError: 'WORLD_SIZE'"
    for each in (log, "KeyError: 'RANK'"):
        code, output = explained(each)
        assert (code, output.count("Nothing has set this variable")) == (0, 1)
        assert output.endswith('  read: page 11, "Common mistakes"\n')


def test_a_page_is_named_once(explained):
    output = explained(UNSCALE)[1]  # the row and its pitfall name the same section
    assert output.endswith('  read: page 33, "Common mistakes"\n')


def test_an_exit_code_that_is_no_signal_is_not_taken_for_one(explained):
    code, output = explained("failed (exitcode: 1) local_rank: 0 (pid: 917) of binary: python")
    assert code == 1, output


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (" 10%|█   |\r 20%|██  |\r" + TIMEOUT, 1),
        ("a\r\nb\r\n" + TIMEOUT.replace("\n", "\r\n"), 3),
        (("a\nb\n" + TIMEOUT).encode("utf-16"), 3),
        (("\ufeffa\nb\n" + TIMEOUT).encode("utf-16-be"), 3),
        ("a\n\x1b[31mWatchdog caught \x1b[0m\x1b[1;32mcollective operation timeout\x1b[0m", 2),
        (b"\x00\xff\xfe\x80 a\n" + TIMEOUT.encode(), 2),
        ("│ " + TIMEOUT.strip() + " │", 1),
    ],
    ids=["progress bar", "Windows", "UTF-16", "UTF-16, big-endian", "colors", "binary", "frame"],
)
def test_a_message_is_found_in_any_form_of_a_log(content, number, explained):
    code, output = explained(content)
    assert (code, output.partition(":")[0]) == (0, f"line {number}")
    assert output.replace("\n", "").isprintable()
    assert "10%" not in output


@pytest.mark.parametrize("content", [b"", b"\n", b"\r", bytes(range(256)) * 40, b"\xff\xfea"])
def test_a_file_without_a_message_has_exit_code_1(content, explained):
    code, output = explained(content)
    assert code == 1
    assert output.startswith("No line contains a message that the course explains. ")


def test_standard_input_is_read_if_no_file_is_named(monkeypatch, capsys):
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TIMEOUT.encode())))
        assert main(arguments) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("line 1: [rank0]")
        assert captured.err == ""


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
    for content, code in (("", 1), (TIMEOUT + "█ Error: CUDA out of memory", 0)):
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


@pytest.mark.parametrize(
    ("before", "number", "line"),
    [
        ("epoch 1\n[rank1]: KeyError: 'label'\n", 2, "[rank1]: KeyError: 'label'"),
        ("[default1]:[rank1]: KeyError: 1\n", 1, "[default1]:[rank1]: KeyError: 1"),
        ("3: KeyError: 1\n", 1, "3: KeyError: 1"),  # srun --label
        ("AssertionError\n", 1, "AssertionError"),
        ("The following values were not passed to\nKeyError: 1\n", 2, "KeyError: 1"),
        ("Exception: no\n", 1, "Exception: no"),
        ("my.own.OddException: no\nKeyError: 1\n", 1, "my.own.OddException: no"),
        ("a\n 10%|█  |\r 20%|██ |\rKeyError: 1\n", 2, "KeyError: 1"),
        ("a\r\nKeyError: 1\r\n", 2, "KeyError: 1"),
        ("\x1b[1;31mKeyError\x1b[0m: a\tb\x07\n", 1, "KeyError: a b"),
        (f"KeyError: {'a' * 200}\n", 1, f"KeyError: {'a' * 150} …"),
        # an error whose message is on the lines below, and another traceback before the fault
        (f"RuntimeError: a\n{TRACEBACK}", 1, "RuntimeError: a"),
        (f"{TRACEBACK}RuntimeError:\n  b\n{TRACEBACK}", 2, "RuntimeError:"),
    ],
)
def test_an_error_before_the_first_fault_is_shown_after_the_explanations(
    before, number, line, explained
):
    code, output = explained(before + TIMEOUT)
    fault, error = output.split("\n\n")
    assert (code, fault.partition(": ")[2].splitlines()[0]) == (0, TIMEOUT.strip())
    first, says, *harmless = error.splitlines()
    assert all(each.startswith("harmless: ") for each in harmless)
    assert first == f"line {number}: {line}"
    assert says.startswith("  The course doesn't explain this error")
    assert "doesn't explain" not in explained(before)[1]  # no fault follows


@pytest.mark.parametrize(
    "log",
    [
        f"{TIMEOUT}KeyError: 1\n",
        f"subprocess.CalledProcessError: Command 'a' returned non-zero exit status 1.\n{TIMEOUT}",
        f"torch.multiprocessing.spawn.ProcessRaisedException: a\n{TIMEOUT}",
        f"torch.multiprocessing.spawn.ProcessExitedException: a\n{TIMEOUT}",
        f"[rank0]: torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a\n{TIMEOUT}",
        'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): "a".\n'
        'Unexpected key(s) in state_dict: "module.a".\n',
        f"{TRACEBACK}RuntimeError: \n\n"
        "   An attempt has been made to start a new process before the\n",
        "DistBackendError: NCCL error in: a.cpp:1, invalid usage, NCCL version 2.19.3\n"
        "ncclInvalidUsage: a\nLast error:\nDuplicate GPU detected\n",
        f"epoch 1: 3 errors\nstep 2 KeyError: 1\nprint(Exception)\nErrors: none\n{TIMEOUT}",
        f"Exception ignored in: <function a at 0x7f>\n{TIMEOUT}",
    ],
)
def test_no_error_is_shown_that_follows_a_fault_or_only_reports_it(log, explained):
    code, output = explained(log)
    assert (code, "doesn't explain" in output) == (0, False), output


@pytest.mark.parametrize(
    "line", [UNSCALE, "KeyError: 1\n", "RuntimeError: \n", "Error" * 9, TIMEOUT]
)
def test_a_log_of_many_errors_is_read_in_a_few_seconds(line, explained):
    """Counting the lines before each of the errors would take minutes."""
    begin = time.process_time()
    code, output = explained(line * (9_000_000 // len(line)) + "\n" + TIMEOUT)
    assert time.process_time() - begin < 10
    assert (code, output.count(TIMEOUT.strip())) == (0, 1)


def test_the_line_that_is_printed_is_short_and_has_no_control_characters(explained):
    start = "\x1b]0;title\x07\x1b]8;;http://a\x1b\\\x1b(B\x1b[38:5:1m[rank0]:\x1b[>4m\x08\u202e\x9b"
    _, output = explained(f"{start} {TIMEOUT.strip()}\x1b[\x1b]\tend{'e' * 200}\n")
    line = f"[rank0]: {TIMEOUT.strip()} end"
    assert output.splitlines()[0] == f"line 1: {line}{'e' * (160 - len(line))} …"
    assert explained(f"  {TIMEOUT}")[1].startswith("line 1: [rank0]")
    exactly = TIMEOUT.strip().ljust(160, "a")
    assert explained(exactly)[1].splitlines()[0] == f"line 1: {exactly}"


def test_a_terminal_is_asked_for_the_message(monkeypatch, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(TIMEOUT.encode()))
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main([]) == 0
    assert capsys.readouterr().err == "Paste the message, then press Ctrl-D:\n"
