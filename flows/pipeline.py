"""The pipeline: data in, champion out. Read `grpo_pipeline` from top to bottom: each line is a step, and a label in the UI."""

from flows.flow_run import open_flow_run
from flows.model_names import with_local_model
from flows.steps import (
    base_model,
    evaluation_of,
    measured_difficulty,
    merged_model,
    probed_rewards,
    rivals_of,
    trained_stage,
    validated_data,
)
from flows.temporary_server import locked_flow
from grpo_tasks.publish_model import publish_model
from grpo_tasks.tracking.models import check_champion
from grpo_tasks.write_report import write_report
from schemas.config.run import RunConfig
from schemas.results.publication import PipelineResult, PublishedFacts


@locked_flow(name="grpo-pipeline", description="Validate, probe rewards, train in stages with GRPO, merge, evaluate, publish.")
def grpo_pipeline(config: RunConfig, fresh: bool = False) -> PipelineResult:
    """Run every step. A step whose inputs have not changed is skipped, unless `fresh`."""
    config = with_local_model(config)
    with open_flow_run(config, flow="pipeline", fresh=fresh) as run:
        check_champion(config.registered_model, config.tracking)
        data = validated_data(run)
        lab = probed_rewards(run, data)
        model = base_model(config)
        difficulty = measured_difficulty(run, model, data)
        evaluations = [base := evaluation_of(run, "base", model, data)]
        stages = []
        for stage in config.stages:
            stages.append(trained_stage(run, stage, model, data, difficulty))
            model = stages[-1].model
            if config.evaluation.stages:
                evaluations.append(evaluation_of(run, stage.name, model, data))
        merged = merged_model(run, model, data)
        evaluations.append(final := evaluation_of(run, "merged", merged.model, data))
        champion, rivals = rivals_of(run, merged, base, data)
        publication = publish_model(run, merged, final, rivals, champion=champion, promotion=config.promotion)
        report = write_report(
            run,
            data,
            lab,
            difficulty,
            evaluations=evaluations,
            stages=stages,
            proof=merged,
            decision=PublishedFacts.of(publication),
            config=config,
        )
    return PipelineResult(publication=publication, evaluations=evaluations, report=report.html)
