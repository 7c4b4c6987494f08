"""The steps of the pipeline, a file each; flows/pipeline.py has their order."""
