"""Test `accel-demo check` if the package is installed without the exercises.

tests/exercises tests everything else.
"""

import pytest

from accel_demo.errors import UserError
from accel_demo.lab import check


def test_an_installed_package_says_that_it_has_no_exercises(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "GRADERS", tmp_path / "tutorials" / "exercises" / "graders")
    with pytest.raises(UserError, match="the exercises are not in the installed package. Clone"):
        check.main([])
    with pytest.raises(SystemExit, match="0"):
        check.main(["--help"])
    assert "accel-demo check --all" in capsys.readouterr().out
