"""Show what nn.DataParallel does in one training step, phase by phase, on any machine.

Its phases are rebuilt by hand, so that several replicas also run on one CPU. `step` prints what
each replica does in a step and what its device then holds. `bias` compares the gradients if the
loss is computed inside forward or outside it, for 30 samples. `parts` compares one call for all of
VGG with one call for each of its two parts.

python -m accel_demo.anatomy.data_parallel
python -m accel_demo.anatomy.data_parallel bias --replicas 8 --plot bias.svg
"""

from accel_demo.anatomy.data_parallel import tables
from accel_demo.errors import one_line_errors

with one_line_errors():
    tables.main(__doc__)
