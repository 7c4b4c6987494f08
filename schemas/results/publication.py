"""Results of publishing, reporting, and of whole runs."""

from pathlib import Path
from typing import Self

from pydantic import Field

from schemas.results.base import Result, StepResult
from schemas.results.evaluation import EvalReport, PairedTest, Regression


class Lineage(Result):
    """Origin of a registered model version."""

    name: str
    version: str
    aliases: list[str]
    run_id: str
    experiment: str
    model_sha256: str
    """Hash of all files of the merged model."""
    adapter_sha256: str
    """Hash of the weights of the last stage."""
    data_digest: str
    config_sha256: str
    """Hash of the config (without tracking and resources) and of the data, models and reward files it names."""
    code_sha256: str
    """Hash of our code without comments and docstrings."""
    reward_sha256: str
    """Hash of the reward functions, built-in ones and the user's own."""
    commit: str
    dirty: bool
    python: str
    packages: dict[str, str]
    flow_run_id: str
    decision: str
    system_prompt: str


class Reproduction(Result):
    """Whether training a model again gave the same weights."""

    of: Lineage
    run_id: str
    adapter_sha256: str
    same: bool
    differences: list[str]
    """What differs from the original run: commit, packages, data."""


class Publication(StepResult):
    """The published version, and why the alias `champion` moved or did not."""

    run_id: str
    """MLflow parent run."""
    model_name: str
    model_version: str
    champion: bool
    """Whether this version has the alias `champion`."""
    tests: list[PairedTest]
    regressions: list[Regression] = Field(default_factory=list)
    """Against the champion, or against the base if there was no champion."""
    reason: str
    """The decision in one sentence."""


class PublishedFacts(Result):
    """The decision of a publication: the fields that do not change when it is repeated."""

    model_name: str
    model_version: str
    champion: bool
    tests: list[PairedTest]
    regressions: list[Regression]
    reason: str

    @classmethod
    def of(cls, publication: Publication) -> Self:
        """The decision of a publication."""
        return cls.model_validate(publication.model_dump(include=set(cls.model_fields)))


class ReportResult(StepResult):
    """The report of a run. Files: report.html, report.md."""

    html: Path


class PipelineResult(Result):
    """Result of a whole pipeline."""

    publication: Publication
    evaluations: list[EvalReport]
    """Base, each stage, merged model."""
    report: Path
    """The report's HTML file."""


class RetrainResult(Result):
    """Result of a retraining."""

    trained: bool
    """False if a version already exists for the same data, code and config."""
    reason: str
    """The decision in one sentence."""
    publication: Publication | None = None
