"""Add up the signed differences between kernels: python tutorials/93_signed.py"""

import torch

kernels = torch.tensor([[0.1], [0.3], [0.7]], requires_grad=True)
distance = 0
for a in kernels:
    for b in kernels:
        distance = distance + (a - b).sum()
distance.backward()
print(f"distance: {distance.item():.0e}, gradient: {kernels.grad.flatten().tolist()}")
