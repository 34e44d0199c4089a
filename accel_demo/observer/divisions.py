"""Find out how the samples of a data loader are divided between the processes."""

from contextlib import suppress

SHARDS = ("BatchSamplerShard", "IterableDatasetShard")  # of Accelerate


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
    """Return what divides the samples: each one's class, number of parts, and the part it reads."""
    samplers = samplers_of(loader)
    divided = [
        [type(each).__name__, each.num_replicas, getattr(each, "rank", None)]  # DistributedSampler
        for each in samplers
        if isinstance(getattr(each, "num_replicas", None), int)
    ]
    return divided + [
        [type(each).__name__, each.num_processes, getattr(each, "process_index", None)]
        for each in (*samplers, loader.dataset)
        if type(each).__name__ in SHARDS
    ]


def padding_of(loader, sampler) -> dict:
    """Return how many samples are padding, and the size of a batch of one process.

    `padded` is the number of samples that all processes together read again in a pass, None if it
    is unknown. `share` is the size of the batch.
    """
    shard, padded, share = loader.batch_sampler, None, loader.batch_size
    with suppress(AttributeError, TypeError):  # for example a sampler without a length
        if type(shard).__name__ == "BatchSamplerShard":  # of Accelerate
            parts, share = shard.num_processes, shard.batch_size
            together = share if shard.split_batches else share * parts
            share, is_whole = together // parts, len(sampler) == len(loader.dataset)
            if not shard.even_batches or shard.drop_last:
                padded = 0
            elif is_whole:
                padded = -len(loader.dataset) % together
        elif hasattr(sampler, "num_replicas"):  # DistributedSampler, or one like it
            padded = 0 if sampler.drop_last else sampler.total_size - len(loader.dataset)
    return {"padded": padded, "share": share}
