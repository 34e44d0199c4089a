"""Run the course's notebook, and store what it prints.

python tutorials/run_notebook.py            # run every cell again, and store the outputs
python tutorials/run_notebook.py --check    # write nothing; exit with code 1 if outputs differ

Only what can be compared is stored: printed lines, and the messages of errors in other processes.
Tracebacks and warnings contain paths and times.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser

NOTEBOOK = Path(__file__).parent / "11_in_a_notebook.ipynb"
MOST_SECONDS = 120  # per cell


def main() -> int:
    """Run the notebook. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("notebook", nargs="?", type=Path, default=NOTEBOOK)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    if not options.notebook.is_file():
        raise UserError(f"no such notebook: {options.notebook}")
    stored = nbformat.read(options.notebook, as_version=4)
    executed = run_again(stored)
    if not options.check:
        nbformat.write(executed, options.notebook)
        return 0
    stale = [
        f"stale: {new.source.splitlines()[0]}\n{text_of(new)}"
        for old, new in zip(stored.cells, executed.cells, strict=True)
        if comparable(old) != comparable(new)
    ]
    print("\n".join(stale) or "fresh")
    return 1 if stale else 0


def run_again(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run all cells in a new kernel without GPUs. Return a copy with the new outputs."""
    executed = nbformat.from_dict(notebook)
    client = NotebookClient(
        executed,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},  # the working directory
        timeout=MOST_SECONDS,
        record_timing=False,
        allow_errors=True,
        shutdown_kernel="immediate",  # torch's launcher leaves a handler that raises on SIGTERM
    )
    without_gpus = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    client.execute(env=without_gpus, stderr=subprocess.DEVNULL)  # the cells have it, too
    for cell in executed.cells:
        if cell.cell_type == "code":
            lines = lines_to_store(cell.outputs)
            cell.outputs = [nbformat.v4.new_output("stream", text=lines)] if lines else []
    executed.metadata = notebook.metadata
    return executed


def lines_to_store(outputs: list) -> str:
    """Return the printed text, followed by the messages of errors in other processes.

    Raises `RuntimeError` if the cell itself failed.
    """
    streams = {"stdout": "", "stderr": ""}
    for output in outputs:
        if output.output_type == "error":
            raise RuntimeError("\n".join(output.traceback))
        streams[output.name] += output.text
    messages = re.findall(r"^\w+Error: .*\n", streams["stderr"], flags=re.MULTILINE)
    return streams["stdout"] + "".join(messages)


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.get("outputs", []))


def comparable(cell: nbformat.NotebookNode) -> list[str]:
    """Return the lines that a cell printed in alphabetical order, with … for fractions.

    Processes print in any order, and the digits of a loss depend on the processor.
    """
    return sorted(re.sub(r"\d+\.\d+", "…", text_of(cell)).splitlines())


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
