"""What the files of a model say without loading it: the commit of a hub model, precision, end tokens, a template with a date.

A commit is a hash over its files. A branch such as `main` moves, so the hub is asked for its current commit; without a network
the commit that was fetched last counts. Only `hub_snapshot` downloads. The cache names each file after its own hash (SHA-256 for
large files, git's SHA-1 for small ones), so a damaged file is found before it is used.
"""

import hashlib
import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from grpo_tasks.content.hashes import file_sha256, files_below
from grpo_tasks.kit.progress import Progress, report
from schemas.config.rollout import TEMPLATE_DATE
from schemas.errors import DamagedError, ModelError
from schemas.paths import resolve

REPLY_TIMEOUT_S = 10.0
BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Bits of significand of each precision."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


@cache
def hub_commit(repository: str, revision: str | None) -> str:
    """The commit behind a revision of a hub model, empty when neither hub nor cache knows it; `DamagedError` in the cache."""
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
    """The folder in the hub's cache with all files of a model. Downloads what is missing; raises ModelError where that fails."""
    from huggingface_hub import snapshot_download

    try:
        report(Progress(f"downloading {repository}"))
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


def saved_dtype(folder: Path) -> str | None:
    """The precision that the folder's config.json names, if any."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = config.get("dtype") or config.get("torch_dtype") if isinstance(config, dict) else None
    return found if found in BITS else None


def rounds(dtype: str, folder: Path) -> str | None:
    """The precision of the folder if its weights would be rounded when they are loaded in `dtype`; else None."""
    saved = saved_dtype(folder)
    return saved if saved is not None and BITS[saved] > BITS[dtype] else None


def generation_eos(path: str, revision: str | None) -> int | list[int] | None:
    """End tokens of the generation config; without one, those of config.json, as transformers takes them."""
    for name in ("generation_config.json", "config.json"):
        file = file_of(path, name, revision)
        if file is not None:
            config = json.loads(file.read_text(encoding="utf-8"))
            found: int | list[int] | None = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
            return found
    return None


def context_length(path: str, revision: str | None = None) -> int | None:
    """Tokens that the model was made for (max_position_embeddings of config.json), if it names any."""
    file = file_of(resolve(path), "config.json", revision)
    config = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def asks_for_date(path: str, revision: str | None) -> bool:
    """Whether a chat template of the model writes the day on which it is rendered."""
    folder, files = Path(path), list[Path | None]()
    if folder.is_dir():
        files = [*(folder / name for name in _TEMPLATE_FILES), *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    else:
        # What is wrong with a model says who loads it.
        with suppress(OSError):
            files = [file_of(path, name, revision) for name in _TEMPLATE_FILES]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file is not None and file.is_file()]
    return any(TEMPLATE_DATE in text for text in texts)


def file_of(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a model, a folder or a hub id, downloaded where it is not in the cache; None where the model has none of it."""
    from transformers.utils.hub import cached_file

    file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)
