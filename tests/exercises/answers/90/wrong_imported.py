# wrong: it calls the function of accel_demo.anatomy.devices: write your own
from accel_demo.anatomy.devices import visible_devices  # noqa: F401
