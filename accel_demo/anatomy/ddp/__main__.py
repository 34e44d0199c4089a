"""python -m accel_demo.anatomy.ddp"""

from accel_demo.anatomy.ddp import by_hand, comparison, timeline
from accel_demo.anatomy.flags import command_line, read
from accel_demo.errors import one_line_errors

with one_line_errors():
    options = read(command_line(by_hand.__doc__))
    if options.plot:
        timeline.draw_timeline(options.plot)
    comparison.print_ladder()
