"""The only room that imports mlflow: runs and their records, the shipping of journals, plots, the model registry."""
