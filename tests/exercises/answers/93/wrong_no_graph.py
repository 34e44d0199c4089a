# wrong: its gradient is missing
import torch.distributed as dist


def total_distance(rows):
    everything = rows.new_empty(len(rows) * dist.get_world_size(), rows.shape[1])
    dist.all_gather_into_tensor(everything, rows.detach())
    everything.requires_grad_()
    return (everything[:, None] - everything).abs().sum()
