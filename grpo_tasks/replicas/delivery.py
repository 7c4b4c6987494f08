"""Sends weights to a server that does not see the trainer's files, through `grpo weights-server` next to it."""

from collections.abc import Iterator
from pathlib import Path

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.replicas.client import Client

CHUNK = 1 << 20


def deliver(client: Client, receiver: str, name: str, folder: Path) -> str:
    """Send the files of a folder; each is checked by its hash where it arrives.

    Args:
        client: asks the receiver.
        receiver: address of the `grpo weights-server`.
        name: of these weights, unlike that of any others.
        folder: its files are sent, and no folders in it.

    Returns:
        Where the vLLM server finds them.

    Raises:
        ServerGoneError: the receiver does not answer, its disk is full, or a file arrived damaged.
        RolloutError: the receiver refuses them.
    """
    files = {file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    for file, sha256 in files.items():
        _put(client, receiver, name, folder / file, sha256)
    return str(client.post(receiver, f"/weights/{name}", {"files": files})["path"])


def withdraw(client: Client, receiver: str, name: str) -> None:
    """Delete weights that the server has unloaded.

    Raises:
        ServerGoneError: the receiver does not answer.
    """
    client.send("DELETE", receiver, f"/weights/{name}", dict)


def _put(client: Client, receiver: str, name: str, file: Path, sha256: str) -> None:
    headers = {"X-SHA256": sha256, "Content-Length": str(file.stat().st_size)}

    client.send("PUT", receiver, f"/weights/{name}/{file.name}", lambda: {"content": _chunks(file), "headers": headers})


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            yield chunk
