"""`grpo weights-server`: takes the policy over HTTP for a vLLM server that does not see the trainer's files. A cluster starts it
on each node with a rollout server, as `python -m grpo_tasks.content.weights_server FOLDER HOST PORT`.

    PUT     /weights/NAME/FILE    one file; its SHA-256 is in the header X-SHA256
    POST    /weights/NAME         {"files": {FILE: SHA-256}}: all files are there, so the folder gets its name -> {"path": ...}
    DELETE  /weights/NAME
    GET     /weights              names of the complete folders

It writes into a folder that both see. Files arrive in a folder that begins with a dot, so nothing loads a transfer that was cut
off; one that nobody has deleted for a week is deleted when the next arrives: its trainer was killed.
"""

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.kit.request_guard import LOOPBACK, App, BearerKey, SameOrigin
from grpo_tasks.processes.lifetime import die_with_parent
from schemas.errors import UserError

DAMAGED, FULL = 500, 507
"""Statuses of failures after which the engine sends the weights again."""
SUFFIXES = (".safetensors", ".json", ".txt", ".md", ".jinja", ".model")
"""What a model folder consists of. Python unpickles none of them."""
KEEP_S = 7 * 24 * 3600.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")

Handler = Callable[[Request], Awaitable[Response]]


def serve_weights(folder: Path, host: str, port: int, key: str | None) -> None:
    """Serve until Ctrl-C, in a folder that the vLLM server sees under the same path; requests carry `key` as a bearer token.

    `UserError` where other machines could write here without a key.
    """
    if key is None and host not in LOOPBACK:
        raise UserError(
            "other machines may send weights only with a key",
            place=f"--host {host}",
            fix="export VLLM_API_KEY=..., the same one as for vLLM and for the run",
        )
    import uvicorn

    store = _Store(folder)
    routes = [
        Route("/weights", _checked(store.names), methods=["GET"]),
        Route("/weights/{name}/{file}", _checked(store.put), methods=["PUT"]),
        Route("/weights/{name}", _checked(store.complete), methods=["POST"]),
        Route("/weights/{name}", _checked(store.delete), methods=["DELETE"]),
    ]
    app = Starlette(routes=routes)
    # No web page knows the key. Without one, pages of other sites are refused by what the browser says about them.
    guarded: App = SameOrigin(app, hosts=()) if key is None else BearerKey(app, key)
    uvicorn.run(guarded, host=host, port=port, log_level="warning")


class _Store:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)

    async def names(self, _: Request) -> Response:
        return JSONResponse({"names": sorted(entry.name for entry in self._folder.iterdir() if _NAME.fullmatch(entry.name))})

    async def put(self, request: Request) -> Response:
        """Receive a file; it keeps a temporary name until it is whole and its hash is right."""
        name, file = request.path_params["name"], request.path_params["file"]
        if not _NAME.fullmatch(file) or not file.endswith(SUFFIXES):
            return _refusal(400, f"{file!r} is not the name of a file of weights ({', '.join(SUFFIXES)})")
        size = int(request.headers.get("content-length", 0))
        if size > shutil.disk_usage(self._folder).free:
            return _refusal(FULL, f"{size} bytes do not fit on the disk of {self._folder}")
        part = self._arriving(name)
        part.mkdir(exist_ok=True)
        unfinished, digest = part / f".{file}", hashlib.sha256()
        with unfinished.open("wb") as output:
            async for chunk in request.stream():
                digest.update(chunk)
                output.write(chunk)
        if digest.hexdigest() != request.headers.get("x-sha256"):
            unfinished.unlink()
            return _refusal(DAMAGED, f"{file} arrived damaged")
        unfinished.replace(part / file)
        return JSONResponse({})

    async def complete(self, request: Request) -> Response:
        """Give a folder its name, after all of its files have arrived. A repeated request changes nothing."""
        return await run_in_threadpool(self._complete, request.path_params["name"], (await request.json())["files"])

    def _complete(self, name: str, wanted: Mapping[str, str]) -> Response:
        folder, part = self._folder / name, self._arriving(name)
        there = folder if folder.exists() else part
        found = {file.name: file_sha256(file) for file in there.iterdir()} if there.exists() else {}
        if found != wanted:
            different = sorted(file for file in {*wanted, *found} if wanted.get(file) != found.get(file))
            return _refusal(DAMAGED, f"{name} is not complete: {', '.join(different)}")
        if there is part:
            for entry in self._folder.iterdir():
                if entry.is_dir() and time.time() - entry.stat().st_mtime > KEEP_S:
                    shutil.rmtree(entry, ignore_errors=True)
            part.replace(folder)
        else:
            shutil.rmtree(part, ignore_errors=True)
        return JSONResponse({"path": str(folder)})

    async def delete(self, request: Request) -> Response:
        for folder in (self._folder / request.path_params["name"], self._arriving(request.path_params["name"])):
            shutil.rmtree(folder, ignore_errors=True)
        return JSONResponse({})

    def _arriving(self, name: str) -> Path:
        return self._folder / f".{name}"


def _checked(handler: Handler) -> Handler:
    """The handler behind the check of the folder's name; failures of the disk become answers."""

    async def answer(request: Request) -> Response:
        name = request.path_params.get("name", "weights")
        if not _NAME.fullmatch(name):
            return _refusal(400, f"{name!r} is not a name for weights")
        try:
            return await handler(request)
        except ClientDisconnect:
            return _refusal(400, "the transfer was cut off")
        except OSError as error:
            return _refusal(FULL, f"cannot write: {error}")

    return answer


def _refusal(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)


if __name__ == "__main__":
    die_with_parent()
    serve_weights(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), os.environ.get("VLLM_API_KEY") or None)
