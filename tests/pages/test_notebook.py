"""The notebook of pages 10 and 11: what its cells print, and what breaks its launches."""

import re

import nbformat
import pytest
from course import anchor

from tests.pages.pages import TUTORIALS, headings_of

NOTEBOOK = TUTORIALS / "11_in_a_notebook.ipynb"
CELLS = nbformat.read(NOTEBOOK, as_version=4).cells
TEXT = "\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown")
LAUNCHED = "Launching training on 2 CUDAs."


def printed_by(start: str) -> list[str]:
    """Return the stored lines of the cell that starts like this, in alphabetical order."""
    [cell] = [cell for cell in CELLS if cell.cell_type == "code" and cell.source.startswith(start)]
    return sorted("".join(output.text for output in cell.outputs).splitlines())


def test_two_processes_are_connected_and_without_cpu_they_are_clones():
    connected = [f"process {rank} of 2, received [0, 1]" for rank in range(2)]
    assert printed_by("notebook_launcher(where_am_i, (True,), num_processes=2") == [
        LAUNCHED,
        *connected,
    ]
    clones = ["process 0 of 1, received [0]"] * 2
    assert printed_by("notebook_launcher(where_am_i, (False,)") == [LAUNCHED, *clones]


def test_each_process_reads_half_of_the_images_and_both_end_with_the_same_weights():
    launched, weights, images, loss = printed_by("with tempfile.TemporaryDirectory()")
    assert (launched, weights) == (LAUNCHED, "equal weights: True")
    assert images == "images per process: [5952, 5952]"  # 93 batches of 64, of 6,000 images each
    assert float(loss.removeprefix("loss of the last batch: ")) < 1  # at first, about log(10) = 2.3


def test_a_model_from_another_cell_is_trained_only_in_the_processes():
    assert printed_by("outside = nn.Linear(2, 1)") == [
        LAUNCHED,
        "changed in the notebook: False",
        "changed in the process: True",
    ]


def test_each_mistake_causes_the_error_that_the_notebook_shows():
    [missing] = printed_by("try:\n    notebook_launcher(where_am_i, (True,))\n")
    assert missing.startswith("ValueError: You have to specify the number of devices")
    assert printed_by("def hello(rank)") == [
        "AttributeError: Can't get attribute 'hello' on <module '__main__' (built-in)>",
        "ProcessExitedException: process 0 terminated with exit code 1",
    ]
    on_cpu, second, first = printed_by("notebook_launcher(where_am_i, (True,), num_processes=1)")
    assert (on_cpu, first) == ("Launching training on CPU.", "process 0 of 1, received [0]")
    assert second.startswith("ValueError: To launch a multi-device training from your notebook, ")


