"""Sweeps: many runs of the pipeline with different settings, below one run in MLflow."""
