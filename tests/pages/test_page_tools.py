"""Test that a changed page is stale, and that a command runs again only if an input has changed.

Each test gets its own small repository with one page and two programs. One of the programs starts
processes.
"""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import REPOSITORY, run_to_end

END = "<!-- [[[end]]] -->"
PAGE = f"""
<!-- [[[cog
from page_tools import code, diff, picture, run
code("program.py", start="import helper", end="def read")
]]] -->
{END}
<!-- [[[cog diff("helper.py", "other_helper.py") ]]] -->
{END}
<!-- [[[cog run("python program.py") ]]] -->
{END}
<!-- [[[cog picture("python draw.py", "tutorials/drawn.svg", "Two words") ]]] -->
{END}
"""
PROGRAM = """
import json, os, signal, subprocess, sys
from multiprocessing import get_context
from pathlib import Path

import helper
def read(name):
    try:
        print(Path(name).read_text(), flush=True)
    except FileNotFoundError:
        print("no", name, flush=True)
def read_and_die(name):
    read(name)
    os.kill(os.getpid(), signal.SIGKILL)
def in_process(method, target, name):
    process = get_context(method).Process(target=target, args=[name])
    process.start()
    process.join()
if __name__ == "__main__":
    forked = "forked:" if "torch" in sys.modules else ""
    Path(os.environ["RUNS"]).open("a").write(f"{forked}program.py ")
    print(helper.TEXT)
    read("data.txt")
    if Path("later.txt").exists():
        read("later.txt")
    read("../outside.txt")
    in_process("fork", read_and_die, "killed.txt")
    in_process("spawn", read, "spawned.txt")
    code = "print(open('started.txt').read())"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
DRAW = """
import os, sys
from pathlib import Path

forked = "forked:" if "torch" in sys.modules else ""
Path(os.environ["RUNS"]).open("a").write(f"{forked}draw.py ")
Path(sys.argv[2]).write_text("<!-- words -->" + Path("drawn.txt").read_text())
print("Below the picture")
"""
FILES = {
    "tutorials/page.md": PAGE,
    "program.py": PROGRAM,
    "draw.py": DRAW,
    "helper.py": "TEXT = 'from the helper'\n",
    "other_helper.py": "TEXT = 'from the other helper'\n",
    "data.txt": "from the data",
    "killed.txt": "from a killed process",
    "spawned.txt": "from a spawned process",
    "started.txt": "from a started process",
    "drawn.txt": "<!-- 0.25 -->",
}
NOT_READ_BY_PROGRAMS = ("tutorials/page.md", "other_helper.py")
ALL = ["draw.py", "program.py"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a small repository whose page has just been generated."""
    folder = tmp_path_factory.mktemp("pages")
    no_assets = shutil.ignore_patterns("assets", "__pycache__")
    small = folder / "repository"
    shutil.copytree(REPOSITORY / "accel_demo", small / "accel_demo", ignore=no_assets)
    shutil.copytree(REPOSITORY / "tutorials" / "recorder", small / "tutorials" / "recorder")
    shutil.copytree(REPOSITORY / "tests" / "support", small / "tests" / "support")
    (small / "tests" / "__init__.py").touch()
    for name in ("page_tools.py", "command_cache.py"):
        shutil.copy(REPOSITORY / "tutorials" / name, small / "tutorials")
    for name, text in FILES.items():
        (small / name).write_text(text)
    result = regenerate(small)
    assert (result.returncode, result.stderr, result.ran) == (0, "", ALL), result.stdout
    return small.rename(folder / "written")


@pytest.fixture
def small(written):
    """Yield a copy of `written`, at the same path in every test."""
    small = written.parent / "repository"
    shutil.copytree(written, small)
    yield small
    shutil.rmtree(small)


def regenerate(small: Path, *flags: str, real: bool = True, **environment: str) -> SimpleNamespace:
    """Run page_tools.py in the small repository. The result's `ran` lists the programs that ran.

    The fork server is not used by default, because starting it would take longer than the programs.
    """
    runs = small.parent / "runs"
    runs.write_text("")
    environment = {"PYTHONPATH": str(small), "RUNS": str(runs), **environment}
    command = ["python", "tutorials/page_tools.py", "tutorials/page.md", *flags]
    command += ["--real"] if real else []
    result = run_to_end(command, cwd=small, **environment)
    result.ran = sorted(runs.read_text().split())
    return result


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, text
    file.write_text(text.replace(old, new))


