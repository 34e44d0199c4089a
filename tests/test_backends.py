"""Two processes meet in each way `init_process_group` knows, and the build says what it has."""

import pytest
import torch
import torch.distributed as dist

from accel_demo.anatomy.backends import CARRIES, DEVICES, is_built_in


def test_two_processes_meet_in_each_of_the_three_ways(start, tmp_path):
    picture = tmp_path / "backends.svg"
    command = ["python", "-m", "accel_demo.anatomy.backends", "--build", "--plot", picture]
    result = start(command)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in result.stdout.splitlines()
        if line.startswith("|")
    ]
    ways = [row for row in rows if len(row) == 4][2:]
    assert [row[0].split(":")[0] for row in ways] == ["`env", "`file", "`tcp"]
    assert [row[1].startswith("the variables RANK") for row in ways] == [True, False, False]
    assert [row[2:] for row in ways] == [["2, 2", "3, 3"]] * 3  # apart it would be 1, 1 and 1, 2
    built = {row[0]: row[1] for row in rows if len(row) == 3}
    assert torch.__version__ in built["backend"]
    for name in CARRIES:
        assert built[name] == ("yes" if is_built_in(name) else "no")
    drawn = picture.read_text()
    assert all(f"<!-- {word} -->" in drawn for word in (*CARRIES, *DEVICES.values()))


def test_what_the_build_has_is_what_torch_says():
    assert is_built_in("gloo") == dist.is_gloo_available() is True  # the course runs on it
    assert is_built_in("nccl") == dist.is_nccl_available()
    assert is_built_in("mpi") == dist.is_mpi_available()
    for name in CARRIES:
        assert is_built_in(name) == dist.is_backend_available(name)
        assert name in dist.Backend.backend_capability
    carried = set(dist.Backend.backend_capability) - {"fake"}
    assert carried >= set(CARRIES)


@pytest.mark.parametrize("launcher", [{"RANK": "0"}, None])
def test_under_a_launcher_it_says_in_one_line_that_it_starts_its_own(launcher, start):
    environment = launcher or {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    }
    result = start(["python", "-m", "accel_demo.anatomy.backends"], **environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert ("without a launcher" if launcher is None else "unset it") in result.stderr
