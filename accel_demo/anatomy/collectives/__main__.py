"""python -m accel_demo.anatomy.collectives"""

from accel_demo.anatomy import group
from accel_demo.anatomy.collectives import by_hand
from accel_demo.errors import one_line_errors

with one_line_errors():
    options = group.read(group.command_line(by_hand.__doc__, processes=3))
    group.run_in_group(by_hand.main, options.processes, options)
