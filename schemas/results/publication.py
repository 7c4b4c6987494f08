"""Results of publishing, reporting, and of whole runs."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from schemas.metrics import figure_text
from schemas.results.base import Result, Section, StepResult
from schemas.results.data import DataReport, GuardData, LabReport
from schemas.results.evaluation import DifficultyReport, EvalReport, GuardCheck, PairedTest, Regression, guard_sections
from schemas.results.model import MergeProof, StageResult


class Lineage(Result):
    """Origin of a registered model version."""

    name: str
    version: str
    aliases: list[str]
    run_id: str
    experiment: str
    model_sha256: str
    adapter_sha256: str
    data_digest: str
    config_sha256: str
    """Of the config (without tracking and resources) and of the data, models and reward files it names."""
    code_sha256: str
    """Of our code without comments and docstrings."""
    reward_sha256: str
    """Of the reward functions, built-in ones and the user's own."""
    commit: str
    dirty: bool
    python: str
    packages: dict[str, str]
    flow_run_id: str
    decision: str
    system_prompt: str
    stop: list[str] = Field(default_factory=list)
    """Strings that ended a completion of the training; no file of the model has them."""
    include_stop_str_in_output: bool = True


class Reproduction(Result):
    """Whether training a model again gave the same weights."""

    of: Lineage
    run_id: str
    adapter_sha256: str
    same: bool
    differences: list[str]
    """What differs from the original run: commit, packages, data."""

    def headline(self) -> str:
        """Identical or not."""
        return f"{self.of.name} version {self.of.version}: the adapter {'is identical' if self.same else 'differs'}"


WAITS = "waits for approval; "
"""Beginning of the reason of a decision that a person has to agree with."""


class Approval(Result):
    """What a person has decided, or has to decide, about a version. A tag of the version in the registry."""

    decision: Literal["pending", "promote", "reject"]
    champion: str = ""
    """Version of the champion that it was compared with."""
    by: str = ""
    note: str = ""
    time: str = ""

    def __str__(self) -> str:
        verb = {"pending": "waits for approval", "promote": "approved", "reject": "rejected"}[self.decision]
        return verb + (f" by {self.by}" if self.by else "") + (f" ({self.note})" if self.note else "")


class Publication(StepResult):
    """The published version, and why the alias `champion` moved or did not."""

    run_id: str
    model_name: str
    model_version: str
    champion: bool
    tests: list[PairedTest]
    regressions: list[Regression] = Field(default_factory=list)
    """Against the champion, or against the base if there was no champion."""
    guards: list[GuardCheck] = Field(default_factory=list)
    reason: str
    awaits_approval: bool = False
    """Whether the version passed every test, and a person has to agree (promotion.approval)."""
    obstacle: str = ""
    """What kept the version from being promoted apart from tests, checks and guards: a person, or another champion."""

    def headline(self) -> str:
        """The verdict and its reason."""
        return f"{self.verdict()}: {self.reason.removeprefix(WAITS)}"

    def verdict(self) -> str:
        """`promoted v7`, `v7 waits for approval`, or `v7 not promoted`."""
        if self.awaits_approval:
            return f"v{self.model_version} waits for approval"
        return f"promoted v{self.model_version}" if self.champion else f"v{self.model_version} not promoted"


class PublishedFacts(Result):
    """The decision of a publication: the fields that do not change when it is repeated."""

    model_name: str
    model_version: str
    champion: bool
    tests: list[PairedTest]
    regressions: list[Regression]
    guards: list[GuardCheck] = Field(default_factory=list)
    reason: str

    @classmethod
    def of(cls, publication: Publication) -> Self:
        """Those of a publication."""
        return cls.model_validate(publication.model_dump(include=set(cls.model_fields)))

    def sections(self, alpha: float) -> list[Section]:
        """The tests at the level `alpha`, the checks and the guards behind the decision."""
        yes = {True: "yes", False: "no"}
        tests = [
            [f"against {test.against}", test.metric, f"{test.difference:+.4f}", f"{test.p_value:.4g}", yes[test.better]]
            for test in self.tests
        ]
        checks = []
        for one in self.regressions:
            bound = f"{one.limit:.4g}" if one.p_value is None else f"p = {one.p_value:.2g}"
            where = f"must not be worse than {one.against}"
            checks.append([where, one.metric, f"{one.ours:.4g}", f"{one.theirs:.4g}", bound, yes[one.passed]])
        level = alpha / max((test.looks for test in self.tests), default=1)
        tested, checked = (f"paired test, alpha {level:g}", "metric", "difference", "p", "better"), ("ours", "theirs", "limit")
        return [
            Section(columns=tested, rows=tests, right=("difference", "p")),
            Section(columns=("check", "metric", *checked, "passed"), rows=checks, right=checked),
            *guard_sections(self.guards),
        ]


class ReportResult(StepResult):
    """The report of a run. Files: report.html, report.md."""

    html: Path


class Trained(Result):
    """Everything before the decision about a version."""

    data: DataReport
    merged: MergeProof
    evaluations: list[EvalReport]
    """Base, stages, merged model. The one before the last is of the policy as it was trained."""
    guards: list[GuardData]
    lab: LabReport | None = None
    """None where an adapter from elsewhere was merged."""
    difficulty: DifficultyReport | None = None
    stages: list[StageResult] = Field(default_factory=list)
    sections: dict[str, str] = Field(default_factory=dict)
    """Of further steps in the report, by step (Markdown)."""

    def results(self) -> list[StepResult]:
        """Those of all steps, in the order of the run."""
        made = [self.data, *self.guards, self.lab, self.difficulty, *self.stages, self.merged, *self.evaluations]
        return [result for result in made if result is not None]


class PipelineResult(Result):
    """Result of a whole pipeline."""

    publication: Publication
    evaluations: list[EvalReport]
    """As in `Trained`."""
    merged_as: str
    """How the merged model was saved."""
    report: Path

    def headline(self) -> str:
        """The decision with the figure behind it, of the rival and of the new model, and with what stood in its way."""
        made, merged = self.publication, next((one.metrics for one in self.evaluations if one.label == "merged"), {})
        # The test that the version failed, or else the last one.
        failed = [test for test in made.tests if not test.better and not made.champion]
        test = next(iter([*failed, *made.tests[-1:]]), None)
        if test is None or test.metric not in merged:
            return made.headline()
        ours = merged[test.metric].value
        before, after = (figure_text(test.metric, value) for value in (ours - test.difference, ours))
        figures = f"{test.metric.replace('_', ' ')} {before} -> {after}"
        said = f"{made.verdict()}: {figures} (against the {test.against}, p = {test.p_value:.2g})"
        if made.champion:
            return said
        checks: list[Regression | GuardCheck] = [*made.regressions, *made.guards]
        return "; ".join(filter(None, [said, *(str(check) for check in checks if not check.passed), made.obstacle]))

    def comparison(self) -> str:
        """What a person needs to decide about the version: the summary of the report, in Markdown."""
        summary = self.report.with_suffix(".md")
        return f"{self.headline()}\n\n{summary.read_text(encoding='utf-8')}" if summary.exists() else self.headline()


class RetrainResult(Result):
    """Result of a retraining."""

    trained: bool
    """False if a version already exists for the same data, code and config."""
    reason: str
    publication: Publication | None = None
    summary: str = ""
    """The headline of the pipeline, if it ran."""

    def headline(self) -> str:
        """What the training brought, or why there was none."""
        return self.summary or self.reason
