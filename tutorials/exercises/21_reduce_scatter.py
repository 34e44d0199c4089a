"""Exercise 21: write the first half of the chunked ring, the reduce-scatter.

Every rank calls `reduce_scatter(chunks, wire)` with its own values in `chunks`, a list of one 1-d
float64 tensor per rank. A chunk has the same length on every rank, but different chunks may have
different lengths, and a chunk may be empty.

When the function returns, `chunks[r]` on rank r must contain the sum of chunk r over all ranks:
rank 0 has the sum of chunk 0, rank 1 the sum of chunk 1, and so on. The other chunks of rank r may
contain anything. The tensors in the list are views of one tensor, so change them in place. Return
nothing.

Each rank may send only to its right neighbor, and the last rank's right neighbor is rank 0. With
N ranks, each rank may send N − 1 chunks: rank r sends at most as many bytes as there are in all
chunks except chunk r.

Send everything with `wire`. `wire.rank` is this rank, `wire.world_size` is N, and there are three
methods. When a method receives, it overwrites the tensor it receives into, which must be as long as
the tensor that is sent.

- `wire.exchange(outgoing, target, incoming, source)` sends the tensor `outgoing` to rank `target`
  and, at the same time, receives the tensor `incoming` from rank `source`.
- `wire.send(tensor, target)` waits until rank `target` receives.
- `wire.receive(tensor, source)` waits until rank `source` sends.

The check calls your function on 2, 3 and 4 ranks, compares the sums and counts the bytes that each
rank sends.

accel-demo check 21
"""


def reduce_scatter(chunks, wire):
    raise NotImplementedError
