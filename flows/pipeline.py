"""The pipeline: data in, champion out. Read `grpo_pipeline` from top to bottom; each line is a step and a label in the UI."""

from prefect import flow

from flows.parts import checked_data, evaluated, first_model, probed, rivals_of, trained
from flows.session import session
from grpo_tasks.merge_adapter import merge_adapter
from grpo_tasks.publish_model import publish_model
from grpo_tasks.tracking.models import check_champion
from grpo_tasks.write_report import write_report
from schemas.config.run import RunConfig
from schemas.results import PipelineResult, PublishedFacts


@flow(name="grpo-pipeline", description="Validate, probe rewards, train in stages with GRPO, merge, evaluate, publish.")
def grpo_pipeline(config: RunConfig, fresh: bool = False) -> PipelineResult:
    """The whole chain. Steps whose inputs have not changed are skipped, unless `fresh`."""
    with session(config, flow="pipeline", fresh=fresh) as run:
        check_champion(config.registered_model, config.tracking)
        data = checked_data(run)
        lab = probed(run, data)
        model = first_model(config)
        evaluations = [base := evaluated(run, "base", model, data)]
        stages = []
        for stage in config.stages:
            stages.append(trained(run, stage, model, data))
            model = stages[-1].model
            if config.evaluation.stages:
                evaluations.append(evaluated(run, stage.name, model, data))
        merged = merge_adapter(run, model, data, model=config.model)
        evaluations.append(final := evaluated(run, "merged", merged.model, data))
        champion, rivals = rivals_of(run, merged, base, data)
        publication = publish_model(run, merged, final, rivals, champion=champion, promotion=config.promotion)
        report = write_report(
            run,
            data,
            lab,
            evaluations=evaluations,
            stages=stages,
            proof=merged,
            decision=PublishedFacts.of(publication),
            config=config,
        )
    return PipelineResult(publication=publication, evaluations=evaluations, report=report.html)