@pytest.mark.pages
def test_a_false_output_is_stale_and_no_other_output_is(start, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [cell] = [cell for cell in notebook.cells if cell.source.startswith("with tempfile.")]
    [output] = cell.outputs
    assert "equal weights: True" in output.text
    output.text = output.text.replace("equal weights: True", "equal weights: False")
    nbformat.write(notebook, tmp_path / "lie.ipynb")
    command = ["python", "tutorials/run_notebook.py", "--check", tmp_path / "lie.ipynb"]
    result = start(command, timeout=200, real=True)
    assert result.returncode == 1, result.stderr
    stale = [line for line in result.stdout.splitlines() if line.startswith("stale: ")]
    assert stale == [f"stale: {cell.source.splitlines()[0]}"]
    assert "equal weights: True" in result.stdout


AFTER_AN_ERROR = """
import os, re, socket, time
from datetime import timedelta
from IPython.core.interactiveshell import InteractiveShell
from accelerate import Accelerator, InitProcessGroupKwargs, notebook_launcher
from accel_demo.processes.launch import free_port

def fails():
    Accelerator(cpu=True)
    raise ValueError("a mistake in train")

def connects():
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()  # so that no process exits before the other has connected
    accelerator.print("connected", flush=True)

def alone():
    if os.environ["RANK"] == "0":
        time.sleep(100)  # until the launcher stops it, because rank 1 has failed
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=5))  # the default is 30 minutes
    Accelerator(cpu=True, kwargs_handlers=[limit])

def is_used(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0

def launch(function, port):
    notebook_launcher(function, num_processes=2, use_port=str(port))

shell, first, other = InteractiveShell.instance(user_ns=globals()), free_port(), free_port()
print("error:", shell.run_cell("launch(fails, first)").error_in_exec)
print("port is used:", is_used(first))
for name, port in {"same": first, "new": other}.items():
    error = str(shell.run_cell("launch(alone, port)").error_in_exec)
    print(f"{name} port: {re.search('connectFullMesh failed|wait timeout', error).group()}")
print("both:", shell.run_cell("launch(connects, free_port())").error_in_exec)
"""


@pytest.mark.pages
def test_after_an_error_a_launch_on_the_same_port_reads_old_addresses(start, tmp_path):
    """IPython, which runs Jupyter's cells, keeps the last traceback, and with it the store.

    If both processes start, it can succeed: their ports decide which of them connects to the other.
    So only rank 1 starts here. It either finds an address of rank 0 or waits for one.
    """
    (tmp_path / "cells.py").write_text(AFTER_AN_ERROR)
    result = start(["python", tmp_path / "cells.py"], timeout=200, real=True)
    shown = result.stdout + result.stderr
    assert re.search(r"^error: \n=+\nfails FAILED", result.stdout, re.MULTILINE), shown
    for line in (
        "port is used: True",
        "same port: connectFullMesh failed",
        "new port: wait timeout",
        "both: None",
    ):
        assert f"{line}\n" in result.stdout, shown
    assert "ValueError: a mistake in train" in result.stdout
    assert result.stdout.count("connected\n") == 1
    assert "Gloo connectFullMesh failed" in result.stderr and "`Gloo connectFullMesh fa" in TEXT


IN_COLAB_OR_KAGGLE = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell
from accelerate import Accelerator, debug_launcher, notebook_launcher
from accel_demo.processes.launch import free_port

def where_am_i(cpu):
    accelerator = Accelerator(cpu=cpu)
    line = f"processes: {accelerator.num_processes}\\n"
    accelerator.print(line, end="", flush=True)  # one write: with debug_launcher, both print
    accelerator.wait_for_everyone()
    accelerator.end_training()

if sys.argv[1] == "Kaggle":
    os.environ["KAGGLE_KERNEL_RUN_TYPE"] = "Interactive"
    InteractiveShell.instance()
else:
    names = {"__module__": "google.colab._shell"}
    type("Shell", (InteractiveShell,), names).instance()
    debug_launcher(where_am_i, (True,), num_processes=2)
notebook_launcher(where_am_i, (True,), num_processes=2, use_port=str(free_port()))
"""


@pytest.mark.pages
@pytest.mark.parametrize(
    ("host", "printed"),
    [
        ("Kaggle", [LAUNCHED, "processes: 2"]),
        ("Colab", [*["processes: 2"] * 2, "Launching training on one CPU.", "processes: 1"]),
    ],
)
def test_without_gpus_only_debug_launcher_starts_two_processes_in_colab(
    start, tmp_path, host, printed
):
    """Accelerate recognizes Colab by the class of IPython's shell, and Kaggle by a variable.

    Under `debug_launcher`, which sets no local rank, `accelerator.print` prints in both processes.
    """
    (tmp_path / "cell.py").write_text(IN_COLAB_OR_KAGGLE)
    result = start(["python", tmp_path / "cell.py", host])
    assert result.stdout.splitlines() == printed, result.stderr


def test_the_links_of_the_notebook_lead_to_files_and_headings():
    links = re.findall(r"\]\(([\w.]+)#?([\w-]*)\)", TEXT)
    assert len(links) == TEXT.count("](") > 5
    for file, heading in links:
        text = (TUTORIALS / file).read_text()
        assert not heading or heading in map(anchor, headings_of(text)), (file, heading)
