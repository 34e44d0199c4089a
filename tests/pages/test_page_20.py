"""Page 20: eight collectives, an asynchronous call, and the exercise on all-reduce."""

import tempfile

import pytest

from tests.pages.pages import EXERCISES, check, table_rows

PAGE = "20_collectives.md"
ANSWER = (EXERCISES / "answers" / "20_all_reduce.py").read_text()
BODY = ANSWER[ANSWER.index("    rank, others") :]


def test_the_page_shows_the_result_of_each_collective():
    after = {}
    for name, rank, _, numbers in table_rows(PAGE, cells=4):
        if rank in ("0", "1", "2"):
            after.setdefault(name, []).append(numbers)
    sums = "111 222 333"
    assert after == {
        "broadcast": ["1 2 3"] * 3,
        "scatter": ["1", "2", "3"],
        "gather": ["1 10 100", "·", "·"],
        "all_gather": ["1 10 100"] * 3,
        "reduce": [sums, "10 20 30", "100 200 300"],
        "reduce_scatter": sums.split(),
        "all_reduce": [sums] * 3,
        "all_to_all": ["1 10 100", "2 20 200", "3 30 300"],
    }


def test_the_page_counts_messages_and_bytes():
    counts = {row[0]: row[1:] for row in table_rows(PAGE, cells=5)}
    assert counts["broadcast"] == counts["reduce"] == ["2", "2", "48", "48"]
    assert counts["scatter"] == counts["gather"] == ["2", "2", "16", "16"]
    assert counts["all_reduce"] == ["4", "4", "96", "96"]
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert counts[name] == ["6", "2", "48", "32"]
    through_rank_0, in_shares = (counts[name] for name in counts if name.startswith("`reduce"))
    assert through_rank_0 == ["1→0, 2→0; then 0→1, 0→2", "960", "960", "yes"]
    assert in_shares[0].count("→") == 12 and in_shares[1:] == ["960", "640", "yes"]


def test_the_page_shows_a_call_that_returns_before_other_ranks_have_joined():
    states = {row[0]: row[1:3] for row in table_rows(PAGE, cells=4)}
    assert states["the call has returned"] == ["have not called it", "False"]
    assert states["`wait()` has returned"] == ["have joined", "True"]


def test_the_page_shows_that_each_init_method_connects_two_processes():
    ways = [row for row in table_rows(PAGE, cells=4) if "://" in row[0]]
    assert len(ways) == 3
    assert all(row[2:] == ["2, 2", "3, 3"] for row in ways)


def test_the_model_answer_passes(start):
    # Do not use tmp_path, because it would make the path of a Unix socket too long.
    with tempfile.TemporaryDirectory(prefix="a b ") as folder:
        result = check(start, "20", EXERCISES / "answers" / "20_all_reduce.py", TMPDIR=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("right: with 1, 2, 3 and 4 processes")


def test_the_unsolved_exercise_fails(start):
    result = check(start, "20")
    assert result.returncode == 1
    said = "on 1 process a function is not written yet: NotImplementedError (line 19 of the answer)"
    assert result.stdout == f"wrong: {said}\n"


TO_NEIGHBOURS = """
    if dist.get_world_size() > 1:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        part = torch.empty_like(tensor)
        sent = dist.isend(tensor.clone(), (rank + 1) % world_size)
        dist.recv(part, (rank - 1) % world_size)
        sent.wait()
        tensor += part
"""
SLOW = pytest.mark.slow
MISTAKES = [  # (body of all_reduce, part of the grader's message)
    (
        TO_NEIGHBOURS,
        "on 3 processes rank 0 ends with the tensors of ranks 0 and 2 alone, and not with every "
        "tensor once. (It is right on 2 processes.)",
    ),
    (
        BODY.replace(
            "dist.send(tensor, 0)\n        dist.recv(tensor, 0)", "dist.send(tensor, 0)"
        ).replace("        dist.send(tensor, other)", "        pass"),
        "on 2 processes rank 0 alone has the sum",
    ),
    (
        BODY.replace(
            "dist.send(tensor, 0)\n        dist.recv(tensor, 0)",
            "dist.recv(tensor, 0)\n        dist.send(tensor, 0)",
        ),
        "has not finished after",
    ),
    pytest.param("\n    dist.all_reduce(tensor)\n", "torch.distributed's all_reduce", marks=SLOW),
    pytest.param(
        "\n    dist.group.WORLD.allreduce([tensor]).wait()\n",
        "torch.distributed's allreduce",
        marks=SLOW,
    ),
    pytest.param(
        BODY.replace(
            "range(1, dist.get_world_size())", "[1] * (dist.get_world_size() > 1)"
        ).replace("    if rank > 0:", "    if rank > 1:\n        return\n    if rank > 0:"),
        "on 3 processes rank 0 ends with the tensors of ranks 0 and 1 alone, and not with every "
        "tensor once. (It is right on 2 processes.)",
        marks=SLOW,
    ),
    pytest.param(
        BODY.replace(
            "        tensor += part", "        tensor += part\n    tensor /= 1 + len(others)"
        ),
        "on 2 processes every rank has the mean, and not the sum",
        marks=SLOW,
    ),
    pytest.param(
        "\n    tensor = tensor.clone()\n"
        + BODY.replace("        return", "        return tensor")
        + "    return tensor\n",
        "it returns the sum, but does not write it into the tensor",
        marks=SLOW,
    ),
    pytest.param("\n    raise SystemExit(3)\n", "cannot use the file: SystemExit: 3", marks=SLOW),
]


@pytest.mark.parametrize(("body", "said"), MISTAKES)
def test_the_grader_names_a_typical_mistake(start, tmp_path, body, said):
    wrong = ANSWER.replace(BODY, body)
    assert wrong != ANSWER
    answer = tmp_path / "a wrong answer.py"
    answer.write_text(wrong)
    # Only the answer that hangs gets a short time limit, because other answers may need longer.
    hurry = {"ACCEL_DEMO_PATIENCE": "3"} if said == "has not finished after" else {}
    result = check(start, "20", answer, **hurry)
    assert (result.returncode, result.stderr) == (1, "")
    assert said in result.stdout, result.stdout
