"""What the name of a published model says about it, for a proposal: nothing is downloaded, and the name may be wrong.

Where the model's own files are on this machine they decide, not this table.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from schemas.config.load import PRESETS

THINKING = ("qwen3", "qwen3.5", "qwen3.6", "qwen3.8")
"""Families whose templates know enable_thinking. All think unless it is false, but for Qwen3.5 below 4B, which think if it is
true. Each as published; Qwen3-VL, Qwen3-Coder and Qwen3-Next are families of their own, without the setting."""
ONE_MODE = re.compile(r"-(?:instruct|thinking|base)\b")
"""In the names of models of these families whose templates have no such setting (-Instruct-2507, -Thinking-2507), or about which
it is not known (-Base)."""
RECURRENT = ("qwen3-next", "qwen3.5", "qwen3.6", "qwen3.8")
"""Families with layers of Gated DeltaNet, which need packages of their own to be fast."""
_NAME = re.compile(r"(?P<family>.+?)-(?P<size>\d+(?:\.\d+)?)b(?P<variant>\b.*)")
"""Qwen3-30B-A3B-Instruct-2507: the family, billions of parameters, the variant."""
_PRESET = re.compile(r"gsm8k-(?P<family>.+)-(?P<size>[\d.]+)b")


@dataclass(frozen=True, slots=True)
class NameHints:
    """What the name suggests."""

    can_think: bool = False
    """Its chat template has the setting enable_thinking."""
    recurrent: bool = False
    preset: str | None = None
    """Of its family, the one whose model has the most similar size."""

    @classmethod
    def of(cls, model: str) -> "NameHints":
        """Of a hub id, or of a folder that is called like one."""
        found = _NAME.fullmatch(Path(model).name.lower())
        if found is None:
            return cls()
        family, size = found["family"], float(found["size"])
        return cls(
            can_think=family in THINKING and ONE_MODE.search(found["variant"]) is None,
            recurrent=family in RECURRENT,
            preset=_nearest_preset(family, size),
        )


def _nearest_preset(family: str, size: float) -> str | None:
    presets = [found for path in PRESETS.glob("*.yaml") if (found := _PRESET.fullmatch(path.stem)) and found["family"] == family]
    return min(presets, key=lambda one: abs(math.log(float(one["size"]) / size)))[0] if presets and size else None
