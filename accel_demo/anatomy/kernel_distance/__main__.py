"""python -m accel_demo.anatomy.kernel_distance"""

from accel_demo.anatomy.kernel_distance.costs import main

main()
