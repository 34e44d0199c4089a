"""python -m accel_demo.anatomy.devices"""

from accel_demo.anatomy.devices.table import main
from accel_demo.errors import one_line_errors

with one_line_errors():
    main()
