"""Test the datasets, the content of a batch, and the speed of loading."""

import gzip
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_demo import data
from accel_demo.batches import BatchShardSampler, loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import ImageSet, load_datasets, read_idx
from accel_demo.errors import UserError
from tests.conftest import run_ranks

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CPU = torch.device("cpu")


def make_loader(images, batch_size=64, **config):
    return DataLoader(images, batch_size, **loader_options(TrainConfig(**config), CPU))


@pytest.fixture(scope="module")
def packaged():
    return load_datasets(TrainConfig())


def test_packaged_images_are_class_balanced(packaged):
    train_set, test_set = packaged
    assert train_set.labels.bincount().tolist() == [1200] * 10
    assert test_set.labels.bincount().tolist() == [200] * 10


def test_the_normalization_statistics_match_the_packaged_images(packaged):
    pixels = packaged[0].pixels / 255
    _, (mean,), (std,) = data.STATISTICS["fashion-mnist-small"]
    assert pixels.mean().item() == pytest.approx(mean, abs=2e-3)
    assert pixels.std().item() == pytest.approx(std, abs=2e-3)


def test_a_batch_is_float32_images_and_int64_labels(packaged):
    images, labels = next(iter(make_loader(packaged[0])))
    assert (images.shape, images.dtype) == ((64, 1, 28, 28), torch.float32)
    assert (labels.shape, labels.dtype) == ((64,), torch.int64)
    first, label = packaged[0][0]
    assert torch.equal(first, images[0]) and label == labels[0]


@pytest.mark.parametrize("channels", [1, 3])
def test_normalizing_a_batch_equals_torchvisions_normalize(channels):
    from torchvision.transforms import functional

    pixels = torch.randint(0, 256, (8, channels, 32, 32), dtype=torch.uint8)
    mean, std = [0.1, 0.2, 0.3][:channels], [0.5, 0.6, 0.7][:channels]
    images, _ = ImageSet(pixels, torch.zeros(8).long(), [], mean, std).__getitems__(range(8))
    torch.testing.assert_close(images, functional.normalize(pixels / 255, mean, std))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_augmentation_shifts_and_mirrors_without_changing_pixels():
    pixels = torch.zeros(64, 1, 28, 28, dtype=torch.uint8)
    pixels[:, :, 10, 6] = 255  # one bright pixel, away from the edges and the center
    image_set = ImageSet(pixels, torch.zeros(64).long(), [], [0.0], [1.0], augment=True)
    images, _ = image_set.__getitems__(range(64))
    assert torch.equal(images.sum(dim=(1, 2, 3)), torch.ones(64))
    rows, columns = images.squeeze(1).nonzero()[:, 1:].unbind(1)
    assert set(rows.tolist()) == {8, 9, 10, 11, 12}
    assert set(columns.tolist()) == {4, 5, 6, 7, 8} | {19, 20, 21, 22, 23}


def test_augmentation_depends_on_the_epoch_and_not_on_the_batch(packaged):
    plain, _ = packaged
    images = plain.pixels.permute(0, 3, 1, 2)
    train_set = ImageSet(images, plain.labels, [], [0.3], [0.4], augment=True, seed=5)
    first, _ = train_set.__getitems__([3, 1, 4])
    assert torch.equal(first[2], train_set[4][0])
    train_set.set_epoch(1)
    assert not torch.equal(first, train_set.__getitems__([3, 1, 4])[0])
    train_set.set_epoch(0)
    assert torch.equal(first, train_set.__getitems__([3, 1, 4])[0])


def test_loader_workers_return_the_same_batches(packaged):
    alone, helped = make_loader(packaged[1], 500), make_loader(packaged[1], 500, num_workers=2)
    helped.multiprocessing_context = "forkserver"  # a fork of a threaded process might hang
    for (images, labels), (same_images, same_labels) in zip(alone, helped, strict=True):
        assert torch.equal(images, same_images) and torch.equal(labels, same_labels)


