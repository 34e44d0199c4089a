"""python -m accel_demo.anatomy.model_parallel"""

from accel_demo.anatomy.model_parallel import splits, tables
from accel_demo.errors import one_line_errors

with one_line_errors():
    tables.main(splits.__doc__)
