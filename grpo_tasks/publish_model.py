"""Step: the merged model into the registry; the alias `champion` moves only if the paired tests say better."""

import time
from collections.abc import Sequence

from grpo_tasks.evaluation.paired import compare
from grpo_tasks.running.step import Work, step
from grpo_tasks.tracking.models import Champion, publish
from schemas.config import PromotionConfig
from schemas.results import EvalReport, MergeProof, Publication


@step(rooms=("evaluation", "rewards", "tracking"), cached=False)
def publish_model(
    work: Work,
    proof: MergeProof,
    final: EvalReport,
    rivals: Sequence[EvalReport],
    *,
    champion: Champion | None,
    promotion: PromotionConfig,
) -> Publication:
    """Register the version (once for the same bytes), test it against `rivals`, decide."""
    began = time.perf_counter()
    tests = [compare(final, rival, metric=promotion.metric, alpha=promotion.alpha) for rival in rivals]
    name = work.run.config.registered_model
    decision = publish(work.run.tracked, proof, tests=tests, champion=champion, evaluation=final)
    work.artifact("publication", f"# {name} version {decision.version}\n\n{decision.reason}\n")
    return Publication(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        run_id=work.run.tracked.run_id,
        model_name=name,
        model_version=decision.version,
        champion=decision.champion,
        tests=tests,
        reason=decision.reason,
    )
