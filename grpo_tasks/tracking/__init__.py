"""The only room that says mlflow: runs, shipping the journal, plots, models."""
