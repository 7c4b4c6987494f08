"""A stage on disk, whichever engine trains it: what to do, the journal, guards, checkpoints, the finished result.

Nothing here knows how a loss is computed, Prefect, or MLflow.
"""
