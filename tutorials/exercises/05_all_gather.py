"""Exercise 05: the second phase of the chunked ring.

The first phase, `reduce_scatter_ring` of accel_demo/anatomy/ring.py, is over. Each rank has cut
its tensor into one chunk for each rank. Rank r has the whole sum of chunk r, and parts of the sum
in its other chunks. Let every rank have the whole sum of every chunk, in place.

Each rank may send to the rank on its right alone, and receive from the one on its left. It may send
no more bytes than there are in N − 1 chunks, where N is the number of ranks.

`wire.exchange(outgoing, right, incoming, left)` sends one tensor and receives another at the same
time. `wire.rank` and `wire.world_size` say who you are. In step 1 only one of your chunks is whole.
Which one is it in step 2? `wire.send(tensor, target)` and `wire.receive(tensor, source)` exist too:
what happens where every rank first sends?

accel-demo check 05
"""


def all_gather(chunks, wire):
    """`chunks` are 1-d tensors, one for each rank, not all of the same length."""
    raise NotImplementedError
