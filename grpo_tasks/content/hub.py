"""A model of a hub by its content: the hash over the files of the revision that is on this disk.

A revision like `main` moves; what counts is what it points to now. The files are those that loading the model needs; they are
fetched here if they are not in the hub cache yet, which the step would do a moment later.
"""

from functools import cache
from pathlib import Path

from grpo_tasks.content.hashes import folder_sha256

WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
UNWANTED = ("original/*", "onnx/*", "openvino/*", "gguf/*", "*.bin", "*.pt", "*.gguf")


@cache
def hub_contents(repository: str, revision: str | None) -> str:
    """SHA-256 (hex) over the files of a hub model; empty when it cannot be had, which loading it will explain."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED))
    except Exception:
        # No such repository, no network, no permission: the library has a class for each, and loading says it in our words.
        return ""
    return folder_sha256(Path(folder))
