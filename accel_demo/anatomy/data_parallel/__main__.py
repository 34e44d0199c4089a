"""Show what nn.DataParallel does in one training step, phase by phase, on any machine.

The phases are rebuilt by hand, so that several replicas can also run on one CPU. `step` prints what
each replica does in a step. `bias` shows how the gradient of 30 samples depends on whether the loss
is computed inside or outside forward.

python -m accel_demo.anatomy.data_parallel
python -m accel_demo.anatomy.data_parallel bias --replicas 8 --plot bias.svg
"""

from accel_demo.anatomy.data_parallel import tables
from accel_demo.errors import one_line_errors

with one_line_errors():
    tables.main(__doc__)
