"""The servers of `grpo up` with the guard against other web pages in front of them.

    python -m grpo_tasks.operating.guarded_servers --host 127.0.0.1 --port 4200     Prefect: what `prefect server start` runs
    mlflow server --app-name same-origin     MLflow: loads `mlflow_app`, an entry point of ours (pyproject.toml)

Both servers are named by their import path: this package starts them and imports neither.
"""

import argparse
import os
from importlib import import_module

from grpo_tasks.web.same_origin import LOOPBACK, SameOrigin, further_hosts


def mlflow_app() -> SameOrigin:
    """MLflow's application, guarded."""
    _name_hosts_to_mlflow()
    return SameOrigin(import_module("mlflow.server.fastapi_app").app)


def mlflow_app_with_passwords() -> SameOrigin:
    """MLflow's application with users and passwords (`basic-auth`), guarded."""
    _name_hosts_to_mlflow()
    return SameOrigin(import_module("mlflow.server.auth").create_app())


def _name_hosts_to_mlflow() -> None:
    # MLflow has a check of its own, which knows the loopback names only. Ours has refused everything else before.
    if further := further_hosts():
        names = [*LOOPBACK, *further]
        hosts = [f"{name.replace('[', '[[]')}{port}" for name in names for port in ("", ":*")]
        os.environ.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join([*names, *hosts]))
        os.environ.setdefault("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", ",".join(f"http*://{host}" for host in hosts))


def prefect_app() -> SameOrigin:
    """Prefect's API, pages and services, guarded."""
    return SameOrigin(import_module("prefect.server.api.server").create_app(final=True))


def main() -> None:
    """Run the Prefect server in the foreground, with the same settings as `prefect server start`."""
    parser = argparse.ArgumentParser(prog="grpo_tasks.operating.guarded_servers", description=main.__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    at = parser.parse_args()
    # The page calls the address of this setting.
    os.environ.setdefault("PREFECT_SERVER_API_HOST", at.host)
    os.environ.setdefault("PREFECT_SERVER_API_PORT", str(at.port))
    import uvicorn
    from prefect.settings import get_current_settings

    server = get_current_settings().server
    uvicorn.run(
        prefect_app(),
        host=at.host,
        port=at.port,
        timeout_keep_alive=server.api.keepalive_timeout,
        ws_ping_interval=server.api.websocket_ping_interval,
        ws_ping_timeout=server.api.websocket_ping_timeout,
        log_level=server.logging_level.lower(),
    )


if __name__ == "__main__":
    main()
