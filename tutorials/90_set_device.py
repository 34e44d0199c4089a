"""Print what `torch.cuda.set_device` does on a machine without a GPU.

python tutorials/90_set_device.py
"""

import torch


def main() -> None:
    for device in (1, -1):
        print(f"set_device({device}): {result_of_set_device(device)}")


def result_of_set_device(device: int) -> str:
    """Return the type and the first sentence of the error, or "no error"."""
    try:
        torch.cuda.set_device(device)
    # A build of torch without CUDA raises AttributeError.
    except (RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).split('. ')[0]}"
    return "no error"


if __name__ == "__main__":
    main()
