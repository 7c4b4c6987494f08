"""A stage on disk, whichever engine trains it: spec, journal, guards, verdicts, checkpoints, the finished result.

Nothing here knows how a loss is computed; nothing imports Prefect or MLflow.
"""
