"""Every init method connects two processes, and the program lists torch's backends."""

import pytest
import torch.distributed as dist

from accel_demo.anatomy.backends import BACKENDS, DEVICES, is_built_in, main
from tests.anatomy.programs import printed, table_rows, words_in


def test_each_of_the_three_init_methods_connects_two_processes(start):
    result = start(["python", "-m", "accel_demo.anatomy.backends"])
    assert (result.returncode, result.stderr) == (0, "")
    methods = table_rows(result.stdout)[1:]
    assert [row[0].split(":")[0] for row in methods] == ["`env", "`file", "`tcp"]
    assert [row[1].startswith("the variables RANK") for row in methods] == [True, False, False]
    # On both processes, the world size is 2, and the all-reduced sum of rank + 1 is 3.
    assert [row[2:] for row in methods] == [["2, 2", "3, 3"]] * 3


def test_with_build_the_program_lists_each_backend_and_whether_this_torch_contains_it(tmp_path):
    picture = tmp_path / "backends.svg"
    rows = table_rows(printed(lambda _, options: main(options), None, build=True, plot=picture))
    built = {row[0].strip("`"): row[2] for row in rows[1:]}
    assert built == {name: "yes" if is_built_in(name) else "no" for name in BACKENDS}
    assert words_in(picture) >= {*BACKENDS, *DEVICES.values()}


@pytest.mark.filterwarnings("ignore:For MPI backend, world_size")
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_built_in_unless_torch_says_that_it_is_not(name):
    """torch also refuses a built-in backend whose device is missing, so check the error message."""
    refused = ""
    try:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        refused = str(error)
    if dist.is_initialized():
        dist.destroy_process_group()
    assert is_built_in(name) == ("have" not in refused or "built in" not in refused), refused


def test_every_backend_of_torch_is_explained():
    assert set(dist.Backend.backend_list) - {"undefined", "fake"} == set(BACKENDS)
