"""Registers a receiver with MLflow's server: python register.py MLFLOW_URL RECEIVER_URL."""

import os
import sys

from mlflow import MlflowClient

client = MlflowClient(sys.argv[1], sys.argv[1])
# The event of a moved alias: by a run, an approval, `grpo promote`, `grpo rollback` or a person on MLflow's pages.
events = ["model_version_alias.created"]
hook = client.create_webhook("champion", sys.argv[2], events, secret=os.environ["WEBHOOK_SECRET"])
print(f"registered {hook.url} as {hook.webhook_id}")
