"""Prefect flows and the command line: the order of the pipeline, and nothing else of weight."""
