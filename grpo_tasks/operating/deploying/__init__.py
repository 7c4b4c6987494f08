"""Bringing the work pool and the deployments of a file to a Prefect server."""
