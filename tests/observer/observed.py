"""Run a script in this process under observation, as `accel-demo audit` would have it run.

Usage: python observed.py SCRIPT. The audit itself injects the observer into a new Python process;
this program can be forked from the fork server instead, which is faster.
"""

import runpy
import sys

from accel_demo.observer import agent

agent.start()
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except Exception as error:
    sys.last_value = error  # as Python does before it prints an error
    raise
