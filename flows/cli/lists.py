"""Commands that answer in the terminal what the browser would show: runs, registered models, completions."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.environment import prepare_environment
from flows.cli.errors import report_errors
from flows.cli.options import Config, Set, TrackingUri
from flows.cli.show import out, print_table, say, table_of
from schemas.config.load import load_config, tracking_at
from schemas.metrics import HEADLINES, REWARD

if TYPE_CHECKING:
    from collections.abc import Mapping

TITLES = [name.replace("_", " ") for name in HEADLINES]


def runs(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="How many, newest first.")] = 20,
    tracking_uri: TrackingUri = None,
) -> None:
    """List the newest runs with their figures."""
    with report_errors(reads=True):
        prepare_environment()
        from grpo_tasks.tracking.past_runs import recent_runs

        found = recent_runs(tracking_at(tracking_uri), limit)
        if not found:
            say("no runs yet: grpo run CONFIG makes one")
            return
        rows = []
        for line in found:
            when = f"{line.started:%Y-%m-%d %H:%M}"
            rows.append([when, line.run_id[:8], line.name, line.status.lower(), *_cells(line.figures), line.version])
        print_table(table_of(("started", "run", "name", "status", *TITLES, "model"), rows), TITLES)
        say("more: grpo compare RUN RUN, grpo lineage MODEL")


def models(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this registered model.")] = None,
    tracking_uri: TrackingUri = None,
) -> None:
    """List registered models: versions, aliases and figures."""
    with report_errors(reads=True):
        prepare_environment()
        from grpo_tasks.tracking.past_runs import registered_versions

        found = registered_versions(tracking_at(tracking_uri), name)
        if not found:
            say("no registered models yet: grpo run CONFIG registers one")
            return
        rows = []
        for line in found:
            when = f"{line.made:%Y-%m-%d %H:%M}"
            rows.append([f"{line.name}/{line.version}", ", ".join(line.aliases), when, *_cells(line.figures), line.run_id[:8]])
        print_table(table_of(("model", "alias", "made", *TITLES, "run"), rows), TITLES)
        first = f"{found[0].name}/{found[0].version}"
        say(f"more: grpo chat {first}, grpo lineage {first}, grpo download {first} DIR")


def completions(
    config: Config,
    stage: Annotated[str | None, typer.Option(help="Stage. Default: the one trained last.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Update. Default: the last one that was kept.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest reward.")] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=10_000, help="How many of each.")] = 5,
    override: Set = None,
) -> None:
    """Show completions of an update with their rewards: grpo completions CONFIG --step 20 --best --worst."""
    with report_errors(reads=True):
        settings = load_config(config, override)
        from grpo_tasks.operating.trace import read_completions

        found = read_completions(settings.resources.output_dir / settings.name, stage=stage, step=step)
        kept = ", ".join(map(str, found.steps))
        say(f"stage {found.stage}, update {found.step} (kept: {kept})")
        by_reward = found.table.sort(REWARD, descending=True, nulls_last=True)
        if not (best or worst):
            _show_completions("first", found.table.head(limit).to_dicts())
        if best:
            _show_completions("best", by_reward.head(limit).to_dicts())
        if worst:
            _show_completions("worst", by_reward.tail(limit).reverse().to_dicts())


def _show_completions(title: str, rows: "list[dict[str, object]]") -> None:
    for row in rows:
        scores = "  ".join(
            f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float) and name != "completion"
        )
        out.rule(f"{title}: {row.get('prompt_id', '')}  {scores}", align="left", characters="-")
        say(str(row["completion"]))


def _cells(figures: "Mapping[str, float]") -> list[str]:
    return [f"{figures[name]:.3g}" if name in figures else "" for name in HEADLINES]
