"""A stage on disk, whichever engine trains it: spec, journal, guards, verdicts, checkpoints, the finished result."""