def assert_stale(result, ran: list[str]) -> None:
    assert (result.returncode, result.ran) == (1, ran), result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "stale: tutorials/page.md"


def assert_fresh(result, ran: list[str]) -> None:
    assert (result.returncode, result.ran) == (0, ran), result.stdout + result.stderr
    assert " s  fresh    tutorials/page.md" in result.stdout and "stale" not in result.stdout


def test_an_unchanged_page_is_fresh_and_no_command_runs(small):
    page = (small / "tutorials" / "page.md").read_text()
    for text in ("import helper", "+TEXT = 'from the other", "from a killed process", "drawn.svg"):
        assert text in page
    assert_fresh(regenerate(small, "--check"), ran=[])


EDITED_PARTS = [  # (file, text in the file, false text)
    ("page", "```python\nimport helper\n", "```python\nimport other_helper\n"),  # code
    ("page", "+TEXT = 'from the other", "+TEXT = 'from another"),  # diff
    ("page", "from a spawned process", "from a forked process"),  # output
    ("page", "Below the", "Above the"),  # text below a picture
    ("drawn", "words", "sounds"),  # words of a picture
    ("drawn", "0.25", "0.52"),  # numbers of a picture
]


def test_a_page_with_an_edited_part_is_stale_even_if_no_command_runs(small):
    tutorials, pages, edited = small / "tutorials", [], []
    for number, (edited_file, truth, lie) in enumerate(EDITED_PARTS):  # one page for each lie
        files = {"page": f"page_{number}.md", "drawn": f"drawn_{number}.svg"}
        text = (tutorials / "page.md").read_text().replace("drawn.svg", files["drawn"])
        (tutorials / files["page"]).write_text(text)
        shutil.copy(tutorials / "drawn.svg", tutorials / files["drawn"])
        pages.append(f"tutorials/{files['page']}")
        edited.append(tutorials / files[edited_file])
        replace(edited[-1], truth, lie)
    checked = regenerate(small, *pages, "--check")
    assert (checked.returncode, checked.ran) == (1, []), checked.stdout + checked.stderr
    assert checked.stdout.splitlines()[-1] == f"stale: {' '.join(pages)}"
    for file, (_, _, lie) in zip(edited, EDITED_PARTS, strict=True):
        assert lie in file.read_text()  # --check changes no file
    assert regenerate(small, *pages).ran == []
    for file, (_, truth, lie) in zip(edited, EDITED_PARTS, strict=True):
        assert truth in file.read_text() and lie not in file.read_text()


def test_a_changed_file_reruns_the_commands_that_read_it(small):
    for name, truth, change, program in (
        ("helper.py", "the helper", "a changed helper", "program.py"),
        ("data.txt", "the data", "changed data", "program.py"),
        ("killed.txt", "a killed", "another killed", "program.py"),
        ("spawned.txt", "a spawned", "another spawned", "program.py"),
        ("started.txt", "a started", "another started", "program.py"),
        ("drawn.txt", "0.25", "0.5", "draw.py"),
    ):
        replace(small / name, truth, change)
        assert_stale(regenerate(small, "--check"), ran=[program])
    assert_stale(regenerate(small, "--check"), ran=[])  # the earlier checks have stored the output


def test_a_translation_copies_from_its_regenerated_page_and_runs_no_command(small):
    shutil.copy(REPOSITORY / "tutorials" / "translation.py", small / "tutorials")
    calls = "show(); show(); show(); show('两个词')"
    imports = "from translation import next_block; show = next_block('page.md')"
    translation = small / "tutorials" / "zh" / "page.md"
    translation.parent.mkdir()
    translation.write_text(f"<!-- [[[cog {imports}; {calls} ]]] -->\n{END}\n")
    replace(small / "data.txt", "the data", "changed data")
    assert regenerate(small, "tutorials/zh/page.md").ran == ALL  # once each, for a new file
    text = translation.read_text()
    assert "\nfrom changed data\n" in text and "![两个词](../drawn.svg)\n" in text
    replace(small / "data.txt", "changed data", "the data")
    stale = regenerate(small, "tutorials/zh/page.md", "--check")  # only what is on the page counts
    assert stale.stdout.splitlines()[-1] == "stale: tutorials/page.md"


