"""The pipeline's steps as plain functions, for notebooks and scripts: no Prefect, no MLflow. Start with steps.py."""
