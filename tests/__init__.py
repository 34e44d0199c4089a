import sys
from pathlib import Path

# Tests and graders import the modules of this folder, such as `grading`, by their plain names.
sys.path.append(str(Path(__file__).parents[1] / "tutorials" / "exercises" / "graders"))