class Parents(Dataset):
    """A dataset with one sample: the id of the process that started the loader worker."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return os.getppid()


@pytest.mark.skipif(sys.version_info >= (3, 11, 10), reason="this Python can fork safely")
def test_no_worker_is_forked_from_a_process_with_gloo_threads():
    config = TrainConfig(num_workers=1)
    assert "multiprocessing_context" not in loader_options(config, CPU)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = {**loader_options(config, CPU), "collate_fn": None}
        (parent,) = DataLoader(Parents(), **options)
        assert int(parent) != os.getpid()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("file", ["train", pytest.param("train_ddp", marks=pytest.mark.slow)])
def test_loader_workers_draw_different_random_numbers_on_each_rank_and_in_each_epoch(
    file, tmp_path
):
    """With the same seed on every rank, random augmentation in the workers would repeat itself."""
    flags = "--dataset synthetic --train-samples 32 --test-samples 8 --batch-size 4 --epochs 2"
    flags = [*flags.split(), "--augment", "--num-workers", 1, "--run-dir", tmp_path / "run"]
    folder = tmp_path / "seeds"
    folder.mkdir()
    program = ["tests/core/recorded_seeds.py", file, *flags]
    result = run_ranks(program, processes=2, RECORDED_SEEDS=str(folder))
    assert result.returncode == 0, result.stderr
    assert "2 processes on cpu" in result.stdout
    workers = [path.name.split() for path in folder.iterdir()]
    assert Counter((rank, split) for rank, split, _ in workers) == {
        (rank, split): 2 for rank in "01" for split in ("train", "test")
    }  # one worker in each of two epochs
    assert len({seed for *_, seed in workers}) == len(workers)


def test_our_shards_equal_accelerates_shards():
    from accelerate.data_loader import prepare_data_loader

    images = ImageSet(torch.zeros(107, 1, 2, 2), torch.arange(107), [], [0.0], [1.0])
    loader = DataLoader(images, 5, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    for rank in range(3):
        options = {"use_seedable_sampler": True, "data_seed": 7}
        accelerate_loader = prepare_data_loader(
            loader, num_processes=3, process_index=rank, **options
        )
        sampler = BatchShardSampler(images, 5, num_replicas=3, rank=rank, seed=7)
        own_loader = DataLoader(images, 5, sampler=sampler, collate_fn=lambda batch: batch)
        for epoch in (0, 4):
            accelerate_loader.set_epoch(epoch)
            sampler.set_epoch(epoch)
            ids = [labels.tolist() for _, labels in own_loader]
            assert len(ids) == 7
            assert ids == [labels.tolist() for _, labels in accelerate_loader]


def test_batches_load_fifty_times_faster_than_with_torchvision(packaged, tmp_path):
    from torchvision import datasets, transforms

    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in data.ASSETS.glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    steps = [transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))]
    torchvision_set = datasets.FashionMNIST(
        tmp_path, train=False, transform=transforms.Compose(steps)
    )

    def images_per_second(dataset, **options) -> float:
        loader = DataLoader(dataset, 256, **options)
        started_at = time.perf_counter()
        count = sum(len(labels) for _, labels in loader)
        return count / (time.perf_counter() - started_at)

    options = loader_options(TrainConfig(), CPU)
    ratios = []
    for _ in range(5):  # alternate, so that background load affects both loaders
        own_speed = images_per_second(packaged[0], **options)
        ratios.append(own_speed / images_per_second(torchvision_set))
    assert sorted(ratios)[2] >= 50, ratios


def test_any_number_of_synthetic_images_can_be_generated():
    train_set, test_set = load_datasets(TrainConfig(dataset="synthetic", train_samples=5000))
    assert (len(train_set), len(test_set)) == (5000, 512)
    assert train_set[0][0].shape == (1, 28, 28)


def test_idx_files_are_read_compressed_and_uncompressed(tmp_path):
    packed = data.ASSETS / "t10k-labels-idx1-ubyte.gz"
    (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    assert torch.equal(read_idx(tmp_path, packed.stem), read_idx(data.ASSETS, packed.stem))


ALTERED = {
    "missing": None,
    "truncated": lambda content: content[:-100],
    "altered": lambda content: gzip.compress(gzip.decompress(content)[:-1] + b"\7"),
    "not gzip": lambda content: b"no gzip file",
    "not idx": lambda content: gzip.compress(b"no idx file"),
}


@pytest.mark.parametrize("altered", ALTERED.values(), ids=ALTERED)
def test_the_error_names_a_damaged_packaged_file(altered, tmp_path, monkeypatch):
    assets = shutil.copytree(data.ASSETS, tmp_path / "assets")
    monkeypatch.setattr(data, "ASSETS", assets)
    path = assets / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(altered(path.read_bytes())) if altered else path.unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte"):
        load_datasets(TrainConfig())


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\1", b"\0\0\x08\1\0\0\0\5ab", b"\0\0\x09\0a"])
def test_the_error_names_a_broken_uncompressed_file(content, tmp_path):
    (tmp_path / "labels").write_bytes(content)
    with pytest.raises(UserError, match="labels is truncated, or not a uint8 idx file"):
        read_idx(tmp_path, "labels")


def test_an_altered_file_of_the_full_set_is_refused(tmp_path):
    for path in data.ASSETS.glob("*.gz"):  # copy the packaged subset instead of the full set
        shutil.copy(path, tmp_path)
    with pytest.raises(UserError, match="not the original file"):
        load_datasets(TrainConfig(dataset="fashion-mnist", data_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist", "cifar10"])
def test_a_failed_download_is_reported_in_one_sentence(name, tmp_path, monkeypatch):
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # no proxy listens there
    config = TrainConfig(dataset=name, data_dir=str(tmp_path))
    data.download(config)
    with pytest.raises(UserError, match="could not be downloaded"):
        load_datasets(config)


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist", "cifar10"])
def test_full_datasets_are_read_from_torchvisions_folders(name, tmp_path, monkeypatch):
    """Write a small dataset in torchvision's layout, and patch the expected checksums to match."""
    config = TrainConfig(dataset=name, data_dir=str(tmp_path))
    if name == "cifar10":
        write_cifar10(tmp_path, monkeypatch)
    else:
        raw = tmp_path / data.TORCHVISION_NAMES[name] / "raw"
        raw.mkdir(parents=True)
        monkeypatch.setattr(data, "FASHION_MNIST_SUMS", data.PACKAGED_SUMS)
        for path in data.ASSETS.glob("*.gz"):
            (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    data.download(config)  # downloads nothing, because every file exists
    train_set, test_set = load_datasets(config)
    shape = (3, 32, 32) if name == "cifar10" else (1, 28, 28)
    assert train_set[0][0].shape == test_set[0][0].shape == shape
    assert len(train_set.class_names) == 10
    assert len(train_set) == (50 if name == "cifar10" else 12000)


def write_cifar10(folder: Path, monkeypatch) -> None:
    import hashlib
    import pickle

    from torchvision.datasets import CIFAR10

    base = folder / CIFAR10.base_folder
    base.mkdir()

    def write(name: str, content: dict) -> list[str]:
        (base / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((base / name).read_bytes()).hexdigest()]

    batch = {"data": torch.zeros(10, 3072, dtype=torch.uint8).numpy(), "labels": [*range(10)]}
    train_list = [write(name, batch) for name, _ in CIFAR10.train_list]
    monkeypatch.setattr(CIFAR10, "train_list", train_list)
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", batch)])
    _, md5 = write("batches.meta", {"label_names": data.CIFAR_CLASSES})
    meta = {"filename": "batches.meta", "key": "label_names", "md5": md5}
    monkeypatch.setattr(CIFAR10, "meta", meta)


@pytest.mark.system
@pytest.mark.skipif(not DEBIAN.exists(), reason="needs the Debian package dataset-fashion-mnist")
def test_cutting_the_subset_again_reproduces_the_packaged_files(tmp_path):
    train_set, _ = load_datasets(TrainConfig(dataset="fashion-mnist", data_dir=str(DEBIAN)))
    assert len(train_set) == 60_000
    from accel_demo.assets.cut_subset import cut

    cut(DEBIAN, tmp_path)
    for path in data.ASSETS.glob("*-ubyte.gz"):
        content = gzip.decompress(path.read_bytes())
        assert gzip.decompress((tmp_path / path.name).read_bytes()) == content
