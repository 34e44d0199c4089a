"""Calculate whether the all-reduces of DDP fit under backward, for five kinds of connections.

python tutorials/41_will_it_hide.py
"""

import torch
from alpha_beta import NCCL_LINKS
from torch.distributed import _compute_bucket_assignment_by_size

from accel_demo.show import table

# For your own training, change these five values, and SHAPES below.
TOKENS = 16 * 1024  # per GPU and step
PEAK = 989e12  # floating-point operations per second of an H100 in bf16, from its data sheet
MFU = 0.4  # share of the peak that the training reaches; an assumption
LIMITS = [2**20, 25 * 2**20]  # DDP's limits in bytes for the first bucket and for the others
GPUS = 8

# The parameters of GPT-2 with 12 layers and width W. The output layer shares the token embedding.
W = 768
BLOCK = [(W,), (W,), (W, 3 * W), (3 * W,), (W, W), (W,)]  # attention, with its LayerNorm
BLOCK += [(W,), (W,), (W, 4 * W), (4 * W,), (4 * W, W), (W,)]  # MLP, with its LayerNorm
SHAPES = [(50257, W), (1024, W), *(12 * BLOCK), (W,), (W,)]

gradients = [torch.empty(shape, device="meta") for shape in reversed(SHAPES)]  # last layer first
indices, _ = _compute_bucket_assignment_by_size(gradients, LIMITS)
buckets = [sum(gradients[index].nbytes for index in bucket) for bucket in indices]
# Training needs 6 operations per parameter and token: 2 in forward and 4 in backward.
# Source: Kaplan et al., https://arxiv.org/abs/2001.08361, section 2.1
backward = 4 * (sum(buckets) / 4) * TOKENS / (MFU * PEAK)
print(f"Backward takes {1e3 * backward:.0f} ms on each GPU.")
print(f"DDP sends {sum(buckets) / 1e6:.0f} MB of gradients in {len(buckets)} buckets.")
print(f"The last bucket has {buckets[-1] / 1e6:.0f} MB.\n")

rows = []
links = {name: link for name, link in NCCL_LINKS.items() if "A100" not in name}
for name, link in links.items():
    times = [link.ring_all_reduce(size, GPUS) for size in buckets]
    exposed = max(times[-1], sum(times) - backward)  # the last bucket is always exposed
    rows.append([name, f"{1e3 * sum(times):.1f} ms", f"{1e3 * exposed:.1f} ms"])
print(table(["connection", "all-reduces", "exposed, at least"], rows))
