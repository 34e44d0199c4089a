"""Test that the report shows a run folder's contents and names missing or damaged files."""

import base64
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab.output import _finite
from accel_demo.lab.report import command as report
from accel_demo.lab.report.curves import MOST_POINTS, chart, log_ticks, thinned, ticks
from accel_demo.lab.report.page import write_report
from accel_demo.lab.report.runs import CURVES, FILES, read_run
from accel_demo.lab.report.tables import SPARKLINE_WIDTH, as_text, sparkline
from tests.lab.contrast import LOWEST_OF_LINES, check_both_themes, visible_lines, visible_texts

PLANTED = "<script>document.title=1</script>&\"'"


def png() -> str:
    """Return a gray 2×2 PNG, encoded in base64."""
    file = io.BytesIO()
    Image.new("L", (2, 2), 128).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


IMAGE_FILES = sorted(FILES.keys() - {"characters.json"})
MISTAKE = {"index": 7, "label": 0, "predicted": 1, "probability": 0.875, "png": png()}


def training_line(step: int, loss=0.5, **changes) -> dict:
    values = {"step": step, "epoch": 1, "learning_rate": 0.01, "train_loss": loss}
    return {**values, "train_accuracy": 0.75, "images_per_second": 1000.5, **changes}


def test_line(step: int) -> dict:
    return {"step": step, "epoch": 1, "test_loss": 0.625, "test_accuracy": 0.8125}


test_line.__test__ = False  # a helper, which pytest must not run as a test


