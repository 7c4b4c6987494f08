"""`python -m grpo_tasks.operating.pool_secrets`: passwords from the environment into Secret blocks of the Prefect server.

A docker work pool starts a container for each run. The containers get no environment from the worker, so the template of the pool
(deploy/work_pools/docker.json) names Secret blocks, which the server stores encrypted. Repeating the command updates them.
"""

import os

from schemas.errors import UserError

VARIABLES = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "VLLM_API_KEY")
"""Environment variables that a run in a container needs."""


def block_name(variable: str) -> str:
    """Name of the Secret block that holds a variable."""
    return f"grpo-{variable.lower().replace('_', '-')}"


def save_secrets() -> list[str]:
    """Save each variable as a Secret block; returns the names of the blocks. `UserError` for one that is not set."""
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        raise UserError(
            f"not set: {', '.join(missing)}", place="environment", fix="export them; compose reads them from deploy/.env"
        )
    from prefect.blocks.system import Secret

    for variable in VARIABLES:
        Secret(value=os.environ[variable]).save(block_name(variable), overwrite=True)
    return [block_name(variable) for variable in VARIABLES]


if __name__ == "__main__":
    try:
        print("saved:", ", ".join(save_secrets()))
    except UserError as refused:
        raise SystemExit(str(refused)) from None
