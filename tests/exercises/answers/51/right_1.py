DIAGNOSES = {}
DIAGNOSES["a"] = "fast_schedule"
DIAGNOSES["c"] = "not_averaged"
DIAGNOSES["e"] = "all_samples"
DIAGNOSES["b"] = "padding_counted"
DIAGNOSES["d"] = "same_random"
