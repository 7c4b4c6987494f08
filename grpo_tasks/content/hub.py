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
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


@cache
def hub_commit(repository: str, revision: str | None) -> str:
    """The commit behind a revision of a hub model; empty when neither hub nor cache knows it (loading the model explains why).

    Raises:
        DamagedError: a cached file of the model differs from what was downloaded.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    commit = _commit(repository, revision or "main", folder)
    for path in files_below(folder / "snapshots" / commit) if commit else ():
        name = path.resolve().name
        if _SHA256.fullmatch(name):
            found = file_sha256(path, remembered=True)
        elif _SHA1.fullmatch(name):
            content = path.read_bytes()
            found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        else:
            continue
        if found != name:
            raise DamagedError(
                f"{path.name} in the hub cache is damaged (its hash differs)",
                place=str(path),
                fix=f"delete {path.resolve()} and run the same command again: the file is downloaded again",
            )
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
    if _SHA1.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:
            return HfApi().model_info(repository, revision=revision, timeout=REPLY_TIMEOUT_S).sha or ""
        except Exception:  # noqa: S110 - no network, no such model, no permission: huggingface_hub has a class for each
            pass
    known = folder / "refs" / revision
    return known.read_text(encoding="utf-8").strip() if known.is_file() else ""
