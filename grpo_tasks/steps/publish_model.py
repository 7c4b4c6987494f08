"""Step: register the merged model; the alias `champion` moves only if the paired tests find it better."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from grpo_tasks.content.markdown import as_markdown
from grpo_tasks.evaluation.guards import find_merge_loss, find_regressions
from grpo_tasks.evaluation.statistics import deciding_metric, promotion_test
from grpo_tasks.processes.child import SPEC, run_module
from grpo_tasks.running.step import Work, step
from grpo_tasks.tracking.log_model import LogSpec
from grpo_tasks.tracking.models import Champion
from grpo_tasks.tracking.proof import ServedSpec
from grpo_tasks.tracking.publishing import prepare_publishing, publish
from grpo_tasks.tracking.registry import publish_lock
from schemas.config.run import RunConfig
from schemas.results.base import Section
from schemas.results.evaluation import EvalReport, GuardCheck
from schemas.results.model import MergeProof
from schemas.results.publication import Publication, PublishedFacts


@step(reads="promotion", cached=False)
def publish_model(
    work: Work,
    config: RunConfig,
    proof: MergeProof,
    final: EvalReport,
    rivals: Sequence[EvalReport],
    *,
    policy: EvalReport,
    champion: Champion | None,
    guards: Sequence[GuardCheck] = (),
) -> Publication:
    """Register the version (once for the same bytes), test it against `rivals` and `policy`, and decide about the alias."""
    began, promotion = time.perf_counter(), config.promotion
    prepare_publishing()
    metric = deciding_metric(promotion, final)
    tests = [promotion_test(final, rival, metric=metric, alpha=promotion.alpha) for rival in rivals]
    name = work.run.config.registered_model
    standard = next((rival for rival in rivals if rival.label == "champion"), rivals[0])
    regressions = [*find_regressions(final, standard, promotion), find_merge_loss(final, policy, metric)]
    # Before the lock: a paused run waits here, and another run of the same model must not wait with it.
    work.run.require_wanted()
    # `publish` reads the current champion and then moves the alias. The lock keeps another run from moving it in between.
    with work.run.tracked.store.lock(publish_lock(name), who=f"the run {work.run.config.name}"):
        decision = publish(
            work.run.tracked,
            proof,
            tests=tests,
            champion=champion,
            evaluation=final,
            regressions=regressions,
            guards=guards,
            origin=work.run.origin,
            log=partial(_run_child, "grpo_tasks.tracking.log_model", work.directory),
            # A folder of its own, so that both logs stay.
            prove=partial(_run_child, "grpo_tasks.tracking.proof", work.directory / "served"),
            require_wanted=work.run.require_wanted,
        )
    publication = Publication(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        run_id=work.run.tracked.run_id,
        model_name=name,
        model_version=decision.version,
        champion=decision.champion,
        tests=tests,
        regressions=regressions,
        guards=list(guards),
        reason=decision.reason,
        awaits_approval=decision.awaits_approval,
        obstacle=decision.obstacle,
    )
    verdict = "Promoted" if decision.champion else "Passed" if decision.awaits_approval else "Not promoted"
    said = Section(text=f"{verdict}: {decision.reason}")
    sections = [said, *PublishedFacts.of(publication).sections(promotion.alpha)]
    work.artifact("publication", f"# {name} version {decision.version}\n\n{as_markdown(sections)}")
    return publication


def _run_child(module: str, directory: Path, spec: LogSpec | ServedSpec) -> None:
    directory.mkdir(exist_ok=True)
    spec.save(directory / SPEC)
    run_module(module, directory)
