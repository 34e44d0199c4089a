"""Exercise 51: diagnose five runs.

The folder 51_cases has two logs and three scripts with their output. All are from two processes,
and in each of them exactly one thing is wrong:

a.txt    the log of a training with Accelerate
b.txt    the log of another one, which is tested after each epoch
c.py     a script with DDP; both ranks test their model on the same images
d.py     a script with Accelerate, in which the images are shifted at random
e.py     a script with DDP and a learning rate schedule

A line of the logs that says `loss` has the mean over both ranks. Choose the cause of each case:

alone             each process trains alone, because the processes aren't connected
larger_batch      the global batch has grown with the number of processes, so there are fewer steps
all_samples       each rank reads all samples of an epoch, not its own part of them
same_order        each epoch reads the samples in the same order
different_start   the ranks start with different weights
not_averaged      the gradients aren't averaged over the ranks
same_random       the ranks draw the same random numbers where they should differ
fast_schedule     the learning rate schedule advances once per process in each step
scaled_twice      the loss is divided twice, by hand and by the library
padding_counted   the metric counts the samples that fill up the last batch
one_rank_metric   the metric is that of one rank's part of the samples
mean_of_means     the metric is a mean of the means of unequal parts

Go through the checklist of page 51 from the top, and ask at each check if the log or the script
tells you that it passes. You may run the scripts, and paste checks into a copy.

accel-demo check 51
"""

DIAGNOSES = {"a": "", "b": "", "c": "", "d": "", "e": ""}
