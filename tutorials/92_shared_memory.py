"""Change values that two tensors, or a tensor and an array, share.

python tutorials/92_shared_memory.py
"""

import torch
from torch import nn


def main() -> None:
    x = torch.zeros(2, requires_grad=True)
    y = x.exp()  # the gradient of y.sum() is y itself: 1, 1
    y.data.zero_()
    y.sum().backward()
    print(f"After y.data.zero_(), the gradient is {x.grad.tolist()}")

    y = x.exp()
    y.detach().zero_()
    try:
        y.sum().backward()
    except RuntimeError as error:
        print(f"After y.detach().zero_(): {str(error).split(':')[0]}")

    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    saved = weight.detach().cpu().numpy()
    copied = saved.copy()
    weight.sum().backward()
    optimizer.step()
    print(f"After optimizer.step(), saved is {saved.tolist()} and copied is {copied.tolist()}")


if __name__ == "__main__":
    main()
