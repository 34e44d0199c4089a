import sys
from pathlib import Path

TUTORIALS = Path(__file__).parents[1] / "tutorials"
# Tests, graders and the programs of pages import the modules of these folders by their plain names.
sys.path += [str(TUTORIALS), str(TUTORIALS / "exercises" / "graders")]
