"""Split one small model in five ways, train for one step, and compare what each rank stores.

DDP splits only the batch. Layers on several devices, a pipeline, tensor parallelism and FSDP2 split
the model. All methods should give the same result as the unsplit model. The last table shows when
each rank of the pipeline works and when it waits.

python -m accel_demo.anatomy.model_parallel
python -m accel_demo.anatomy.model_parallel --processes 4 --microbatches 8 --plot split.svg
"""

from accel_demo.anatomy.model_parallel import tables
from accel_demo.errors import one_line_errors

with one_line_errors():
    tables.main(__doc__)
