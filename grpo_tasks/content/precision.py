"""The precision that a model folder is saved in, read from its config.json, and which precisions hold its weights."""

import json
from pathlib import Path

BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Bits of significand of each precision."""


def saved_dtype(folder: Path) -> str | None:
    """The precision that the folder's config.json names; None where it names none, or where there is no such file."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = config.get("dtype") or config.get("torch_dtype") if isinstance(config, dict) else None
    return found if found in BITS else None


def rounds(dtype: str, folder: Path) -> str | None:
    """The precision that a folder is saved in, if its weights would be rounded when they are loaded in `dtype`; else None."""
    saved = saved_dtype(folder)
    return saved if saved is not None and BITS[saved] > BITS[dtype] else None
