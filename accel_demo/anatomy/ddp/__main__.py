"""Average gradients in several ways, and compare the final weights with DDP's, bit for bit.

The methods range from one all-reduce per parameter to DDP rebuilt by hand, with buckets and hooks.
Each method trains a small model on 2, 3 and 4 processes. The picture shows when each bucket of
gradients is sent during backward.

python -m accel_demo.anatomy.ddp
python -m accel_demo.anatomy.ddp --plot ddp.svg
"""

from accel_demo.anatomy.ddp import comparison, timeline
from accel_demo.anatomy.flags import command_line, read
from accel_demo.errors import one_line_errors

with one_line_errors():
    options = read(command_line(__doc__))
    if options.plot:
        timeline.draw_timeline(options.plot)
    comparison.print_comparison()
