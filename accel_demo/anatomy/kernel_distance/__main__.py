"""Compare the time and memory of eight methods for the distance between all kernels of a layer.

The distance of n kernels is the sum of ‖wᵢ − wⱼ‖ over all i and j. ‖·‖ is the sum of the absolute
differences (p=1) or the Euclidean length (p=2). Some methods keep all differences for backward;
others recompute the differences, split them among processes or devices, or avoid them.

python -m accel_demo.anatomy.kernel_distance
python -m accel_demo.anatomy.kernel_distance --layers 60x16 --processes 3 --plot costs.svg
"""

from accel_demo.anatomy.kernel_distance.costs import main

main(__doc__)
