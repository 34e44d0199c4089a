"""Each page says what to type to see the same on a script of one's own, and the commands work."""

import re

import pytest

from tests.conftest import run_to_end
from tests.pages.pages import TUTORIALS

BOTH = re.DOTALL | re.MULTILINE
PAGES = sorted(TUTORIALS.glob("[0-9]*.md"))
SCRIPT = """
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1024, 8), torch.randn(1024, 1))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def commands() -> list[str]:
    """Return the commands for a train.py of the reader's in "On your script", each once."""
    found: dict[str, None] = {}
    for page in PAGES:
        sections = re.findall(r"^## On your script$(.*?)^## ", page.read_text(), BOTH)
        blocks = re.findall(r"^```bash\n(.*?)^```", "".join(sections), BOTH)
        for line in "".join(blocks).replace("\\\n", " ").splitlines():
            if re.search(r"(?<![/\w])train\.py", line):
                found[line.split("  #")[0].strip()] = None
    return list(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_says_what_to_type_on_ones_own_script(page):
    assert re.search(
        r"^#+ On your script$|\*\*On your script\*\*|^### What the command says about a script$",
        page.read_text(),
        re.MULTILINE,
    )


@pytest.mark.pages
@pytest.mark.parametrize("command", commands())
def test_a_command_for_ones_own_script_works(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_to_end(["bash", "-c", command], timeout=120, cwd=tmp_path)
    finds = command.startswith(
        ("accel-demo audit", "grep")
    )  # they exit with 1 if they find something, or nothing
    assert result.returncode in ((0, 1) if finds else (0,)), result.stderr
    # If the launcher with the store exits a moment too early, another one logs a traceback and
    # exits with 0. The lines of one record begin with the same time.
    prefixes = re.findall(r"^(.*)Error waiting on exit barrier", result.stderr, re.MULTILINE)
    for prefix in prefixes:
        assert f"\n{prefix}torch.distributed.DistNetworkError" in result.stderr, result.stderr
    tracebacks = [line for line in result.stderr.splitlines() if "Traceback" in line]
    assert all(line.startswith(tuple(prefixes)) for line in tracebacks), result.stderr
