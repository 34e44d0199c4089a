"""The schedule of case a ends in the middle of the training, after 32 of 64 steps. In case b, 761
and 247 images are 1,008, but there are 1,000. Case c trains with `self.net`, so DDP doesn't see the
forward pass. In case d, `set_seed(0)` sets the same seed on both ranks, so they draw the same
shifts. The loader of case e doesn't use the sampler, so an epoch has 32 steps instead of 16.
"""

DIAGNOSES = {
    "a": "fast_schedule",
    "b": "padding_counted",
    "c": "not_averaged",
    "d": "same_random",
    "e": "all_samples",
}
