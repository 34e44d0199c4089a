"""Exercise 44: choose the processes for six actions on two nodes.

`run` below is the skeleton of a training program, and every process calls it. As it is, it's only
right for a single process. Make it right for several processes on several nodes. Each node has
its own disk, and all nodes share one folder, as with NFS. A file that one node writes to this
folder is visible to the others at once. (On a real network, this may take up to a minute.)

    state       a `PartialState`, with the ranks of this process; an `Accelerator` has the same
                attributes and methods
    actions     an object with six methods:

1.  open_run()              returns the folder of this run, which is in the shared folder. If it
                            finds none, it creates one, with the time in its name.
2.  download()              downloads the data to this node's disk, even if they are already there.
3.  prepare()               returns the samples. If this node's disk has a complete cache of them,
                            it reads the cache. If not, it builds the cache from the data on this
                            node's disk, which takes a long time.
4.  evaluate(samples)       evaluates this process's share of the samples, and returns the number of
                            correct predictions of all processes, which it adds up with an
                            all-reduce. Then it writes this process's mistakes to this node's disk.
5.  save(folder, correct)   writes a checkpoint to the folder of the run. The checkpoint is a single
                            file, written by one process. (Accelerate's `save_state` is different:
                            every process calls it.)
6.  clean_up()              copies the mistakes from this node's disk to the shared folder, and
                            deletes everything on the disk.

Graded:

1. In every process, `run` returns the folder of the run and the number of correct predictions. When
   it returns, the checkpoint is complete.
2. Nothing is done twice: there is one run folder and one checkpoint, and for each disk one
   download, one cache and one clean-up.
3. No process uses data that another is still writing, or deletes data that another still needs.

The check runs your file in four connected processes on two simulated nodes: first with two
processes on each, then with three on one node and one on the other. It looks at what they do to the
folders, how often and in which order, not at your code. Every action may take any length of time.

accel-demo check 44
"""

from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    folder = actions.open_run()
    actions.download()
    samples = actions.prepare()
    correct = actions.evaluate(samples)
    actions.save(folder, correct)
    actions.clean_up()
    return folder, correct
