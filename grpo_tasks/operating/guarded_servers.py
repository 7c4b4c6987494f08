"""The servers of `grpo up`, each behind the check that refuses requests from other web pages (kit/request_guard.py).

    python -m grpo_tasks.operating.guarded_servers --host 127.0.0.1 --port 4200     Prefect: like `prefect server start`
    mlflow server --app-name same-origin     MLflow: loads `mlflow_app` by its entry point (pyproject.toml)

In front of Prefect, the parameters of a run are checked completely before the run exists, and every bad field is refused at once
(409). Prefect itself compares them with the JSON schema of a flow and names the first field that does not fit. It cannot know
rules over several fields, or what an override does; a run would start and then fail. Data and models are not looked at.
"""

import argparse
import asyncio
import json
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from grpo_tasks.kit.request_guard import LOOPBACK, App, Message, Receive, SameOrigin, Send, further_hosts, has_password
from grpo_tasks.operating.commands import WORKDIR
from schemas.config.grid import make_grid
from schemas.config.load import PRESETS, form_faults, load_config
from schemas.errors import ConfigError

_CREATE = re.compile(r"/api/deployments/[0-9a-fA-F-]{36}/create_flow_run/?")
_MOST_BYTES = 2 * 2**20
"""A larger body goes to Prefect unread."""


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


class FormCheck:
    """ASGI middleware, whose answer quotes the user's files: with a password (`user:password`), only to a request that has it."""

    def __init__(self, app: App, password: str | None = None) -> None:
        self.app, self._password = app, password

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 409 with every bad field, or pass the request to the app."""
        ours = scope["type"] == "http" and scope["method"] == "POST" and _CREATE.fullmatch(scope["path"])
        if not ours or not has_password(scope, self._password):
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []
        body = b""
        while not messages or (messages[-1].get("more_body") and len(body) <= _MOST_BYTES):
            messages.append(await receive())
            body += messages[-1].get("body", b"")
        # In a thread: a sweep may have a thousand configs, and the server has other requests to answer.
        faults = await asyncio.to_thread(parameter_faults, body) if len(body) <= _MOST_BYTES else []
        if not faults:
            waiting = iter(messages)

            async def replay() -> Message:
                return next(waiting, None) or await receive()

            await self.app(scope, replay, send)
            return
        answer = json.dumps({"detail": "Validation failed. " + "\n".join(faults)}).encode()
        await send({"type": "http.response.start", "status": 409, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": answer})


def parameter_faults(body: bytes) -> list[str]:
    """What is wrong with the parameters of a request, a line for each field; none for what is not ours to judge."""
    try:
        parameters = json.loads(body)["parameters"]
    except (ValueError, TypeError, KeyError, RecursionError):
        parameters = None
    # A template is filled in by the server, later.
    if not isinstance(parameters, Mapping) or b"__prefect_kind" in body:
        return []
    config = parameters.get("config")
    if isinstance(config, Mapping):
        if faults := form_faults(dict(config)):
            return [f"config.{fault}" for fault in faults]
        stage, names = parameters.get("stage"), [known["name"] for known in config["stages"]]
        unknown = isinstance(stage, str) and stage not in names
        return [f"stage: no stage {stage} in this config; one of {', '.join(names)}"] if unknown else []
    source, overrides, over = (parameters.get(name) for name in ("source", "overrides", "over"))
    lists = isinstance(overrides, list | None) and isinstance(over, list | None)
    if not isinstance(source, str) or not lists or not _may_be_read(source):
        return []
    settings, seeds = [str(override) for override in overrides or []], parameters.get("seeds", 1)
    try:
        if {"over", "seeds"} & parameters.keys() and isinstance(seeds, int):
            make_grid(source, settings, [str(axis) for axis in over or []], seeds=seeds)
        else:
            load_config(source, settings)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _may_be_read(source: str) -> bool:
    """Whether a source is a preset, or a file of the user's own folder: a server for others must not read what they name."""
    if re.fullmatch(r"[\w.-]{1,100}", source) and (PRESETS / f"{source}.yaml").is_file():
        return True
    folder = os.environ.get(WORKDIR)
    if not folder or "\0" in source or Path(folder).resolve() != Path.cwd().resolve():
        return False
    return (Path.cwd() / source).resolve().is_relative_to(Path.cwd().resolve())


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
    secret = server.api.auth_string
    app = import_module("prefect.server.api.server").create_app(final=True)
    uvicorn.run(
        SameOrigin(FormCheck(app, secret.get_secret_value() if secret else None)),
        host=at.host,
        port=at.port,
        timeout_keep_alive=server.api.keepalive_timeout,
        ws_ping_interval=server.api.websocket_ping_interval,
        ws_ping_timeout=server.api.websocket_ping_timeout,
        log_level=server.logging_level.lower(),
    )


if __name__ == "__main__":
    main()
