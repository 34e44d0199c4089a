"""Recorded outputs come from an idle machine."""

from types import SimpleNamespace

import pytest

from accel_demo.errors import UserError
from accel_demo.lab.load import Load
from tests.pages.pages import TUTORIALS, load_module


@pytest.fixture
def record(monkeypatch):
    """Return the module, with a machine whose load is `record.others`, and commands that print."""
    module = load_module(TUTORIALS / "40_record.py")
    module.others, module.printed, module.written = 0.0, "a table", {}

    def load(self):
        return Load(1.0, 0.0, module.others, 0.0, 0.0, False)

    monkeypatch.setattr(module.LoadWatch, "load", load)
    for name, seconds in (("PAUSE", 0.0), ("LONGEST", 0.01)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(
        module,
        "run_to_end",
        lambda *_, **__: SimpleNamespace(returncode=0, stdout=module.printed, stderr=""),
    )
    monkeypatch.setattr(module, "write", module.written.__setitem__)
    return module


def test_a_command_is_recorded_on_an_idle_machine(record):
    record.record("buckets")
    assert record.written == {"buckets": f"$ {record.RECORDS['buckets'][0]}\na table\n"}


def test_nothing_is_recorded_if_other_programs_use_the_processor(record):
    record.others = 1.2
    with pytest.raises(UserError, match="not recorded: other programs use 1.2 cores"):
        record.record("buckets")
    assert record.written == {}


def test_nothing_is_recorded_if_the_machine_was_busy_in_each_run(record):
    record.printed = "a table\n\n**busy machine: other programs used 0.9 of 2 cores: measure**"
    with pytest.raises(UserError, match="not recorded: the machine was busy in 3 runs"):
        record.record("buckets")
    assert record.written == {}
