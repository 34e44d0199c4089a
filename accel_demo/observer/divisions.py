"""Find out how the samples of a data loader are divided between the processes."""

from contextlib import suppress


def samplers_of(loader) -> list:
    """Return the samplers of a loader, the outermost first. The last one chooses the samples."""
    chain = [loader.batch_sampler if loader.batch_sampler is not None else loader.sampler]
    while True:
        inner = [getattr(chain[-1], name, None) for name in ("batch_sampler", "sampler")]
        inner = [each for each in inner if each is not None]
        if not inner or any(inner[0] is each for each in chain):
            return chain
        chain.append(inner[0])


def divided_by(loader) -> list[list]:
    """Return the class and the number of parts of each object that divides the samples."""
    names = ("num_replicas", "num_processes")  # of DistributedSampler, of Accelerate's shards
    objects = [*samplers_of(loader), loader.dataset]
    parts = [(each, getattr(each, name, None)) for each in objects for name in names]
    return [[type(each).__name__, part] for each, part in parts if isinstance(part, int)]


def padding_of(loader, sampler) -> dict:
    """Return how many samples are padding, and the size of a batch of one process.

    `padded` is the number of samples that all processes together read again in a pass, 0 if it is
    unknown. `share` is the size of the batch.
    """
    shard, padded, share = loader.batch_sampler, 0, loader.batch_size
    with suppress(AttributeError, TypeError):  # for example a sampler without a length
        if type(shard).__name__ == "BatchSamplerShard":  # of Accelerate
            parts, share = shard.num_processes, shard.batch_size
            together = share if shard.split_batches else share * parts
            share, is_whole = together // parts, len(sampler) == len(loader.dataset)
            if is_whole and shard.even_batches and not shard.drop_last:
                padded = -len(loader.dataset) % together
        elif hasattr(sampler, "num_replicas"):  # DistributedSampler, or one like it
            padded = 0 if sampler.drop_last else sampler.total_size - len(loader.dataset)
    return {"padded": padded, "share": share}
