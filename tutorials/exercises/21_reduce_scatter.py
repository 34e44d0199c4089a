"""Exercise 21: write the first half of the chunked ring, the reduce-scatter.

Every rank calls `reduce_scatter(chunks, wire)`. Its own values are in the list `chunks`, which
contains one 1-d float64 tensor per rank. Each chunk has the same length on every rank, but
different chunks may have different lengths, and a chunk may be empty.

When the function returns, `chunks[r]` on rank r must contain the sum of chunk r over all ranks:
rank 0 has the sum of chunk 0, rank 1 the sum of chunk 1, and so on. The other chunks of rank r may
contain anything. The tensors in the list are views of one tensor, so change them in place. Return
nothing.

Each rank may send only to its right neighbour, and the last rank's right neighbour is rank 0. With
N ranks, each rank may send N − 1 chunks: rank r sends at most as many bytes as all chunks except
chunk r contain.

Send everything with `wire`. `wire.rank` is this rank, `wire.world_size` is N, and there are three
methods. Each overwrites the tensor that receives, which must be as long as the tensor that is sent.

- `wire.exchange(outgoing, target, incoming, source)` sends the tensor `outgoing` to rank `target`,
  and at the same time receives the tensor `incoming` from rank `source`.
- `wire.send(tensor, target)` waits until rank `target` receives.
- `wire.receive(tensor, source)` waits until rank `source` sends.

The check calls the function on 2, 3 and 4 ranks. It compares the sums, and counts the bytes that
each rank sends.

accel-demo check 21
"""


def reduce_scatter(chunks, wire):
    raise NotImplementedError
