"""python -m accel_demo.anatomy.collectives"""

from accel_demo.anatomy.collectives import by_hand
from accel_demo.anatomy.command_line import command_line, read
from accel_demo.errors import one_line_errors
from accel_demo.processes.group import run_in_group

with one_line_errors():
    options = read(command_line(by_hand.__doc__, processes=3))
    run_in_group(by_hand.main, options.processes, options)
