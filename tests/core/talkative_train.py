"""Run train.py, and print a line of progress after every batch if stderr is not a terminal."""

import runpy
from functools import partial

from accel_demo.run import run
from tests.conftest import REPOSITORY

run.TrainLog = partial(run.TrainLog, silence=0)
runpy.run_path(str(REPOSITORY / "accel_demo/train.py"), run_name="__main__")
