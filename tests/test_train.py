"""The four tellings train to the same weights."""

import torch
from safetensors.torch import load_file

STEPS = "--max-steps 24 --accumulate 2 --batch-size 32 --train-samples 1050 --test-samples 300"
STEPS = (STEPS + " --label-smoothing 0.1 --clip-norm 0.5 --dropout 0.2 --augment").split()


def weights(run_dir) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model.safetensors")


def test_four_tellings_give_the_same_bits_at_one_process(train):
    files = ("train.py", "train_plain.py", "train_dp.py", "train_ddp.py")
    first, *others = (weights(train(file, *STEPS)) for file in files)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_accelerate_and_raw_ddp_give_the_same_bits_at_two_processes(train):
    accelerate = weights(train("train.py", *STEPS, processes=2))
    raw = weights(train("train_ddp.py", *STEPS, processes=2))
    assert accelerate.keys() == raw.keys()
    assert all(torch.equal(accelerate[name], raw[name]) for name in raw)
