"""Observe a training script from inside its processes, without changing its results.

`accel-demo audit` and `accel-demo nodes` put the folder `inject` on PYTHONPATH, so that each Python
process that the script starts loads this package. The script's own environment may have neither
accel_demo nor its dependencies: this package imports only the standard library, and torch after the
script has.
"""
