"""Print the error of a function that has no parameter for the rank.

python tutorials/25_spawn_without_rank.py
"""

import torch.multiprocessing as mp


def main(epochs, batch_size):
    print(f"{epochs} epochs, {batch_size} images per process")


if __name__ == "__main__":
    try:
        mp.spawn(main, args=(2, 64), nprocs=2)
    except mp.ProcessRaisedException as error:
        print(str(error).rstrip().rpartition("\n")[2])
