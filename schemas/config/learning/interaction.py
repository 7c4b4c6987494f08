"""Section `interaction`: tools and environments that answer the policy between two turns of a conversation."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.config.rollout import RolloutConfig
from schemas.config.section import Section
from schemas.config.stage import StageConfig
from schemas.config.types import MOST_TOKENS, FreeSettings

_REFERENCE = r"^[\w.]+:[\w.]+$"
Reference = Annotated[str, StringConstraints(pattern=_REFERENCE, max_length=200)]
"""module:function or module:Class."""
CallFormat = Literal["auto", "hermes", "llama", "json"]


class InteractionConfig(Section):
    """What answers the policy between two turns. Without tools and without an environment a completion is one turn."""

    tools: list[Reference] = Field(default_factory=list, max_length=64)
    """Typed Python functions with docstrings that the policy may call, as module:function. Their signatures become the schemas
    that the chat template shows."""
    environment: Reference | None = None
    """Class or factory with reset and step, as module:Class; one instance a conversation."""
    settings: FreeSettings = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    call_format: CallFormat = "auto"
    """How the model writes a call. auto: as its chat template does. hermes: JSON in <tool_call> tags (Qwen). llama: a JSON object
    with name and parameters, and nothing else. json: a JSON object in <tool_call> tags, or alone."""
    max_turns: int = Field(8, ge=1, le=256)
    """Turns of the policy in one conversation. One that runs out of them is truncated."""
    max_tool_calls: int = Field(16, ge=0, le=1024)
    """Calls in one conversation. Further ones are answered with an error."""
    max_tokens: int = Field(4096, ge=16, le=MOST_TOKENS)
    """Tokens of a conversation after its prompt, answers of tools included. rollout.max_completion_length limits each turn."""
    max_prompt_tokens: int = Field(4096, ge=1, le=MOST_TOKENS)
    """Tokens of a prompt that an environment begins with, after the chat template. A longer one ends its conversation with an
    error. validation.max_prompt_length limits the prompts of the data."""
    max_answer_chars: int = Field(4_000, ge=16, le=1_000_000)
    """Characters kept of one answer of a tool or environment."""
    timeout_s: float = Field(10.0, gt=0.0, le=3600.0)
    """Seconds that one call, one reset or one step may take. Then its worker is ended."""
    memory_mb: int = Field(1024, ge=256, le=1_048_576)
    """Memory in MiB that a worker process may take, with everything that it starts. Resident memory is measured every 0.05 s; the
    conversations of a worker share it. Python and what makes the schemas of tools take about 130 MiB."""
    workers: int = Field(2, ge=1, le=256)
    """Worker processes."""
    module_dir: Path | None = None
    """Folder with the modules of your tools or environment, relative to the working directory. Empty: as for
    rewards.module_dir."""

    def _faults(self) -> Iterator[str]:
        if self.tools and self.environment:
            yield "tools and environment are both given; fix: offer the tools from the environment, or remove one"
        if self.settings and not self.environment:
            yield "settings belong to an environment; fix: environment: module:Class, or leave settings out"

    def faults_of(self, rollout: RolloutConfig, stages: Sequence[StageConfig]) -> Iterator[str]:
        """Where a run with tools or an environment could not play."""
        for index, stage in enumerate(stages):
            if self.active and stage.engine == "trl":
                yield f"engine trl plays no conversations; fix: stages.{index}.engine: native"
        if self.active and self.max_tokens < rollout.max_completion_length:
            yield (
                f"interaction.max_tokens {self.max_tokens} is less than one turn of rollout.max_completion_length "
                f"{rollout.max_completion_length}; fix: interaction.max_tokens: {4 * rollout.max_completion_length}"
            )

    @property
    def references(self) -> list[str]:
        """The tools, or the environment, as module:name."""
        return [*self.tools, *([self.environment] if self.environment else [])]

    def module_dirs(self) -> list[Path]:
        """Folders that are searched for the modules of your tools or environment, after the installed packages."""
        return [Path.cwd(), *([self.module_dir] if self.module_dir is not None else [])]

    @property
    def own_code(self) -> list[str]:
        """The references, and what the settings of the environment name in the same way: it may load that itself."""
        return [*self.references, *references_in(self.settings)]

    def longest(self, rollout: RolloutConfig) -> int:
        """The most tokens after a prompt."""
        return self.max_tokens if self.active else rollout.max_completion_length

    def longest_prompt(self, of_data: int) -> int:
        """The most tokens of a prompt. An environment begins with prompts of its own, perhaps longer than those in the data."""
        return max(of_data, self.max_prompt_tokens) if self.environment else of_data

    @property
    def active(self) -> bool:
        """True if conversations have turns of somebody else."""
        return bool(self.tools) or self.environment is not None


def references_in(value: object) -> Iterator[str]:
    """Every text in a tree of mappings and lists that has the form module:name, whether there is such a module or not."""
    if isinstance(value, str):
        if re.match(_REFERENCE, value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from references_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from references_in(item)
