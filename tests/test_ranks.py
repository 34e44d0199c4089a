"""A function is called in connected processes, and what each found comes back."""

import pytest
import torch
import torch.distributed as dist

from accel_demo.errors import UserError
from accel_demo.lab.ranks import of_every_rank
from accel_demo.lab.verb import process_counts


def found_here(device, add):
    total = torch.tensor(dist.get_rank() + add, device=device)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), torch.get_num_threads()


def test_every_rank_answers_and_all_were_connected():
    assert of_every_rank(found_here, 3, 10) == [(rank, 3, 33, 1) for rank in range(3)]
    assert of_every_rank(found_here, 1, 5, threads=2) == [(0, 1, 5, 2)]


def fail_on_rank_1(device):
    if dist.get_rank() == 1:
        raise ValueError("planted")


def test_a_process_that_fails_ends_the_others(capfd):
    with pytest.raises((SystemExit, Exception)) as raised:
        of_every_rank(fail_on_rank_1, 2)
    assert "planted" in str(raised.value) + capfd.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "two", "1,,2", "", "100000"])
def test_a_wrong_number_of_processes_gets_one_sentence(text):
    with pytest.raises(UserError, match="processes"):
        process_counts(text)


def test_numbers_of_processes_come_in_order_and_once():
    assert process_counts("4,1,2,1") == [1, 2, 4]