def make_run(folder: Path, **changes) -> Path:
    """Write the folder of a finished run.

    `changes` maps the names of files to new contents. None omits the file.
    """
    files = {
        "config": {"model": "small_cnn", "batch_size": 16, "accumulate": 2, "seed": 0},
        "environment": {"script": "train", "processes": 3, "device": "cpu"},
        "summary": {"test_accuracy": 0.8125, "best_test_accuracy": 0.875, "train_seconds": 2.5}
        | {"images_per_second": 1200.5, "processes": 3, "device": "cpu"},
        "predictions": {
            "classes": ["shoe", "bag", "hat"],
            "confusion": [[7, 3, 0], [1, 9, 0], [0, 2, 8]],
            "mistakes": [MISTAKE],
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


def problems_of(run) -> str:
    return "\n".join(f"{problem.file} {problem.message}" for problem in run.problems)


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "real"
    choices = {"model": "tiny_cnn", "train_samples": 1000, "test_samples": 300, "epochs": 2}
    train_plain.main(TrainConfig(**choices, log_every=3, run_dir=str(folder)))
    return folder


def test_a_real_run_is_shown_completely(real_run, tmp_path, capsys):
    page, file = tmp_path / "page.html", tmp_path / "report.json"
    assert report.main([str(real_run), "--html", str(page), "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["command"] == "report"
    (run,) = content["runs"]
    lines = [json.loads(line) for line in (real_run / "metrics.jsonl").read_text().splitlines()]
    assert run["problems"] == [] and run["metrics"]["lines_drawn"] == len(lines)
    for name in CURVES.keys() - {"characters_per_second"}:
        written = [[line["step"], line[name]] for line in lines if name in line]
        assert run["metrics"]["curves"][name] == written and written
    for name in ("peak_gpu_memory_bytes", "characters_per_second"):
        assert run["summary"].pop(name) is None
    for key in ("config", "environment", "summary"):
        assert run[key] == json.loads((real_run / f"{key}.json").read_text())
    confusion = run["predictions"]["confusion"]
    assert sum(map(sum, confusion)) == 300
    right = sum(row[i] for i, row in enumerate(confusion))
    assert right / 300 == pytest.approx(run["summary"]["test_accuracy"])
    printed = capsys.readouterr().out
    assert f"{right} of 300 test images correct" in printed and "0 skipped" in printed
    assert f"report: {page}" in printed
    images = page.read_text().count('<img src="data:image/png;base64,')
    assert images == len(run["predictions"]["mistakes"]) == min(24, 300 - right)


def test_a_run_on_text_is_shown_with_its_characters_and_without_images(real_run, tmp_path, capsys):
    choices = {"model": "tiny_gpt", "dataset": "text", "train_samples": 64, "test_samples": 16}
    run, page = tmp_path / "text", tmp_path / "page.html"
    train_plain.main(TrainConfig(**choices, epochs=1, batch_size=16, run_dir=str(run)))
    assert report.main([str(run), "--html", str(page)]) == 0
    assert read_run(run, "text").problems == []
    printed, html = capsys.readouterr().out, page.read_text()
    *_, last = [line for line in printed.splitlines() if line.startswith("done: ")]
    speed = re.search(r"([\d,]+) characters/s", last)[1]
    for row in ((r"characters/s in training", speed), ("sequences seen", "64")):
        assert re.search(rf"\| {row[0]} +\| {row[1]} ", printed)
    characters = json.loads((run / "characters.json").read_text())["characters"]
    losses = [each["times"] * each["loss"] for each in characters]
    assert losses == sorted(losses, reverse=True)
    first = rf"{losses[0] / sum(losses):.1%}"
    assert re.search(rf"\| ' ' +\| {characters[0]['times']} .* {first} ", printed)
    assert [line for line in printed.splitlines() if "image" in line] == []
    assert "<h2>Confusion" not in html and "<h2>Most confident" not in html and "<img" not in html
    assert "Characters with the largest part of the loss" in html and first in html
    assert report.main([str(real_run), str(run), "--html", str(page)]) == 0  # side by side
    assert "<img" in page.read_text() and first in page.read_text()
    assert "images seen" in (both := capsys.readouterr().out) and "sequences seen" in both


def test_a_stopped_run_is_shown_without_the_missing_files(real_run, tmp_path):
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    for name in ("config.json", "environment.json", "metrics.jsonl"):
        shutil.copy(real_run / name, stopped)
    run = read_run(stopped, "stopped")
    assert [problem.file for problem in run.problems] == ["summary.json", "predictions.json"]
    assert "the run has not finished" in problems_of(run)
    text = as_text([run])
    last = json.loads((stopped / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['test_accuracy']:.4f}" in text and "not finished" in text
    assert "(median of all log lines)" in text


def test_the_report_needs_no_torch_and_is_reproducible(real_run, tmp_path, start):
    code = "import sys; from accel_demo import cli; sys.argv = ['accel-demo', *sys.argv[1:]]\n"
    code += "try: cli.main()\nexcept SystemExit as end: print(end.code)\n"
    code += "print({'torch', 'numpy', 'accelerate', 'matplotlib'} & set(sys.modules))"
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    done = start(["python", "-c", code, "report", real_run, "--html", first], real=True)
    assert done.stdout.endswith("0\nset()\n"), done.stdout + done.stderr
    assert report.main([str(real_run), "--html", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()


def lines_of(*steps: int, between: bytes = b"") -> bytes:
    """Return lines with these steps. `between` is inserted after the first line."""
    first, *others = [json.dumps(training_line(step)).encode() + b"\n" for step in steps]
    return b"".join([first, between, *others])


DAMAGED_LINES = [
    *(b"\0" * 20, b"", b"  \t\r", b"\xff\xfe{}", b"[1, 2]", b"null", b"[" * 10**5),
    *(b'{"step": 20, "train_l', b'0.5}{"step": 20, "train_loss": 0.5}'),
]
WRONG_STEPS = [
    *(b"null", b"true", b'"20"', b"[20]", b"{}", b"-1", b"20.5", b"1e308", b"9007199254740993"),
    *(b"NaN", b"Infinity", b"9" * 400),
]
WRONG_LOSSES = [b"null", b"true", b'"0.5"', b"[0.5]", b"{}", b"9" * 400]
DIVERGED = [b'{"step": 20, "train_loss": %s}' % value for value in (b"NaN", b"-Infinity", b"1e999")]
NOT_FINITE = "train_loss is NaN or infinite and not drawn: line 2"
NOT_A_NUMBER = "train_loss is not a number and not drawn: line 2"
LINES = [  # (problem, second line)
    *(("damaged and skipped: line 2", line) for line in DAMAGED_LINES),
    *((NOT_FINITE, line) for line in DIVERGED),
    *((NOT_A_NUMBER, b'{"step": 20, "train_loss": %s}' % loss) for loss in WRONG_LOSSES),
    *(
        (
            "skipped, because step is not an integer from 0 to 2^53: line 2",
            b'{"step": %s, "train_loss": 1}' % step,
        )
        for step in WRONG_STEPS
    ),
    ("skipped, because step is missing: line 2", b'{"train_loss": 1}'),
    ("skipped, because no metric name is known: line 2", b'{"step": 20, "loss": 1}'),
]
METRICS = [  # (metrics.jsonl, problem, steps of the curve that is drawn)
    *((lines_of(10, 30, between=line + b"\n"), message, [10, 30]) for message, line in LINES),
    *((lines_of(10) + lines_of(20)[:end], "cut off and skipped: line 2", [10]) for end in (1, 99)),
    (
        b"x\nx\n" + lines_of(10, between=b"\nx\n"),
        "damaged and skipped: 4 lines, from line 1 to line 5",
        [10],
    ),
    (
        lines_of(10, 20, 30, 20, 30),
        "the steps go back from 30 to 20 at line 4",
        [10, 20, 30, 20, 30],
    ),
]


@pytest.mark.parametrize(("content", "message", "steps"), METRICS)
def test_a_problem_in_a_line_is_reported_and_the_rest_is_drawn(content, message, steps, tmp_path):
    run = read_run(make_run(tmp_path / "run", metrics=content), "run")
    assert problems_of(run) == f"metrics.jsonl {message}"
    assert run.metrics.curves["train_loss"] == [(step, 0.5) for step in steps]
    lines, skipped = len(content.splitlines()), len(content.splitlines()) - len(steps)
    skipped -= message in (NOT_FINITE, NOT_A_NUMBER)  # only the value is not drawn
    counts = f"{lines - skipped} of {lines} lines of metrics.jsonl drawn, {skipped} skipped"
    assert counts in as_text([run])
    assert re.search(f"metrics.jsonl +{re.escape(message)}", as_text([run]))
    write_report(tmp_path / "page.html", [run])
    assert f"<td>{message}</td>" in (tmp_path / "page.html").read_text()


def test_the_rest_of_a_line_with_a_loss_that_diverged_is_drawn(tmp_path):
    lines = [training_line(10), training_line(20, math.nan), training_line(30)]
    run = read_run(make_run(tmp_path / "run", metrics=lines), "run")
    assert [step for step, _ in run.metrics.curves["train_loss"]] == [10, 30]
    assert [step for step, _ in run.metrics.curves["learning_rate"]] == [10, 20, 30]


def test_a_last_line_without_a_newline_is_drawn(tmp_path):
    run = read_run(make_run(tmp_path / "run", metrics=lines_of(10, 20)[:-1]), "run")
    assert run.metrics.lines_drawn == 2 and run.problems == []


def test_a_curve_starts_again_if_the_steps_go_back():
    points = [(step, 0.5) for step in (10, 20, 30, 20, 30)]
    picture = chart("train_loss", "Loss", [points], "optimizer step", 30)
    (path,) = re.findall(r'class="line" d="(\S.*?)"', picture)
    assert [piece.count("L") for piece in path.split("M")[1:]] == [2, 1]


good_lines = st.builds(training_line, st.integers(0, 10**15), st.floats(0, 1e15))
good_lines = good_lines.map(lambda values: json.dumps(values).encode())
lines = st.one_of(
    good_lines,
    st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")),
    st.tuples(good_lines, st.integers(0, 100)).map(lambda pair: pair[0][: pair[1]]),
    st.integers(0, 50).map(bytes),  # a line of NUL bytes
)


@settings(deadline=None)
@given(parts=st.lists(lines, max_size=12), is_ended=st.booleans())
def test_every_line_is_drawn_or_reported(parts, is_ended):
    content = b"\n".join(parts) + b"\n" * is_ended
    with tempfile.TemporaryDirectory() as folder:
        run = read_run(make_run(Path(folder, "run"), metrics=content), "run")
    count = len(content.split(b"\n")) - (content.endswith(b"\n") or not content)
    whole = []
    for line in content.split(b"\n")[:count]:
        try:
            whole.append(json.loads(line)["step"])
        except (ValueError, LookupError, TypeError):
            continue
    assert (run.metrics.lines, run.metrics.lines_drawn) == (count, len(whole))
    assert ("skipped" in problems_of(run)) == (len(whole) < count)
    for name in CURVES.keys() & training_line(0).keys():
        assert [step for step, _ in run.metrics.curves[name]] == whole


@settings(deadline=None, max_examples=40)
@given(file=st.sampled_from(IMAGE_FILES), share=st.floats(0, 1), nul_bytes=st.booleans())
def test_a_file_that_is_cut_off_or_overwritten_does_not_break_the_report(file, share, nul_bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = make_run(Path(folder, "run")) / file
        content = path.read_bytes()
        kept = content[: int(share * (len(content) - 1))]
        path.write_bytes(kept + bytes(len(content) - len(kept)) if nul_bytes else kept)
        runs = [read_run(path.parent, "run"), read_run(make_run(Path(folder, "other")), "other")]
        if file != "metrics.jsonl":
            assert re.search(f"{file} +is (empty|damaged)", as_text(runs))
        write_report(Path(folder, "page.html"), runs)
        page = Page(Path(folder, "page.html").read_text(encoding="utf-8"))
    assert page.tags["script"] == 2 and page.tags["img"] >= 1


class Page(HTMLParser):
    """The tags, handlers, images and texts that a browser finds in a page."""

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
    """A run folder in which every text contains HTML markup."""
    predictions = {
        "classes": [PLANTED, PLANTED],
        "confusion": [[1, 4], [0, 3]],
        "mistakes": [MISTAKE],
    }
    entries = {PLANTED: PLANTED, "model": PLANTED, "nested": {PLANTED: [PLANTED]}}
    return make_run(
        tmp_path_factory.mktemp("planted") / PLANTED.replace("/", ""),
        **{"config": entries, "environment": entries, "predictions": predictions},
        summary=entries,
        metrics=[training_line(10, PLANTED), {"step": PLANTED}, test_line(20)],
    )


def test_markup_in_a_run_is_shown_as_text(planted, tmp_path):
    predictions = json.loads((planted / "predictions.json").read_text())
    predictions["mistakes"][0]["png"] = f'{png()}" onerror="alert(1)'
    other = make_run(tmp_path / "other", predictions=predictions)
    page, file = tmp_path / "page.html", tmp_path / "report.json"
    arguments = [str(planted), str(other), "--html", str(page), "--json", str(file)]
    assert report.main(arguments) == 0
    seen = Page(page.read_text(encoding="utf-8"))
    assert seen.tags["script"] == 2 and seen.handlers == []  # the scripts are the data and page.js
    assert [image["src"][:22] for image in seen.images] == ["data:image/png;base64,"] * 2
    assert sum(PLANTED in text for text in seen.text) >= 5
    (run, _) = json.loads(file.read_text())["runs"]
    assert run["config"]["model"] == PLANTED


def test_differences_between_runs_are_marked_and_the_rest_is_shown_once(tmp_path):
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
    assert [table.count("<tr>") - 1 for table in re.findall(r'"runs differs">.*', page)] == [3]
    assert page.count("batch_<wbr>size") == 1 and page.count("small_<wbr>cnn") == 1


@pytest.mark.parametrize("file", IMAGE_FILES)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("missing", "is missing"),
        ("forbidden", r"cannot be read \(Permission denied\)"),
        (b"", "is empty"),
        (b'{"half": ', "is damaged|cut off and skipped: line 1"),
        (b"[1]", "is not a JSON object|cut off and skipped: line 1"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "is nested too deeply|cut off and skipped: line 1"),
        (b"\xff\xfe{\0}\0", "is damaged|cut off and skipped: line 1"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_and_the_rest_is_shown(file, damage, reason):
    with readable_by_nobody() as folder:
        path = make_run(folder / "run") / file
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        elif damage == "forbidden":
            path.chmod(0)
        else:
            path.unlink()
        with as_nobody():
            run = read_run(folder / "run", "run")
        (problem,) = run.problems
        assert problem.file == file and re.search(reason, problem.message)
        write_report(folder / "page.html", [run])
        page = (folder / "page.html").read_text()
        assert ("small_<wbr>cnn" in page) == (file != "config.json")
        assert ("<svg" in page) == (file != "metrics.jsonl")
        assert ("<img" in page) == (file != "predictions.json")
        assert re.search(rf"{file} .*{reason}", as_text([run]))


@contextmanager
def readable_by_nobody():
    """Create a temporary folder that the user nobody may enter, unlike pytest's `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def as_nobody():
    """Become the user nobody if the tests run as root, because root may read every file."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"classes": ["a", "b"]}, "the confusion matrix does not match the number of classes"),
        ({"confusion": [[7, 3], [1, 9], [0, 2]]}, "the confusion matrix does not match"),
        ({"mistakes": [MISTAKE | {"label": 3}]}, "a mistake refers to an unknown class"),
        ({"mistakes": [{"index": 7, "label": 1, "predicted": 1}]}, "probability is missing"),
    ],
)
def test_predictions_with_impossible_values_are_reported(change, reason, tmp_path):
    content = json.loads((make_run(tmp_path / "right") / "predictions.json").read_text())
    run = read_run(make_run(tmp_path / "wrong", predictions=content | change), "run")
    assert problems_of(run).startswith(f"predictions.json {reason}")
    write_report(tmp_path / "page.html", [run])
    assert as_text([run])


VALUES = [None, True, "", "two", "\ud800", [], [2], {}, {"two": 2}, 0, -1, 2.5, 2**53 + 1, 10**400]
VALUES += [1e308, -1e308, math.nan, math.inf, [[[["deep"] * 2]]]]
INTEGER, NUMBER, TEXT, LIST = "an integer from 0 to 2^53", "a number", "a string", "a list"
FIELDS = {  # (file, name): the type that the report needs; other names are only printed
    **{("config", name): INTEGER for name in ("batch_size", "accumulate")},
    **{("environment", "processes"): INTEGER, ("summary", "processes"): INTEGER},
    **{("summary", name): NUMBER for name in ("test_accuracy", "best_test_accuracy")},
    **{("summary", name): NUMBER for name in ("images_per_second", "train_seconds")},
    **{("predictions", name): LIST for name in ("classes", "confusion", "mistakes")},
    **{("mistake", name): INTEGER for name in ("index", "label", "predicted")},
    **{("mistake", "probability"): NUMBER, ("mistake", "png"): TEXT, ("summary", "device"): TEXT},
    **{("config", "model"): "", ("environment", "device"): "", ("environment", "script"): ""},
}


def has_type(value, kind: str) -> bool:
    """Return whether a value from a JSON file has the type that the report needs."""
    if kind == INTEGER:
        return type(value) is int and 0 <= value <= 2**53
    if kind == NUMBER:
        return type(value) is float or (type(value) is int and abs(value) < 1e300)
    return isinstance(value, {TEXT: str, LIST: list, "": object}[kind])


@pytest.mark.parametrize(("file", "name"), FIELDS)
def test_a_value_of_a_wrong_type_is_named_in_one_line_and_the_rest_is_shown(file, name, tmp_path):
    right = json.loads(
        (
            make_run(tmp_path / "right") / f"{file.replace('mistake', 'predictions')}.json"
        ).read_text()
    )
    for number, value in enumerate(VALUES):
        if file == "mistake":
            changes = {"predictions": right | {"mistakes": [MISTAKE | {name: value}]}}
        else:
            changes = {file: right | {name: value}}
        runs = [read_run(make_run(tmp_path / f"{number}", **changes), "run")]
        if not has_type(value, FIELDS[file, name]):
            (problem,) = runs[0].problems
            assert problem.file == f"{next(iter(changes))}.json"
            assert f"{name} is not {FIELDS[file, name]}" in problem.message, value
        as_text(runs)
        write_report(tmp_path / "page.html", [*runs, read_run(tmp_path / "right", "right")])
        json.dumps(_finite(asdict(runs[0])))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
names = st.sampled_from([*CURVES, "step", *(name for _, name in FIELDS)])
objects = st.dictionaries(names, json_values, min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(files=st.fixed_dictionaries({file: objects | json_values for file in FILES}))
def test_any_json_in_any_file_causes_no_error(files):
    with tempfile.TemporaryDirectory() as folder:
        for file, value in files.items():
            Path(folder, file).write_text(json.dumps(value))
        runs = [read_run(Path(folder), "run")]
        as_text(runs)
        write_report(Path(folder, "page.html"), runs)
        json.dumps(_finite(asdict(runs[0])))


FOREIGN = {  # {folder in tests/lab/field/: (lines drawn, a problem of a file)}
    "big_step": (
        "5 of 7 lines",
        "metrics.jsonl +skipped, because step is not an integer .*: 2 lines, from line 6 to line 7",
    ),
    "config_strings": (
        "5 of 5 lines",
        "config.json +batch_size is not an integer from .*, and accumulate is not an integer .*: "
        "the images per step are unknown",
    ),
    "deep": ("5 of 6 lines", "metrics.jsonl +damaged and skipped: line 6"),
    "env_strings": (
        "5 of 5 lines",
        "environment.json +processes is not an integer .*: the images per step are unknown",
    ),
    "foreign_fm": (
        "0 of 2 lines",
        "metrics.jsonl +no known metric names; found: loss_tgt_mean, lr, accum_basis, wall_time",
    ),
    "list_bs": (
        "0 of 0 lines",
        "config.json +batch_size is not an integer .*: the images per step are unknown",
    ),
}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("", "only step"),
        ("abc", "a, b, c"),
        ("abcdefghijklmnop", "a, b, c, d, e, f, g, h, i, j, …"),
    ],
)
def test_names_that_are_all_unknown_are_listed(names, found, tmp_path):
    lines = [{"step": 1, **dict.fromkeys(names, 0.5)}]
    run = read_run(make_run(tmp_path / "run", metrics=lines), "run")
    assert problems_of(run) == f"metrics.jsonl no known metric names; found: {found}"
    assert run.metrics.lines_drawn == 0


@pytest.mark.parametrize("folder", FOREIGN)
def test_a_run_folder_of_another_program_is_reported_without_a_traceback(folder, tmp_path, capsys):
    drawn, problem = FOREIGN[folder]
    page, file = tmp_path / "page.html", tmp_path / "report.json"
    run = str(Path(__file__).parent / "field" / folder)
    assert report.main([run, "--html", str(page), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"{drawn} of metrics.jsonl drawn" in printed
    assert re.search(f"^ +{problem}$", printed, re.M), printed
    assert len(Page(page.read_text(encoding="utf-8")).text) > 20
    assert ("<svg" in page.read_text()) == (not drawn.startswith("0"))
    (content,) = json.loads(file.read_text())["runs"]
    assert content["images_per_step"] == (32 if folder == "big_step" else None)


def test_a_link_at_the_path_of_the_page_is_replaced_and_not_followed(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    run = make_run(tmp_path / "run")
    (run / "report.html").symlink_to(mine)
    assert report.main([str(run)]) == 0
    assert mine.read_text() == "precious"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_control_characters_in_a_run_are_escaped(tmp_path, capsys):
    config = {"model": "\x1b[31mred\u202e", "batch_size": 16, "accumulate": 2, "seed": 0}
    assert report.main([str(make_run(tmp_path / "run", config=config)), "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b[31mred\\u202e" in printed
    assert "\x1b" not in printed and "\u202e" not in printed


def test_the_confusion_matrix_has_a_row_for_each_true_class(tmp_path):
    run = read_run(make_run(tmp_path / "run"), "run")
    text = as_text([run])
    assert "24 of 30 test images correct" in text
    assert re.search(r"0 shoe +\| +7 \| +3 \| +0 \|", text)
    worst = text.index("  3 of 10 shoe were misclassified as bag")
    assert worst < text.index("  2 of 10 hat were misclassified as bag")
    assert "test image 7 is shoe, and was misclassified as bag with probability 87.5%" in text
    write_report(tmp_path / "page.html", [run])
    page = (tmp_path / "page.html").read_text()
    row = page[page.index('<th scope="row">shoe</th>') :].split("</tr>")[0]
    assert re.findall(r">(\d+)</div></td>", row) == ["7", "3", "0"]
    assert 'alt="test image 7: shoe, misclassified as bag"' in page


def test_images_seen_are_steps_times_the_global_batch_size(tmp_path):
    run = read_run(make_run(tmp_path / "run"), "run")  # 16 images, 2 micro-batches, 3 processes
    text = as_text([run])
    assert re.search(r"images per step +\| 96 ", text)
    assert re.search(r"images seen +\| 1,920 ", text)  # after 20 steps


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{}/nowhere"], "nowhere does not exist. Pass the folder of a run"),
        (["{}/run/config.json"], "config.json is not a folder"),
        (["{}"], "does not contain a run: it has none of config.json"),
        (["{}/run", "{}/run/../run"], "is given twice"),
        (["{}/run", "--html", "{}/none/page.html"], "cannot write --html"),
        (["{}/run", "--html", "{}"], "cannot write --html"),
        (["{}/run", "--json", "{}/none/report.json"], "cannot write --json"),
        (["{}/run", "--json", "{}/run/config.json"], "--json would replace .*config.json"),
        (["{}/run", "--html", "{}/x", "--json", "{}/x"], "--html would replace"),
        (["{}/run", "--quick", "--html", "{}/x"], "--quick writes no page"),
        (["{}/run", "--plot", "x.png"], "unrecognized arguments: --plot"),
        (
            ["--quick"],
            "RUN is missing. To list the runs in runs/, type `accel-demo report`",
        ),
        (["{}", "{}/run/config.json"], "none of the 2 paths is the folder of a run"),
        (["{}/run", "{}/nowhere"], "nowhere does not exist"),
    ],
)
def test_invalid_arguments_are_a_one_sentence_error_and_write_nothing(arguments, reason, tmp_path):
    folder = make_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    config = (folder / "config.json").read_bytes()
    with pytest.raises(UserError, match=reason) as error:
        report.main([argument.format(tmp_path) for argument in arguments])
    assert "\n" not in str(error.value)
    assert before.keys() == set(tmp_path.rglob("*"))
    assert (folder / "config.json").read_bytes() == config


def test_paths_that_are_not_runs_are_skipped_and_counted_in_one_line(tmp_path, capsys):
    """This is what `accel-demo report runs/*` passes."""
    run = make_run(tmp_path / "run")
    (tmp_path / "timeline").mkdir()
    (tmp_path / "file").touch()
    paths = sorted(map(str, tmp_path.iterdir()))
    assert report.main(paths) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("note: 2 of the 3 paths are not runs and were skipped\n")
    assert printed.endswith(f"report: {run / 'report.html'}\n")
    assert report.main([*paths[:2], "--quick"]) == 0
    assert "note: 1 of the 2 paths is not a run and was skipped" in capsys.readouterr().out
    assert report.main([str(run), "--quick"]) == 0
    assert "note: " not in capsys.readouterr().out


def test_the_page_is_written_into_the_first_run_folder_and_quick_writes_none(tmp_path, capsys):
    runs = [make_run(tmp_path / "a" / "same"), make_run(tmp_path / "b" / "same")]
    assert report.main(["--quick", *map(str, runs)]) == 0
    assert not list(tmp_path.rglob("*.html"))
    shown = capsys.readouterr().out
    assert "a/same " in shown and "b/same " in shown, "both folders have the same name"
    assert report.main(list(map(str, runs))) == 0
    assert list(tmp_path.rglob("*.html")) == [runs[0] / "report.html"]
    assert f"report: {runs[0] / 'report.html'}" in capsys.readouterr().out
    assert sorted(os.listdir(runs[0])) == sorted([*IMAGE_FILES, "report.html"])


def test_a_closed_output_pipe_causes_no_traceback(tmp_path, start):
    code = "import os, sys; from accel_demo import cli; read, write = os.pipe()\n"
    code += "os.close(read); os.dup2(write, 1); sys.argv[0] = 'accel-demo'; cli.main()"
    done = start(["python", "-c", code, "report", make_run(tmp_path / "run")])
    assert done.returncode == 1 and "Error" not in done.stderr, done.stderr
    assert (tmp_path / "run" / "report.html").exists()


def test_a_long_value_does_not_widen_every_row_on_the_terminal(tmp_path, capsys):
    first = make_run(tmp_path / "first", config={"model": "x" * 500})
    assert report.main([str(first), str(make_run(tmp_path / ("z" * 100))), "--quick"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows and max(map(len, rows)) < 200


def test_an_ascii_terminal_shows_question_marks_instead_of_blocks(tmp_path, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with one_line_errors():  # as in every program of ours
        assert report.main([str(make_run(tmp_path / "run")), "--quick"]) == 0
    terminal.seek(0)
    assert re.search(r"\| Train loss +\| run \|.*\?\?\?", terminal.read())


@settings(deadline=None)
@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_the_ticks_of_an_axis_enclose_its_values(first, second):
    low, high = sorted((first, second))
    values = ticks(low, high)
    assert 2 <= len(values) <= 8 and values == sorted(set(values))
    margin = max(1e-30, 1e-8 * abs(low), 1e-8 * abs(high))
    assert values[0] <= low + margin and values[-1] >= high - margin
    if low > 1e-9 and high > 30 * low:
        values = log_ticks(low, high)
        assert 2 <= len(values) <= 8 and values[0] <= low and values[-1] >= high


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**53), st.floats(-1e300, 1e300)), min_size=1, max_size=5))
def test_every_curve_stays_in_its_picture(points):
    last = max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    for name in ("train_loss", "learning_rate"):
        picture = chart(name, "Title", [points], "optimizer step", last)
        places = re.findall(r'class="mark" transform="translate\((\S+) (\S+)\)"', picture)
        assert places
        assert all(50 <= float(x) <= 368 and 9.9 <= float(y) <= 184.1 for x, y in places)
    line = sparkline(points, low, high, last)
    assert len(line) == SPARKLINE_WIDTH and line.strip()


def test_a_thinned_curve_keeps_its_ends_and_its_extremes():
    points = [(step, float(step * 7919 % 10007)) for step in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS and [kept[0], kept[-1]] == [points[0], points[-1]]
    assert all(a[0] < b[0] for a, b in zip(kept, kept[1:], strict=False))
    assert set(kept) < set(points)
    for edge in (min, max):
        assert edge(value for _, value in kept) == edge(value for _, value in points)


def hover(page, svg, step: int) -> str:
    """Move the pointer to a step of a chart, and return the tooltip's text."""
    svg.scroll_into_view_if_needed()
    frame = svg.bounding_box()
    right = float(svg.get_attribute("data-right"))
    share = (50 + step / right * (380 - 50 - 12)) / 380
    page.mouse.move(frame["x"] + share * frame["width"], frame["y"] + frame["height"] / 2)
    return page.locator(".tip:visible").inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_pointing_at_a_curve_shows_the_value_from_the_json(width, real_run, tmp_path, open_page):
    file, numbers = tmp_path / "page.html", tmp_path / "report.json"
    report.main([str(real_run), "--html", str(file), "--json", str(numbers)])
    (run,) = json.loads(numbers.read_text())["runs"]
    page = open_page(file, width=width)
    for name in CURVES.keys() - {"characters_per_second"}:
        svg = page.locator(f"svg.chart:visible[data-curve={name}]")
        for step, value in run["metrics"]["curves"][name]:
            first, second = hover(page, svg, step).splitlines()
            assert first == f"optimizer step {step}"
            assert float(second.replace(",", "")) == pytest.approx(value, rel=1e-5, abs=1e-12)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.mouse.move(0, 0)
    assert page.locator(".tip:visible").count() == 0


@pytest.mark.browser
def test_runs_are_side_by_side_on_a_desktop_and_stacked_on_a_phone(
    real_run, planted, tmp_path, open_page
):
    other, file = make_run(tmp_path / "other"), tmp_path / "page.html"
    report.main([str(real_run), str(other), str(planted), "--html", str(file)])
    for width, columns in ((1280, 3), (390, 1)):
        page = open_page(file, width=width)
        assert page.title() == f"Report of real, other, {planted.name}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lefts = page.eval_on_selector_all(
            ".beside:has(.mistakes) > section", "all => all.map(x => x.getBoundingClientRect().x)"
        )
        assert len(lefts) == 3 and len(set(lefts)) == columns
        images = page.eval_on_selector_all("img", "all => all.map(image => image.naturalWidth)")
        assert len(images) > 5 and min(images) > 0
        assert page.locator("th", has_text="<script>document.title=1").count() >= 1


@pytest.mark.browser
def test_the_axis_can_be_chosen_and_the_arrow_keys_move_along_a_curve(tmp_path, open_page):
    runs = [make_run(tmp_path / "small")]
    config = {"model": "small_cnn", "batch_size": 32, "accumulate": 2}
    runs.append(make_run(tmp_path / "large", config=config))
    report.main([*map(str, runs), "--html", str(tmp_path / "page.html")])
    page = open_page(tmp_path / "page.html")
    svg = page.locator("svg.chart:visible[data-curve=train_loss]")
    assert svg.get_attribute("data-axis") == "samples seen", "because the global batch sizes differ"
    svg.focus()  # selects the end of the longer curve: 20 steps of 192 images
    shown = page.locator(".tip:visible").inner_text().splitlines()
    assert shown == ["samples seen 3,840", "large: 0.75 (step 20)"]
    page.keyboard.press("ArrowLeft")
    shown = page.locator(".tip:visible").inner_text().splitlines()
    assert shown == ["samples seen 1,920", "small: 0.75 (step 20)", "large: 1.5 (step 10)"]
    page.keyboard.press("Escape")
    page.check("#steps")
    svg = page.locator("svg.chart:visible[data-curve=train_loss]")
    assert hover(page, svg, 10).splitlines() == ["optimizer step 10", "small: 1.5", "large: 1.5"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("count", [1, 9])
def test_the_page_is_readable_in_a_light_and_in_a_dark_theme(count, width, tmp_path, open_page):
    """The second run has no predictions. With nine runs, all colors of lines are used."""
    changes = [{}, {"predictions": None}, *({"config": {"seed": n}} for n in range(7))]
    folders = [make_run(tmp_path / f"run-{n}", **changes[n]) for n in range(count)]
    assert report.main([*map(str, folders), "--html", str(tmp_path / "page.html")]) == 0
    page = open_page(tmp_path / "page.html", width)
    hover(page, page.locator("svg.chart:visible").first, 10)
    kinds = {"text", "th", "b", "p", "h1", "div"} | ({"td"} if count > 1 else {"dd"})
    check_both_themes(page, kinds)
    lines = visible_lines(page, "svg.chart .line")  # in the dark theme
    assert len({line.color for line in lines}) == min(count, 8)
    assert [line for line in lines if line.contrast < LOWEST_OF_LINES] == []


@pytest.mark.browser
def test_paper_is_light_even_if_the_screen_is_dark(real_run, tmp_path, open_page):
    report.main([str(real_run), "--html", str(tmp_path / "page.html")])
    page = open_page(tmp_path / "page.html")
    page.emulate_media(media="print", color_scheme="dark")
    assert {seen.background for seen in visible_texts(page) if seen.kind == "dd"} == {
        "rgb(255, 255, 255)"
    }
