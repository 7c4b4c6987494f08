"""Checks the parameters of a run completely before the run exists, in front of the Prefect server.

    POST .../create_flow_run {"parameters": {"config": {...}}}      ->   every bad field at once: 409, and no run
                             {"parameters": {"source": "demo", "overrides": ["seed=-1"]}}
                             {"parameters": {"source": "demo", "over": ["seed=1"]}}               a sweep: all its runs
                             {"parameters": {"config": {...}, "stage": "formt"}}                  a stage of the config

Prefect compares parameters with the JSON schema of a flow and names the first field that does not fit. It cannot know rules over
several fields, or what an override does; a run would start and then fail. What this module does not do: look at data or models.

Where the server has a password, only a request with it is checked: the answer quotes the user's files.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_tasks.sweeping.grid import make_grid
from grpo_tasks.web.request_guard import App, Message, Receive, Send, has_password
from schemas.config.load import PRESETS, form_faults, load_config
from schemas.errors import ConfigError

WORKDIR = "GRPO_WORKDIR"
"""Environment variable: the folder of the user's config files. Without it, only presets are read."""
_CREATE = re.compile(r"/api/deployments/[0-9a-fA-F-]{36}/create_flow_run/?")
_MOST_BYTES = 2 * 2**20
"""A larger body goes to Prefect unread."""


class FormCheck:
    """ASGI middleware: see the module."""

    def __init__(self, app: App, password: str | None = None) -> None:
        """Wrap `app`. With a password (`user:password`) a request without it goes to Prefect unread, which refuses it."""
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
        return []
    # A template is filled in by the server, later.
    if not isinstance(parameters, Mapping) or b"__prefect_kind" in body:
        return []
    config = parameters.get("config")
    if isinstance(config, Mapping):
        return [f"config.{fault}" for fault in form_faults(dict(config))] or _stage_faults(config, parameters.get("stage"))
    return _source_faults(parameters)


def _stage_faults(config: Mapping[str, Any], stage: Any) -> list[str]:
    names = [known["name"] for known in config["stages"]]
    return (
        [f"stage: no stage {stage} in this config; one of {', '.join(names)}"]
        if isinstance(stage, str) and stage not in names
        else []
    )


def _source_faults(parameters: Mapping[str, Any]) -> list[str]:
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