def test_a_changed_file_that_no_command_reads_reruns_nothing(small):
    replace(small / "other_helper.py", "other", "third")
    assert_stale(regenerate(small, "--check"), ran=[])  # the page's diff shows this file
    replace(small / "other_helper.py", "third", "other")
    (small / "tests" / "test_page.py").write_text("")
    assert_fresh(regenerate(small, "--check"), ran=[])


def test_creating_a_file_that_a_command_looked_for_reruns_the_command(small):
    outside = small.parent / "outside.txt"
    outside.write_text("from outside")
    assert_stale(regenerate(small, "--check"), ran=["program.py"])
    outside.unlink()
    assert_fresh(regenerate(small, "--check"), ran=["program.py"])
    (small / "later.txt").write_text("from a new file")  # program.py checks if it exists
    assert_stale(regenerate(small, "--check"), ran=ALL)


def test_a_new_module_that_shadows_an_imported_one_reruns_all_commands(small):
    (small / "helper").mkdir()
    (small / "helper" / "__init__.py").write_text("TEXT = 'from a package'\n")
    assert_stale(regenerate(small, "--check"), ran=ALL)


def test_a_new_version_of_a_package_reruns_all_commands(small, tmp_path):
    metadata = tmp_path / "site" / "some_package-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    path = os.pathsep.join([str(small), str(tmp_path / "site")])
    assert_fresh(regenerate(small, "--check", PYTHONPATH=path), ran=ALL)
    assert_fresh(regenerate(small, "--check", PYTHONPATH=path), ran=[])
    replace(metadata, "Version: 1.0", "Version: 1.1")
    assert_fresh(regenerate(small, "--check", PYTHONPATH=path), ran=ALL)


def test_a_new_environment_variable_of_a_library_reruns_all_commands(small):
    assert_fresh(regenerate(small, "--check", SOME_VARIABLE="1"), ran=[])
    assert_fresh(regenerate(small, "--check", TORCH_LOGS="dynamo"), ran=ALL)


