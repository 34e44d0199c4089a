"""The course: its original files, the folder that a learner works in, and its exercises."""
