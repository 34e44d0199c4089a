"""The report shows what a run folder holds, whatever that is, and says what it cannot show."""

import base64
import json
import math
import os
import re
import shutil
import struct
import tempfile
import zlib
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.report import command as report
from accel_demo.lab.report import metrics as report_metrics
from accel_demo.lab.report.curves import MOST_POINTS, chart, log_ticks, thinned, ticks
from accel_demo.lab.report.files import Unreadable, printable
from accel_demo.lab.report.metrics import (
    CURVES,
    LONGEST_LINE,
    MOST_NOTES,
    MOST_PIECES,
    read_metrics,
)
from accel_demo.lab.report.page import write_report
from accel_demo.lab.report.predictions import check_png
from accel_demo.lab.report.runs import FILES, read_run
from accel_demo.lab.report.text import WIDTH, as_text, sparkline

PLANTED = "<script>document.title=1</script>&\"'"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b\u202ertl\u2028line\nline\r\ud800"


def png(width: int = 2, height: int = 2) -> str:
    """A grey PNG of this size, base64."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        size, end = struct.pack(">I", len(content)), struct.pack(">I", zlib.crc32(kind + content))
        return size + kind + content + end

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x80" * width) * height)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def training_line(step: int, loss=0.5, **changes) -> dict:
    values = {"step": step, "epoch": 1, "learning_rate": 0.01, "train_loss": loss}
    return {**values, "train_accuracy": 0.75, "images_per_second": 1000.5, **changes}


def test_line(step: int) -> dict:
    return {"step": step, "epoch": 1, "test_loss": 0.625, "test_accuracy": 0.8125}


test_line.__test__ = False  # a line of an evaluation, no test


def make_run(folder: Path, **changes) -> Path:
    """A finished run's folder, by hand. `changes` of a file's name are bytes, an object or None."""
    mistake = {"index": 7, "label": 0, "predicted": 1, "probability": 0.875, "png": png()}
    files = {
        "config": {"model": "small_cnn", "batch_size": 16, "accumulate": 2, "seed": 0},
        "environment": {"telling": "train", "processes": 3, "device": "cpu"},
        "summary": {"test_accuracy": 0.8125, "best_test_accuracy": 0.875, "train_seconds": 2.5},
        "predictions": {
            "classes": ["shoe", "bag", "hat"],
            "confusion": [[7, 3, 0], [1, 9, 0], [0, 2, 8]],
            "mistakes": [mistake],
        },
        "metrics": [training_line(10, 1.5), training_line(20, 0.75), test_line(20)],
        **changes,
    }
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content).encode()
        if isinstance(content, dict):
            content = json.dumps(content).encode()
        if content is not None:
            Path(folder, f"{name}.json{'l' * (name == 'metrics')}").write_bytes(content)
    return folder


def says(run: dict) -> str:
    return "\n".join(f"{one['file']} {one['says']}" for one in run["problems"])


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "real"
    choices = {"model": "tiny_cnn", "train_samples": 1000, "test_samples": 300, "epochs": 2}
    train_plain.main(TrainConfig(**choices, log_every=3, run_dir=str(folder)))
    return folder


def test_a_real_run_is_shown_whole(real_run, tmp_path, capsys):
    page, found = tmp_path / "page.html", tmp_path / "found.json"
    assert report.main([str(real_run), "--html", str(page), "--json", str(found)]) == 0
    (run,) = json.loads(found.read_text())["runs"]
    lines = [json.loads(line) for line in (real_run / "metrics.jsonl").read_text().splitlines()]
    assert run["problems"] == [] and run["metrics"]["drawn"] == len(lines)
    for name in CURVES:
        written = [[line["step"], line[name]] for line in lines if name in line]
        assert run["metrics"]["curves"][name] == [written] and written
    for key in ("config", "environment", "summary"):
        assert run[key] == json.loads((real_run / f"{key}.json").read_text())
    confusion = run["predictions"]["confusion"]
    assert sum(map(sum, confusion)) == 300
    right = sum(row[i] for i, row in enumerate(confusion))
    assert right / 300 == pytest.approx(run["summary"]["test_accuracy"])
    shown = capsys.readouterr().out
    assert f"{right} of 300 test images right" in shown and "0 skipped" in shown
    assert f"report: {page}" in shown
    images = page.read_text().count('<img src="data:image/png;base64,')
    assert images == len(run["predictions"]["mistakes"]) == min(24, 300 - right)


def test_a_run_that_was_stopped_is_shown_without_what_it_lacks(real_run, tmp_path):
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    for name in ("config.json", "environment.json", "metrics.jsonl"):
        shutil.copy(real_run / name, stopped)
    run = read_run(stopped, "stopped")
    assert [one["file"] for one in run["problems"]] == ["summary.json", "predictions.json"]
    assert "the run has not finished" in says(run)
    text = as_text([run])
    last = json.loads((stopped / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['test_accuracy']:.4f}" in text and "not finished" in text
    assert "(median of the lines)" in text


def test_it_needs_no_torch_and_is_the_same_each_time(real_run, tmp_path, start):
    code = "import sys; from accel_demo import cli; sys.argv = ['accel-demo', *sys.argv[1:]]\n"
    code += "try: cli.main()\nexcept SystemExit as end: print(end.code)\n"
    code += "print({'torch', 'numpy', 'accelerate', 'matplotlib'} & set(sys.modules))"
    pages = []
    for name in ("first.html", "second.html"):
        command = ["python", "-c", code, "report", real_run, "--html", tmp_path / name]
        done = start(command, real=True)
        assert done.stdout.endswith("0\nset()\n"), done.stdout + done.stderr
        assert "reading" in done.stderr
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


DAMAGED = [  # a line of metrics.jsonl, and why it is skipped
    (b"\0" * 20, "it holds NUL bytes"),
    (b"", "it is empty"),
    (b"  \t\r", "it is empty"),
    (b"{'step': 1}", "it is not JSON"),
    (b"step 10 loss 0.4", "it is not JSON"),
    (b"[" * 50_000, "it is not JSON"),
    (b'{"step": 1} {"step": 2}', "it is not JSON"),
    (b'{"step": ' + b"9" * 5000 + b', "train_loss": 1}', "it is not JSON"),
    (b"\xff\xfe{}", "it is not UTF-8"),
    (b"[1, 2]", "it is JSON, but no object"),
    (b"null", "it is JSON, but no object"),
    (b"NaN", "it is JSON, but no object"),
    (b'"' + b"x" * LONGEST_LINE + b'"', "it is longer than 64 KiB"),
    (b"x" * 5_000_000, "it is longer than 64 KiB"),
    (b'{"train_loss": 1}', "it has no step"),
    (b'{"step": 3}', "it has a step, but nothing to draw"),
    (b'{"step": 3, "loss": 1}', "it has a step, but nothing to draw"),
    (b'{"step": true, "train_loss": 1}', "it has the step true, not a whole number"),
    (b'{"step": "3", "train_loss": 1}', 'it has the step "3", not a whole number'),
    (b'{"step": 3.5, "train_loss": 1}', "it has the step 3.5, not a whole number"),
    (b'{"step": -3, "train_loss": 1}', "it has the step -3, not a whole number"),
    (b'{"step": 1e400, "train_loss": 1}', "it has the step Infinity, not a whole number"),
    (b'{"step": null, "train_loss": 1}', "it has the step null, not a whole number"),
    (b'{"step": [1], "train_loss": 1}', "it has the step a list, not a whole number"),
    (b'{"step": 99999999999999999999, "train_loss": 1}', "it has the step 99999"),
    (b'{"step": 3, "test_loss": NaN, "test_accuracy": 2}', "it has the test_loss NaN"),
]


@pytest.mark.parametrize(("line", "reason"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_named_and_the_rest_is_drawn(line, reason, tmp_path):
    good = [json.dumps(training_line(step)).encode() for step in (10, 20, 30)]
    content = b"\n".join([good[0], line, *good[1:], b""])
    run = read_run(make_run(tmp_path / "run", metrics=content), "run")
    (problem,) = run["problems"]
    assert (problem["file"], problem["first"], problem["last"]) == ("metrics.jsonl", 2, 2)
    assert problem["says"].startswith("skipped: it ") and reason in problem["says"]
    assert run["metrics"]["curves"]["train_loss"] == [[[10, 0.5], [20, 0.5], [30, 0.5]]]
    assert re.search(r"metrics.jsonl line 2 +skipped: it ", as_text([run]))
    write_report(tmp_path / "page.html", [run])
    assert "metrics.jsonl line 2</th><td>skipped: it " in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e999", "-0.5", '"0.5"', "true", "[]", "1e16"]
)
def test_a_value_that_cannot_be_drawn_is_named_and_the_rest_of_its_line_drawn(value, tmp_path):
    line = json.dumps(training_line(20)).replace("0.5", value, 1)
    lines = [json.dumps(training_line(10)), line, json.dumps(training_line(30)), ""]
    run = read_run(make_run(tmp_path / "run", metrics="\n".join(lines).encode()), "run")
    (problem,) = run["problems"]
    assert problem["first"] == 2 and problem["says"].startswith("has the train_loss ")
    assert problem["says"].endswith("the rest is drawn") and run["metrics"]["drawn"] == 3
    assert run["metrics"]["curves"]["train_loss"] == [[[10, 0.5], [30, 0.5]]]
    assert len(run["metrics"]["curves"]["learning_rate"][0]) == 3


def test_an_accuracy_above_one_and_a_missing_value_are_named(tmp_path):
    lines = [training_line(10, train_accuracy=1.5), training_line(20), test_line(20)]
    del lines[1]["images_per_second"], lines[2]["test_loss"]
    run = read_run(make_run(tmp_path / "run", metrics=lines), "run")
    expected = ["has the train_accuracy 1.5, not a number from 0 to 1", "has no images_per_second"]
    expected.append("has no test_loss")
    assert [one["says"].split(";")[0] for one in run["problems"]] == expected


@pytest.mark.parametrize("end", [1, 40, 100])
def test_a_half_written_last_line_is_cut_off(end, tmp_path):
    content = b"".join(json.dumps(training_line(step)).encode() + b"\n" for step in (10, 20))
    first = content.index(b"\n") + 1
    found = read_metrics(written(tmp_path, content[: first + end]))
    (skipped,) = found["skipped"]
    assert skipped["first"] == 2 and "is cut off: the file ends" in skipped["says"]
    assert found["curves"]["train_loss"] == [[[10, 0.5]]]
    assert read_metrics(written(tmp_path, content[:-1]))["drawn"] == 2  # only its end is missing


def written(folder: Path, content: bytes) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(content)
    return path


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    content = "".join(json.dumps(training_line(step)) + "\r\n" for step in (10, 20))
    found = read_metrics(written(tmp_path, b"\xef\xbb\xbf" + content.encode()))
    assert (found["lines"], found["drawn"], found["skipped"], found["remarks"]) == (2, 2, [], [])


def test_where_the_steps_go_back_a_new_piece_begins(tmp_path):
    steps = [10, 20, 30, 20, 30, 30]
    run = read_run(make_run(tmp_path / "run", metrics=[training_line(s) for s in steps]), "run")
    pieces = run["metrics"]["curves"]["train_loss"]
    assert [[step for step, _ in piece] for piece in pieces] == [[10, 20, 30], [20, 30], [30]]
    assert [one["first"] for one in run["problems"]] == [4, 6]
    assert "has step 20 after step 30: its curves begin a new piece" in says(run)


def test_equal_neighbours_are_told_as_one(tmp_path):
    found = read_metrics(written(tmp_path, b"x\nx\nx\n\nx\n"))
    assert [(one["first"], one["last"]) for one in found["skipped"]] == [(1, 3), (4, 4), (5, 5)]
    run = read_run(make_run(tmp_path / "run", metrics=b"x\n" * 7), "run")
    assert "metrics.jsonl lines 1 to 7  skipped: it is not JSON" in as_text([run])


def test_all_of_many_skipped_lines_are_on_the_page(tmp_path):
    run = read_run(make_run(tmp_path / "run", metrics=b"x\n\n" * 30), "run")
    write_report(tmp_path / "page.html", [run])
    page = tmp_path.joinpath("page.html").read_text()
    assert all(f"metrics.jsonl line {number}<" in page for number in range(1, 61))
    assert "and 40 more of these" in as_text([run])


def test_too_many_notes_become_one(tmp_path):
    found = read_metrics(written(tmp_path, b"x\n\n" * MOST_NOTES))
    assert (found["lines"], found["drawn"]) == (2 * MOST_NOTES, 0)
    assert len(found["skipped"]) == MOST_NOTES
    *named, last = found["skipped"]
    assert [one["first"] for one in named] == list(range(1, MOST_NOTES))
    assert (last["first"], last["last"]) == (MOST_NOTES, 2 * MOST_NOTES)
    assert last["says"].endswith("too many to name each")


def test_a_file_without_an_end_is_read_in_part_and_that_is_said(tmp_path, monkeypatch):
    good = json.dumps(training_line(10)).encode() + b"\n"
    path = written(tmp_path, good + b"x")
    with path.open("ab") as file:
        file.truncate(2**36)  # 64 GiB of NUL bytes that take no place
    found = read_metrics(path)
    (skipped,) = found["skipped"]
    assert (found["lines"], found["drawn"], skipped["first"]) == (2, 1, 2)
    assert skipped["says"].startswith("and the rest are not read: more than")
    monkeypatch.setattr(report_metrics, "MOST_LINES", 3)
    content = b"".join(json.dumps(training_line(step)).encode() + b"\n" for step in range(9))
    found = read_metrics(written(tmp_path, content))
    assert (found["lines"], found["drawn"]) == (4, 3)
    assert found["curves"]["train_loss"] == [[[step, 0.5] for step in range(3)]]


def test_steps_that_go_back_again_and_again_give_no_endless_page(tmp_path):
    lines = [{"step": 2 - number % 2, "train_loss": 1} for number in range(4 * MOST_PIECES)]
    run = read_run(make_run(tmp_path / "run", metrics=lines), "run")
    assert len(run["metrics"]["curves"]["train_loss"]) == MOST_PIECES
    assert f"step 1 after step 2, after {MOST_PIECES} pieces" in says(run)


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
names = st.sampled_from(["step", *CURVES])
numbers = st.integers(0, 50) | st.floats(0, 1) | any_json
good_lines = st.builds(training_line, st.integers(0, 10**15), st.floats(0, 1e15))
lines = st.one_of(
    st.binary(max_size=30).map(lambda some: some.replace(b"\n", b"")),
    st.dictionaries(names, numbers, max_size=7).map(lambda some: json.dumps(some).encode()),
    good_lines.map(lambda some: json.dumps(some).encode()),
)


@settings(deadline=None)
@given(parts=st.lists(lines, max_size=12), is_ended=st.booleans())
def test_every_line_is_drawn_or_named(parts, is_ended):
    with tempfile.TemporaryDirectory() as folder:
        content = b"\n".join(parts) + b"\n" * is_ended
        found = read_metrics(written(Path(folder), content))
    count = len(content.split(b"\n")) - (content.endswith(b"\n") or not content)
    named = [n for one in found["skipped"] for n in range(one["first"], one["last"] + 1)]
    assert found["lines"] == count and len(set(named)) == len(named) == count - found["drawn"]
    points = [point for piece in found["curves"]["train_loss"] for point in piece]
    for number, line in enumerate(content.split(b"\n")[:count], start=1):
        try:
            values = json.loads(line)
            is_whole = values.keys() == training_line(0).keys()
        except (ValueError, AttributeError):
            continue
        if is_whole:  # one of `good_lines`
            assert number not in named and [values["step"], values["train_loss"]] in points
    for pieces in found["curves"].values():
        for piece in pieces:
            assert all(math.isfinite(value) and value >= 0 for _, value in piece)
            assert all(a[0] < b[0] for a, b in zip(piece, piece[1:], strict=False))


@settings(deadline=None, max_examples=40)
@given(
    metrics=st.lists(lines, max_size=8).map(b"\n".join),
    config=st.dictionaries(st.text(max_size=8), any_json, max_size=4) | any_json,
    summary=st.dictionaries(st.sampled_from(["test_accuracy", "images_per_second"]), any_json),
    predictions=st.fixed_dictionaries(
        {
            "classes": any_json | st.just(["<a>", "b"]),
            "confusion": any_json | st.just([[1, 2], [0, 3]]),
            "mistakes": any_json | st.lists(any_json, max_size=2),
        }
    ),
    damage=st.sampled_from([None, b"", b"{", b"\xff"]),
)
def test_nothing_in_a_folder_breaks_the_report(metrics, config, summary, predictions, damage):
    config, summary = json.dumps(config).encode(), json.dumps(summary).encode()
    with tempfile.TemporaryDirectory() as folder:
        first = make_run(
            Path(folder, "first"),
            **{"config": config, "summary": summary, "predictions": predictions},
            metrics=metrics,
        )
        second = make_run(Path(folder, "second"), environment=damage)
        runs = [read_run(first, "first"), read_run(second, "second")]
        text = as_text(runs)
        assert all(line.isprintable() for line in text.split("\n"))
        write_report(Path(folder, "page.html"), runs)
        page = Page(Path(folder, "page.html").read_text(encoding="utf-8"))
    json.dumps(runs, allow_nan=False)
    assert page.tags["script"] == 2 and page.handlers == []


class Page(HTMLParser):
    """What a browser would see in a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.handlers, self.images, self.text = {}, [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        if tag == "img":
            self.images.append(dict(attributes))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A run with markup and escape sequences wherever text can be."""
    text = PLANTED + ESCAPES
    entries = {text: text, "model": text, "nested": {text: [text]}}
    mistake = {"index": 7, "label": 0, "predicted": 1, "probability": 0.875, "png": png()}
    predictions = {
        "classes": [text, PLANTED],
        "confusion": [[1, 4], [0, 3]],
        "mistakes": [mistake, {**mistake, "png": f'{png()}" onerror="alert(1)'}],
    }
    name = text.encode("utf-8", "replace").decode().replace("/", "")
    folder = make_run(
        tmp_path_factory.mktemp("planted") / name,
        **{"config": entries, "environment": entries, "predictions": predictions},
        summary=entries,
        metrics=[training_line(10, text), {"step": text}, test_line(20)],
    )
    return folder


def test_what_is_planted_stays_text_and_moves_no_cursor(planted, tmp_path, capsys):
    other = make_run(tmp_path / "other")
    page, found = tmp_path / "page.html", tmp_path / "found.json"
    arguments = [str(planted), str(other), "--html", str(page), "--json", str(found)]
    assert report.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[31m" in shown and "\\u202e" in shown
    assert "\\x1b[31m" in page.read_text() and "\\ud800" in page.read_text()
    assert all(line.isprintable() for line in shown.split("\n"))
    seen = Page(page.read_text(encoding="utf-8"))
    assert seen.tags["script"] == 2 and seen.handlers == []  # the data, and page.js
    assert [image["src"][:22] for image in seen.images] == ["data:image/png;base64,"] * 2
    assert sum(PLANTED in text for text in seen.text) >= 5
    assert not set("\x1b\x07\u202e\u2028") & set(page.read_text(encoding="utf-8"))
    assert "has an image that is not base64" in shown
    (run, _) = json.loads(found.read_text())["runs"]
    assert run["config"]["model"] == printable(PLANTED + ESCAPES)


def test_accents_stay_on_their_letter_and_do_not_pile_up():
    vietnamese, piled = "e\u0323\u0302", "e" + 5 * "\u0301"
    assert printable(vietnamese) == vietnamese
    assert printable(piled) == "e\u0301\u0301" + r"\u0301" * 3
    assert len(printable("\u202e" * 300)) == 200


def test_what_differs_between_runs_is_marked_and_the_rest_told_once(tmp_path):
    first = make_run(tmp_path / "first")
    config = {"model": "resnet18", "batch_size": 16, "accumulate": 2, "dropout": 0.5}
    second = make_run(tmp_path / "second", config=config)
    third = make_run(tmp_path / "third", config=b"{")
    runs = [read_run(folder, folder.name) for folder in (first, second, third)]
    text = as_text(runs)
    for row in (
        ("≠ model", "small_cnn", "resnet18", "unknown"),
        ("≠ dropout", "not set", "0.5", "unknown"),
        ("≠ seed", "0", "not set", "unknown"),
    ):
        assert re.search(r"\| " + r" +\| ".join(row), text), row
    assert "≠ batch_size" not in text and len(re.findall(r"^  batch_size +16$", text, re.M)) == 1
    write_report(tmp_path / "page.html", runs)
    page = (tmp_path / "page.html").read_text()
    assert page.count('<tr class="differs">') == 3
    assert page.count("batch_<wbr>size") == 1 and page.count("small_<wbr>cnn") == 1


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("missing", "is missing"),
        ("folder", "is a folder, not a file"),
        ("pipe", "is no ordinary file"),
        ("loop", "is missing|cannot be read"),
        ("forbidden", r"cannot be read \(Permission denied\)"),
        (b"", "is empty"),
        (b'{"half": ', "is not JSON|is cut off"),
        (b"[1]", "is JSON, but no object"),
        (b"\xff\xfe{\0}\0", "holds NUL bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_the_rest_shown(file, damage, reason):
    with readable_by_nobody() as folder:
        path = make_run(folder / "run") / file
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        elif damage == "forbidden":
            path.chmod(0)
        else:
            path.unlink()
        if damage == "folder":
            path.mkdir()
        if damage == "pipe":
            os.mkfifo(path)
        if damage == "loop":
            path.symlink_to(path)
        with as_nobody():
            run = read_run(folder / "run", "run")
        (problem,) = run["problems"]
        assert problem["file"] == file and re.search(reason, problem["says"])
        write_report(folder / "page.html", [run])
        page = (folder / "page.html").read_text()
        assert ("small_<wbr>cnn" in page) == (file != "config.json")
        assert ("<svg" in page) == (file != "metrics.jsonl")
        assert ("<img" in page) == (file != "predictions.json")
        assert re.search(rf"{file} .*{reason}", as_text([run]))


@contextmanager
def readable_by_nobody():
    """A folder that other users may enter: pytest's own is for one alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def as_nobody():
    """Without the right of root to read everything, where the tests have it."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "config.json").open("ab") as file:
        file.truncate(20 * 1024**2)
    assert "config.json is larger than 16 MiB" in says(read_run(folder, "run"))


def test_figures_of_a_summary_that_are_none_are_left_out(tmp_path):
    summary = {"test_accuracy": "high", "best_test_accuracy": 7, "train_seconds": 3.5}
    run = read_run(make_run(tmp_path / "run", summary=summary), "run")
    assert 'has the test_accuracy "high", which is left out' in says(run)
    assert "has the best_test_accuracy 7, which is left out" in says(run)
    assert re.search(r"seconds of training +\| 3\.5", as_text([run]))
    assert re.search(r"\| test accuracy +\| 0\.8125", as_text([run])), "that of the evaluation"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"classes": None}, "has no list of 1 to 1000 classes"),
        ({"classes": [1, 2]}, "has a class whose name is no text"),
        ({"confusion": [[1]]}, "does not hold counts for each class"),
        ({"confusion": [[1, 2, 3], [1, 2, 3]]}, "has 2 rows of confusion for 3 classes"),
        ({"confusion": [[1, 2, -3]] * 3}, "does not hold counts for each class"),
        ({"confusion": [[1, 2, True]] * 3}, "does not hold counts for each class"),
        ({"mistakes": 5}, "has no list of mistakes"),
        ({"mistakes": [[]]}, "has a mistake, number 1, that is no object"),
        ({"mistakes": [{"index": 1, "label": 3}]}, "has a mistake, number 1, that has the label 3"),
    ],
)
def test_predictions_that_cannot_be_are_named(changes, reason, tmp_path):
    good = {"classes": ["a", "b", "c"], "confusion": [[1, 0, 0]] * 3, "mistakes": []}
    run = read_run(make_run(tmp_path / "run", predictions={**good, **changes}), "run")
    assert reason in says(run)
    write_report(tmp_path / "page.html", [run])


def test_only_a_small_whole_png_is_shown():
    check_png(png())
    whole = base64.b64decode(png())
    for text, reason in {
        None: "has no image",
        "": "has no image",
        png() + "\n": "not base64",
        png()[:-1]: "not base64",
        'x" onerror="alert(1)': "not base64",
        base64.b64encode(b"GIF89a" + whole).decode(): "no whole PNG",
        base64.b64encode(whole[:-3]).decode(): "no whole PNG",
        base64.b64encode(whole[:45] + b"!" + whole[46:]).decode(): "no whole PNG",
        base64.b64encode(whole[:40] + whole[41:]).decode(): "no whole PNG",
        base64.b64encode(b"\x89PNG\r\n\x1a\n").decode(): "no whole PNG",
        base64.b64encode(b"<svg onload=alert(1)>").decode(): "no whole PNG",
        "A" * 100_000: "more than 64 KiB",
        png(1025, 1): "an image of 1025×1 pixels",
    }.items():
        with pytest.raises(Unreadable, match=reason):
            check_png(text)


def test_the_confusion_matrix_has_its_true_classes_in_rows(tmp_path):
    run = read_run(make_run(tmp_path / "run"), "run")
    text = as_text([run])
    assert "24 of 30 test images right" in text
    assert re.search(r"0 shoe +\| +7 \| +3 \| +0 \|", text)
    worst = text.index("  3 of 10 shoe were taken for bag")
    assert worst < text.index("  2 of 10 hat were taken for bag")
    assert "test image 7 is shoe, and was taken for bag with probability 87.5%" in text
    write_report(tmp_path / "page.html", [run])
    page = (tmp_path / "page.html").read_text()
    row = page[page.index('<th scope="row">shoe</th>') :].split("</tr>")[0]
    assert re.findall(r">(\d+)</td>", row) == ["7", "3", "0"]
    assert 'alt="test image 7: shoe, taken for bag"' in page


def test_images_seen_are_steps_times_the_images_of_all_processes(tmp_path):
    run = read_run(make_run(tmp_path / "run"), "run")  # 16 images, 2 micro-batches, 3 processes
    text = as_text([run])
    assert re.search(r"images per step +\| 96 ", text)
    assert re.search(r"images seen +\| 1,920 ", text)  # after 20 steps


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{}/nowhere"], "nowhere does not exist: name the folder of a run"),
        (["{}/run/config.json"], "config.json is no folder"),
        (["{}"], "holds no run: none of config.json"),
        (["{}/run", "{}/run/../run"], "is named twice"),
        (["{}/run", "--html", "{}/none/page.html"], "cannot write --html"),
        (["{}/run", "--html", "{}"], "cannot write --html"),
        (["{}/run", "--html", "/dev/null"], "cannot write --html"),
        (["{}/run", "--json", "{}/none/found.json"], "cannot write --json"),
        (["{}/run", "--json", "{}/run/config.json"], "--json would replace .*config.json"),
        (["{}/run", "--html", "{}/x", "--json", "{}/x"], "--html would replace"),
        (["{}/run", "--quick", "--html", "{}/x"], "--quick writes no page"),
        (["{}/run", "--plot", "x.png"], "unrecognized arguments: --plot"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_a_wrong_question_gets_one_sentence_and_writes_nothing(arguments, reason, tmp_path):
    folder = make_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    config = (folder / "config.json").read_bytes()
    with pytest.raises(UserError, match=reason) as error:
        report.main([argument.format(tmp_path) for argument in arguments])
    assert "\n" not in str(error.value)
    assert before.keys() == set(tmp_path.rglob("*"))
    assert (folder / "config.json").read_bytes() == config


def test_a_folder_without_a_run_ends_with_one_line(tmp_path, start):
    empty = tmp_path / "empty\x1b[31m"
    empty.mkdir()
    done = start(["accel-demo", "report", empty])
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "empty\\x1b[31m holds no run" in done.stderr


def test_the_page_comes_into_the_first_run_and_quick_writes_none(tmp_path, capsys):
    runs = [make_run(tmp_path / "a" / "same"), make_run(tmp_path / "b" / "same")]
    assert report.main(["--quick", *map(str, runs)]) == 0
    assert not list(tmp_path.rglob("*.html"))
    shown = capsys.readouterr().out
    assert "a/same " in shown and "b/same " in shown, "one name would not tell them apart"
    assert report.main(list(map(str, runs))) == 0
    assert list(tmp_path.rglob("*.html")) == [runs[0] / "report.html"]
    assert f"report: {runs[0] / 'report.html'}" in capsys.readouterr().out
    assert sorted(os.listdir(runs[0])) == sorted([*FILES, "report.html"])


def test_a_link_to_itself_is_no_file_of_a_run(tmp_path, capsys):
    folder = make_run(tmp_path / "run", config=None)
    (folder / "config.json").symlink_to(folder / "config.json")
    assert report.main([str(folder)]) == 0
    assert "its choices are unknown" in capsys.readouterr().out


def test_a_link_in_a_run_folder_does_not_lead_the_page_to_another_file(tmp_path):
    folder, mine = make_run(tmp_path / "run"), tmp_path / "mine"
    mine.write_text("mine")
    (folder / "report.html").symlink_to(mine)
    assert report.main([str(folder)]) == 0
    assert mine.read_text() == "mine" and not (folder / "report.html").is_symlink()
    assert "<svg" in (folder / "report.html").read_text()


def test_a_pipe_is_no_file_to_write(tmp_path):
    folder = make_run(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a reader
    for flag in ("--json", "--html"):
        with pytest.raises(UserError, match=f"cannot write {flag}"):
            report.main([str(folder), flag, str(tmp_path / "pipe")])


def test_a_reader_who_goes_away_ends_it_quietly(tmp_path, start):
    code = "import os, sys; from accel_demo.lab.report import command; read, write = os.pipe()\n"
    code += "os.close(read); os.dup2(write, 1); sys.exit(command.main(sys.argv[1:]))"
    done = start(["python", "-c", code, make_run(tmp_path / "run")])
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert (tmp_path / "run" / "report.html").exists()


def test_a_long_value_does_not_widen_every_row_on_the_terminal(tmp_path, capsys):
    first = make_run(tmp_path / "first", config={"model": "x" * 500, "y" * 500: 1})
    assert report.main([str(first), str(make_run(tmp_path / ("z" * 100))), "--quick"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows and max(map(len, rows)) < 200


def test_a_terminal_without_blocks_gets_question_marks(tmp_path, start):
    command = ["accel-demo", "report", make_run(tmp_path / "run"), "--quick"]
    done = start(command, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| Train loss +\| run \|.*\?\?\?", done.stdout)


@settings(deadline=None)
@given(st.floats(0, 1e15), st.floats(0, 1e15))
def test_the_marks_of_an_axis_enclose_it(one, other):
    low, high = sorted((one, other))
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 8 and marks == sorted(set(marks))
    assert marks[0] <= low + 1e-9 * high and marks[-1] >= high * (1 - 1e-9)
    if low > 1e-9 and high > 30 * low:
        marks = log_ticks(low, high)
        assert 2 <= len(marks) <= 8 and marks[0] <= low and marks[-1] >= high


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**15), st.floats(0, 1e15)), min_size=1, max_size=5))
def test_every_curve_stays_in_its_picture(points):
    pieces = [[[list(point)] for point in points]]
    last = max(step for step, _ in points)
    for name in ("train_loss", "learning_rate"):
        picture = chart(name, "Title", pieces, [1], "optimizer step", last)
        places = re.findall(r'class="mark" transform="translate\((\S+) (\S+)\)"', picture)
        assert places
        assert all(50 <= float(x) <= 368 and 9.9 <= float(y) <= 184.1 for x, y in places)
    line = sparkline(pieces[0], [list(point) for point in points], last)
    assert len(line) == WIDTH and line.strip()


def test_a_long_curve_keeps_its_outline():
    piece = [[step, float(step * 7919 % 10007)] for step in range(100_000)]
    (kept,) = thinned([piece])
    assert len(kept) <= MOST_POINTS and [kept[0], kept[-1]] == [piece[0], piece[-1]]
    assert all(a[0] < b[0] for a, b in zip(kept, kept[1:], strict=False))
    assert {tuple(point) for point in kept} < {tuple(point) for point in piece}
    for edge in (min, max):
        assert edge(value for _, value in kept) == edge(value for _, value in piece)


def hover(page, svg, step: int) -> str:
    """Point at a step of a chart; what is shown then."""
    svg.scroll_into_view_if_needed()
    frame = svg.bounding_box()
    right = float(svg.get_attribute("data-right"))
    share = (50 + step / right * (380 - 50 - 12)) / 380
    page.mouse.move(frame["x"] + share * frame["width"], frame["y"] + frame["height"] / 2)
    return page.locator(".tip:visible").inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_pointing_at_a_curve_shows_the_number_of_the_json(width, real_run, tmp_path, open_page):
    file, found = tmp_path / "page.html", tmp_path / "found.json"
    report.main([str(real_run), "--html", str(file), "--json", str(found)])
    (run,) = json.loads(found.read_text())["runs"]
    page = open_page(file, width=width)
    for name in CURVES:
        svg = page.locator(f"svg.chart:visible[data-curve={name}]")
        for step, value in run["metrics"]["curves"][name][0]:
            first, second = hover(page, svg, step).splitlines()
            assert first == f"optimizer step {step}"
            assert float(second.replace(",", "")) == pytest.approx(value, rel=1e-5, abs=1e-12)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.mouse.move(0, 0)
    assert page.locator(".tip:visible").count() == 0


@pytest.mark.browser
def test_several_runs_stand_side_by_side_and_below_one_another_on_a_phone(
    real_run, planted, tmp_path, open_page
):
    other, file = make_run(tmp_path / "other"), tmp_path / "page.html"
    report.main([str(real_run), str(other), str(planted), "--html", str(file)])
    for width, columns in ((1280, 3), (390, 1)):
        page = open_page(file, width=width)
        assert page.title() == f"Report of real, other, {printable(planted.name, 80)}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lefts = page.eval_on_selector_all(
            ".beside:has(.mistakes) > section", "all => all.map(x => x.getBoundingClientRect().x)"
        )
        assert len(lefts) == 3 and len(set(lefts)) == columns
        images = page.eval_on_selector_all("img", "all => all.map(one => one.naturalWidth)")
        assert len(images) > 5 and min(images) > 0
        assert page.locator("th", has_text="<script>document.title=1").count() >= 1


@pytest.mark.browser
def test_the_axis_can_be_chosen_and_the_keys_walk_along_a_curve(tmp_path, open_page):
    runs = [make_run(tmp_path / "small")]
    config = {"model": "small_cnn", "batch_size": 32, "accumulate": 2}
    runs.append(make_run(tmp_path / "large", config=config))
    report.main([*map(str, runs), "--html", str(tmp_path / "page.html")])
    page = open_page(tmp_path / "page.html")
    svg = page.locator("svg.chart:visible[data-curve=train_loss]")
    assert svg.get_attribute("data-axis") == "images seen", "their steps are not equally large"
    svg.focus()  # at the end of the longer curve: 20 steps of 192 images
    shown = page.locator(".tip:visible").inner_text().splitlines()
    assert shown == ["images seen 3,840", "large: 0.75 (step 20)"]
    page.keyboard.press("ArrowLeft")
    shown = page.locator(".tip:visible").inner_text().splitlines()
    assert shown == ["images seen 1,920", "small: 0.75 (step 20)", "large: 1.5 (step 10)"]
    page.keyboard.press("Escape")
    page.check("#steps")
    svg = page.locator("svg.chart:visible[data-curve=train_loss]")
    assert hover(page, svg, 10).splitlines() == ["optimizer step 10", "small: 1.5", "large: 1.5"]
