"""Print the largest difference between the weights in two files.

python tutorials/12_distance.py runs/page_12/plain/best.pt runs/page_12/ddp/best.pt
"""

import sys

import torch

one, other = (torch.load(file, map_location="cpu", weights_only=True) for file in sys.argv[1:])
assert one.keys() == other.keys(), one.keys() ^ other.keys()
differences = [(one[name].double() - other[name].double()).abs().max() for name in one]
print(torch.stack(differences).max().item())
