causes = "fast_schedule padding_counted not_averaged same_random all_samples".split()
DIAGNOSES = dict(zip("abcde", causes, strict=True))
