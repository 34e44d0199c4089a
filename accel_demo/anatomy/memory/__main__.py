"""python -m accel_demo.anatomy.memory"""

from accel_demo.anatomy.memory import count, table
from accel_demo.errors import one_line_errors

with one_line_errors():
    table.main(count.__doc__)