def test_a_different_processor_python_or_recorder_reruns_a_command(small, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tutorials")
    import command_cache

    facts = command_cache._facts()
    stored = {"facts": json.loads(json.dumps(facts)), "files": {}}
    assert command_cache._reason_to_run(stored, facts) is None
    for name in ("processor", "Python", "how commands are run"):
        other = {**facts, name: [facts[name], "other"]}
        assert command_cache._reason_to_run(stored, other) == f"changed: {name}"


def test_a_result_of_normal_processes_is_valid_for_forked_ones_but_not_vice_versa(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tutorials")
    import command_cache

    real, forked = ({"facts": {"forked": each}, "files": {}} for each in (False, True))
    assert command_cache._reason_to_run(real, forked["facts"]) is None
    assert command_cache._reason_to_run(forked, real["facts"]) == "changed: forked"


def test_force_reruns_all_commands(small):
    assert_fresh(regenerate(small, "--check", "--force"), ran=ALL)
    replace((small / "tutorials" / "page.md"), "from the data", "from a lie")
    assert_stale(regenerate(small, "--check", "--force"), ran=ALL)


def test_a_forked_program_records_the_files_of_all_its_processes_or_runs_every_time(small):
    page, unrecorded = small / "tutorials" / "page.md", small / "unrecorded.txt"
    unrecorded.write_text("from a program other than Python")
    code = 'import subprocess; subprocess.run(["cat", "unrecorded.txt"]); open("program.py")'
    command = f"python -c '{code}'"
    page.write_text(f"{page.read_text()}<!-- [[[cog run({command!r}) ]]] -->\n{END}\n")
    result = regenerate(small, "--force", real=False)
    assert (result.returncode, result.ran) == (0, ["forked:draw.py", "forked:program.py"])
    stored = [json.loads(file.read_text()) for file in (small / ".page_cache").iterdir()]
    files = {path for each in stored for path in each["files"]}
    assert {name for name in FILES if name not in NOT_READ_BY_PROGRAMS} <= files
    assert "../outside.txt" not in files and str(small.parent / "outside.txt") in files
    replace(small / "killed.txt", "a killed", "another killed")
    replace(unrecorded, "from a", "from another")
    assert regenerate(small, real=False).ran == ["forked:program.py"]
    assert "\nfrom another program other than Python\n" in page.read_text()


def test_the_result_of_a_failed_command_is_not_stored(small):
    (small / "program.py").write_text(f"{PROGRAM}    sys.exit('no luck')\n")
    for _ in range(2):
        result = regenerate(small, "--check")
        assert (result.returncode, result.ran) == (1, ["program.py"])
        assert "ended with 1, not 0" in result.stdout and "no luck" in result.stdout
        assert result.stdout.splitlines()[-1] == "failed: tutorials/page.md"


def test_a_command_whose_processes_cannot_record_files_runs_every_time(small):
    reads = "print(open('data.txt').read())"
    programs = [
        "subprocess.run(['cat', 'data.txt'])",
        "os.system('cat data.txt')",
        "os.execvp('cat', ['cat', 'data.txt'])",
        f'subprocess.run([sys.executable, "-I", "-c", "{reads}"])',
        f'subprocess.run([sys.executable, "-c", "{reads}"], env={{}})',
    ]
    commands = ["cat data.txt"]
    for number, program in enumerate(programs):
        (small / f"starts_{number}.py").write_text(f"import os, subprocess, sys\n{program}\n")
        commands.append(f"python starts_{number}.py")
    calls = "\n".join(f"run({command!r})" for command in commands)
    page = small / "tutorials" / "page.md"
    page.write_text(f"<!-- [[[cog\nfrom page_tools import run\n{calls}\n]]] -->\n{END}\n")
    for text in ("from the data", "from other data"):
        (small / "data.txt").write_text(text)
        assert regenerate(small).returncode == 0
        for command in commands:
            assert f"$ {command}\n{text}\n" in page.read_text()


def test_the_output_of_an_audit_depends_on_its_script_and_on_the_whole_package(monkeypatch):
    """Its processes cannot record their files: the audit would observe the recorder."""
    monkeypatch.syspath_prepend(REPOSITORY / "tutorials")
    import command_cache

    digests = command_cache._digests("accel-demo audit tutorials/13_train.py", "", float("inf"))
    assert digests is not None
    script, *package = (
        "tutorials/13_train.py",
        "accel_demo/data.py",
        "accel_demo/observer/agent.py",
    )
    assert {script, *package} <= set(digests)
    assert all(path.startswith(("accel_demo/", script)) for path in digests)


def test_a_result_is_not_stored_if_an_input_changes_while_the_command_runs(small):
    text = f"{PROGRAM}    Path('data.txt').write_text('from the data')\n"
    (small / "program.py").write_text(text)
    for _ in range(2):
        assert_fresh(regenerate(small, "--check"), ran=["program.py"])


def test_two_checks_at_the_same_time_store_complete_results(small):
    shutil.rmtree(small / ".page_cache")
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(partial(regenerate, small), ["--check"] * 2))
    assert [result.returncode for result in results] == [0, 0]
    assert_fresh(regenerate(small, "--check"), ran=[])


def test_a_partly_written_result_is_never_read(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(REPOSITORY / "tutorials")
    import command_cache

    monkeypatch.setattr(command_cache, "STORE", tmp_path)
    file, is_over = tmp_path / "result.json", threading.Event()
    contents = [{"output": letter * 2**20} for letter in "ab"]
    command_cache._save(file, contents[0])

    def write(content):
        while not is_over.is_set():
            command_cache._save(file, content)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, content) for content in contents]
        try:
            for _ in range(100):
                assert command_cache._load(file) in contents
        finally:
            is_over.set()
    assert [writer.result() for writer in writers] == [None, None]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("arguments", [["nowhere.md"], ["--chek"]])
def test_an_unknown_page_or_flag_causes_a_one_line_error(start, arguments):
    result = start(["python", "tutorials/page_tools.py", "--check", *arguments])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert arguments[0] in result.stderr


def test_git_ignores_the_stored_results():
    assert "/.page_cache/" in (REPOSITORY / ".gitignore").read_text().splitlines()
