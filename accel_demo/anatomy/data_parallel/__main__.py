"""python -m accel_demo.anatomy.data_parallel"""

from accel_demo.anatomy.data_parallel import phases, tables
from accel_demo.errors import one_line_errors

with one_line_errors():
    tables.main(phases.__doc__)
