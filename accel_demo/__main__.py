"""Run `python -m accel_demo COMMAND`, which does the same as `accel-demo COMMAND`."""

from accel_demo.cli import main

if __name__ == "__main__":
    main()
