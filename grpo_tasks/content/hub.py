"""Identifies a model of the Hugging Face hub by content: the commit behind its revision, and a check of its cached files.

A commit is a hash over its files. A branch such as `main` moves, so the hub is asked for its current commit; without a network
the commit that was fetched last counts. Only `hub_snapshot` downloads. The cache names each file after its own hash (SHA-256 for
large files, git's SHA-1 for small ones), so a damaged file is found before it is used.
"""

import hashlib
import re
from functools import cache
from pathlib import Path

from grpo_tasks.content.hashes import file_sha256, files_below
from schemas.errors import DamagedError, ModelError

REPLY_TIMEOUT_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256_CHARS = 64


@cache
def hub_commit(repository: str, revision: str | None) -> str:
    """The commit behind a revision of a hub model; empty when neither hub nor cache knows it (loading the model explains why).

    Raises:
        DamagedError: a cached file of the model differs from what was downloaded.
    """
    folder = _cache_folder(repository)
    commit = _commit(repository, revision or "main", folder)
    if commit:
        _check_files(folder / "snapshots" / commit)
    return commit


def hub_snapshot(repository: str) -> Path:
    """The folder in the hub's cache with all files of a model; what is missing is downloaded.

    Raises:
        ModelError: there is no such model, or the hub cannot be reached and the cache does not have it.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository))
    except Exception as error:  # no network, no such model, no permission: huggingface_hub has a class for each
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"the hub did not give {repository}: {reason}",
            place=repository,
            fix="check the name and the network; for a model on this disk name its folder",
        ) from error


def _commit(repository: str, revision: str, folder: Path) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:
            return HfApi().model_info(repository, revision=revision, timeout=REPLY_TIMEOUT_S).sha or ""
        except Exception:  # noqa: S110 - no network, no such model, no permission: huggingface_hub has a class for each
            pass
    known = folder / "refs" / revision
    return known.read_text(encoding="utf-8").strip() if known.is_file() else ""


def _cache_folder(repository: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def _check_files(snapshot: Path) -> None:
    for path in files_below(snapshot):
        name = path.resolve().name
        right = (
            name == (file_sha256(path, remembered=True) if len(name) == _SHA256_CHARS else _git_sha1(path))
            if _is_hash(name)
            else True
        )
        if not right:
            raise DamagedError(
                f"{path.name} in the hub cache is damaged (its hash differs)",
                place=str(path),
                fix=f"delete {path.resolve()} and run the same command again: the file is downloaded again",
            )


def _is_hash(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) is not None


def _git_sha1(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
