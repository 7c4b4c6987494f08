"""The servers of `grpo up`, each behind the check that refuses requests from other web pages (grpo_tasks/web).

    python -m grpo_tasks.operating.guarded_servers --host 127.0.0.1 --port 4200     Prefect: like `prefect server start`
    mlflow server --app-name same-origin     MLflow: loads `mlflow_app` by its entry point (pyproject.toml)

Both servers are imported by name inside the functions, so importing this module imports neither.
"""

import argparse
import os
from importlib import import_module

from grpo_tasks.operating.form_check import FormCheck
from grpo_tasks.web.request_guard import LOOPBACK, SameOrigin, further_hosts


def mlflow_app() -> SameOrigin:
    """MLflow, behind the check."""
    _name_hosts_to_mlflow()
    return SameOrigin(import_module("mlflow.server.fastapi_app").app)


def mlflow_app_with_passwords() -> SameOrigin:
    """MLflow with users and passwords (`basic-auth`), behind the check."""
    _name_hosts_to_mlflow()
    return SameOrigin(import_module("mlflow.server.auth").create_app())


def _name_hosts_to_mlflow() -> None:
    # MLflow has its own check, which only knows the loopback names. It must accept every host that ours accepts.
    if further := further_hosts():
        names = [*LOOPBACK, *further]
        hosts = [f"{name.replace('[', '[[]')}{port}" for name in names for port in ("", ":*")]
        os.environ.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join([*names, *hosts]))
        os.environ.setdefault("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", ",".join(f"http*://{host}" for host in hosts))


def prefect_app() -> SameOrigin:
    """Prefect's API, pages and services, behind the checks."""
    from prefect.settings import get_current_settings

    secret = get_current_settings().server.api.auth_string
    password = secret.get_secret_value() if secret else None
    app = import_module("prefect.server.api.server").create_app(final=True)
    return SameOrigin(FormCheck(app, password))


def main() -> None:
    """Run the Prefect server in the foreground, with the same settings as `prefect server start`."""
    parser = argparse.ArgumentParser(prog="grpo_tasks.operating.guarded_servers", description=main.__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    at = parser.parse_args()
    # The web page calls the address in these settings.
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
