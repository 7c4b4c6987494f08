"""What MLflow's own pages show of a run: its name and description, checkpoints as models, data sets, prompts, traces."""
