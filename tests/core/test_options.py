"""Test the options that several programs share, and their defaults."""

import re

import pytest

from accel_demo.errors import UserError
from accel_demo.options import Parser, command_parser
from accel_demo.processes.environment import rank_environment


def parser() -> Parser:
    """Return a parser with an option of every kind."""
    parser = command_parser("example", "An example.", "less")
    parser.add_processes(3, "processes")
    parser.add_option("--steps", 8, "steps", quick=4, least=2, most=9)
    parser.add_option("--repeats", 5, "repeats", least=1)
    parser.add_option("--model", "large", "the model", quick="small", choices=("large", "small"))
    parser.add_guess("a number")
    return parser


@pytest.fixture
def launched(monkeypatch):
    """Remove the variables of a launcher. `launched(**variables)` sets them, for five processes."""
    for name in rank_environment(0, 1, 0):
        monkeypatch.delenv(name, raising=False)

    def set_variables(**changes: str) -> None:
        for name, value in (rank_environment(1, 5, 29500) | changes).items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--processes 0", "--processes must be at least 1, got 0"),
        ("--processes 100000", "100000 processes are too many for"),
        ("--processes two", "argument --processes: invalid int value: 'two'"),
        ("--plot x.gif", "--plot takes a .png, .svg or .pdf file, got x.gif"),
        ("--json no/x.json", "cannot write --json no/x.json: No such file or directory"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        ("--step 4", "unrecognized arguments: --step 4"),  # no abbreviations
        ("--steps 1", "--steps must be from 2 to 9, got 1"),
        ("--steps 10", "--steps must be from 2 to 9, got 10"),
        ("--steps x", "argument --steps: invalid int value: 'x'"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--model huge", "argument --model: invalid choice: 'huge'"),
        ("--guess much", "--guess must be a number, got much"),
        ("--guess inf", "--guess must be a number, got inf"),
    ],
)
def test_a_mistake_on_the_command_line_raises_a_user_error(
    typed, said, launched, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(said)):
        parser().parse_args(typed.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", (8, 5, "large")),
        ("--quick", (4, 5, "small")),
        ("--steps 9 --quick --model large", (9, 5, "large")),
    ],
)
def test_with_quick_the_options_that_are_not_given_have_other_defaults(typed, expected, launched):
    options = parser().parse_args(typed.split())
    assert (options.steps, options.repeats, options.model) == expected
    assert "steps (default: 8, or 4 with --quick)" in parser().format_help()
    assert "repeats (default: 5)" in parser().format_help()


def test_the_number_of_processes_comes_from_the_launcher_the_flag_or_the_default(launched):
    assert parser().parse_args([]).processes == 3
    assert parser().parse_args(["--processes", "2"]).processes == 2
    launched()
    assert parser().parse_args([]).processes == 5
    with pytest.raises(UserError, match="--processes cannot be used with a launcher. Leave it out"):
        parser().parse_args(["--processes", "2"])
    launched(WORLD_SIZE="abc")
    with pytest.raises(UserError, match="WORLD_SIZE must be an integer, got 'abc'"):
        parser().parse_args([])
    assert not hasattr(Parser("", plot=True).parse_args([]), "processes")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1,,2", "", "100000"])
def test_an_invalid_list_of_process_counts_is_an_error(text):
    with pytest.raises(UserError, match="processes"):
        counts(text)


def test_process_counts_are_sorted_and_unique():
    assert counts("4,1,2,1") == [1, 2, 4]


def counts(text: str) -> list[int]:
    parser = Parser("")
    parser.add_process_counts("counts")
    return parser.parse_args([f"--processes={text}"]).processes
