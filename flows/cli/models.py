"""Commands for registered models: restore, download, export, ask, compare, trace back, train again.

A command that changes the registry then tells Prefect: automations, and the run that waits. A server that is away is a line of
output, not an error.
"""

import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from flows.cli.environment import prepare_environment, prepare_flow, report_errors
from flows.cli.options import MODEL_HELP, Registered, TrackingUri
from flows.cli.progress import shown_progress
from flows.cli.show import out, say, show
from schemas.config.load import tracking_at
from schemas.errors import UserError
from schemas.paths import resolve
from schemas.results.base import Section

if TYPE_CHECKING:
    from grpo_tasks.report import Comparison
    from schemas.config.operations import TrackingConfig
    from schemas.results.publication import Approval, Lineage

DOWNLOADS = Path("runs") / "downloads"
_ADDRESS = "PREFECT_API_URL"
_MOST_NAME, _MOST_NOTE = 200, 2_000
"""Characters that the form of a suspended run takes (flows/approval.py)."""


def rollback(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the registered model.")],
    to: Annotated[str | None, typer.Option("--to", metavar="VERSION", help="Restore this version instead of `previous`.")] = None,
    reason: Annotated[str, typer.Option(help="Recorded as a tag of the version that is rolled back.")] = "",
    tracking_uri: TrackingUri = None,
) -> None:
    """Restore the previous champion."""
    with report_errors():
        prepare_environment()
        from grpo_tasks.tracking.registry import rollback as roll_back

        left, now = roll_back(name, to=to, reason=reason, tracking=tracking_at(tracking_uri))
        tell_prefect("grpo.champion.changed", f"grpo.model.{name}", f"rolled back from version {left} to version {now}")
        say(f"{name}: version {now} is the champion now, version {left} is `previous`")


def promote(
    version: Annotated[str, typer.Argument(metavar="NAME/VERSION", help="A version that waits for approval.")],
    reject: Annotated[bool, typer.Option("--reject", help="Do not promote it. It stays registered.")] = False,
    by: Annotated[str, typer.Option(metavar="NAME", help="Your name, for the record.")] = "",
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why, for the record.")] = "",
    tracking_uri: TrackingUri = None,
) -> None:
    """Decide about a version that passed its tests and waits for approval (promotion.approval: manual)."""
    with report_errors():
        prepare_environment()
        from grpo_tasks.tracking.registry import decide_pending, find_version
        from schemas.results.publication import Approval

        tracking = tracking_at(tracking_uri)
        decided = Approval(decision="reject" if reject else "promote", by=by, note=note)
        # Before the decision: the alias of NAME@challenger moves with it.
        found = find_version(version, tracking)
        name, number = found.name, str(found.version)
        said = decide_pending(f"{name}/{number}", decided, tracking)
        say(said)
        tell_prefect("grpo.approval.decided", f"grpo.model.{name}.{number}", said)
        if not reject:
            tell_prefect("grpo.champion.changed", f"grpo.model.{name}", said)
        resume_suspended(found.run_id or "", number, decided, tracking)


def download(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    into: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the model.")],
    tracking_uri: TrackingUri = None,
) -> None:
    """Download a model. Every file of a registered one is verified, and an interrupted download is resumed."""
    with report_errors(reads=True):
        with shown_progress("downloading the model"):
            prepare_environment()
            from flows.model_names import fetch_model

            said = fetch_model(model, into, tracking_at(tracking_uri))
        say(said)


def export(
    model: Registered,
    into: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the adapter.")],
    tracking_uri: TrackingUri = None,
) -> None:
    """Write a registered model as one LoRA adapter of its original base, for vLLM and peft, after comparing the two."""
    with report_errors(reads=True):
        with shown_progress("exporting the model"):
            prepare_environment()
            from grpo_tasks.operating.export import export_adapter

            said = export_adapter(model, into, tracking_at(tracking_uri))
        say(said)


def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="One question. Without it you can ask several in turn.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message. Default: the one that the model was trained with.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Sampling temperature. Default: that of the model, as it was trained.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Sample from the most likely tokens that together have this probability. Default: the model's.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always choose the most likely token.")] = False,
    tracking_uri: TrackingUri = None,
) -> None:
    """Ask a model questions in the terminal."""
    with report_errors(reads=True):
        prepare_environment()
        from grpo_tasks.rollout.chat_session import ChatSession

        folder, lineage = _folder_and_lineage(model, tracking_at(tracking_uri))
        trained_with = "" if lineage is None or lineage.system_prompt == "null" else lineage.system_prompt
        given = trained_with if system is None else system
        before = [{"role": "system", "content": given}] if given else []
        include = lineage is None or lineage.include_stop_str_in_output
        session = ChatSession(folder, stop=() if lineage is None else lineage.stop, include_stop=include)
        while (text := question or _read()) is not None:
            messages, chosen = [*before, {"role": "user", "content": text}], {"temperature": temperature, "top_p": top_p}
            for piece in session.answer(messages, max_new_tokens=max_new_tokens, greedy=greedy, **chosen):
                out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            out.print()
            if question:
                return


def _folder_and_lineage(name: str, tracking: "TrackingConfig") -> "tuple[Path, Lineage | None]":
    """The folder or hub id of a model, and its origin where this project trained and published it."""
    from flows.model_names import registered_model
    from flows.preflight import check_model
    from grpo_tasks.content.limited_model import check_model_files
    from grpo_tasks.tracking.models import ORIGIN
    from grpo_tasks.tracking.registry import lineage_of
    from schemas.results.publication import Lineage

    found = registered_model(name, tracking, DOWNLOADS)
    if found is not None:
        return Path(found.path), lineage_of(name, tracking)
    check_model(name, "MODEL")
    check_model_files(name, None)
    origin = Path(name) / ORIGIN
    # Unlike Path.exists, os.path.exists accepts a name of any length.
    return Path(resolve(name)), Lineage.load(origin) if os.path.exists(origin) else None  # noqa: PTH110


def _read() -> str | None:
    try:
        return out.input("[bold]> [/]").strip() or None
    except EOFError:
        return None


def lineage(model: Registered, tracking_uri: TrackingUri = None) -> None:
    """Show where a registered model came from: run, data, rewards, config, commit, environment."""
    with report_errors(reads=True):
        with shown_progress("reading the model's record"):
            prepare_environment()
            from grpo_tasks.tracking.registry import lineage_of

            found = lineage_of(model, tracking_at(tracking_uri))
        facts = found.model_dump(exclude={"name", "version", "packages"})
        rows = [
            *((name.replace("_", " "), ", ".join(fact) if isinstance(fact, list) else str(fact)) for name, fact in facts.items()),
            ("packages", ", ".join(f"{name} {version}" for name, version in found.packages.items())),
            *(
                ("artifact", f"runs:/{found.run_id}/{name}")
                for name in ("config.yaml", "data/report.md", "data/quarantine.parquet", "environment.json")
            ),
        ]
        show(Section(title=f"{found.name} version {found.version}", columns=("fact", "value"), rows=rows))


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="MLflow run id (or its first digits), run name, or NAME@ALIAS.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare with.")],
    into: Annotated[Path, typer.Option("--out", metavar="FILE", help="HTML page to write.")] = Path("comparison.html"),
    tracking_uri: TrackingUri = None,
) -> None:
    """Compare two runs: settings, paired evaluation differences, curves, completions on which they disagree."""
    with report_errors(reads=True):
        with shown_progress("comparing the runs"):
            prepare_environment()
            from grpo_tasks.report import compare_runs, write_comparison
            from grpo_tasks.tracking.past_runs import load_past_run

            tracking = tracking_at(tracking_uri)
            found = compare_runs(load_past_run(first, tracking), load_past_run(second, tracking))
            page = write_comparison(found, into.resolve())
        show_comparison(found)
        say(f"page: {page}")


def show_comparison(found: "Comparison") -> None:
    """Print the figures and settings of two runs."""
    titles = ("first", "second")
    say(*(f"{title}: {run.name} ({run.run_id[:8]})" for title, run in zip(titles, (found.first, found.second), strict=True)))
    differ = len(found.disagreements)
    show(
        found.section(*titles),
        Section(title=f"{len(found.settings)} settings differ", columns=("setting", *titles), rows=found.settings),
        Section(text=f"the runs disagree on at least {differ} prompts" if differ else "the runs agree on every prompt"),
    )


def reproduce(
    model: Registered,
    output_dir: Annotated[Path, typer.Option("--output-dir", metavar="DIR", help="New folder for everything written.")] = Path(
        "reproduced"
    ),
    tracking_uri: TrackingUri = None,
) -> None:
    """Train a registered model again from its record. Exit code 1 if the new adapter differs."""
    with report_errors():
        with shown_progress("starting Prefect and MLflow"):
            prepare_flow()
            from flows.retrain import reproduce_flow
            from grpo_tasks.tracking.store import check_store

            check_store(tracking_at(tracking_uri))
            made = reproduce_flow(model, output_dir, tracking_uri)
        verdict = "is identical" if made.same else "DIFFERS"
        say(
            *(f"this has changed since then: {difference}" for difference in made.differences),
            f"the reproduced adapter {verdict}: {made.adapter_sha256[:16]}, recorded {made.of.adapter_sha256[:16]} "
            f"(MLflow run {made.run_id})",
        )
        if not made.same:
            sys.exit(1)


def tell_prefect(event: str, resource: str, detail: str) -> None:
    """Send an event for automations to the Prefect server of the environment, or to the one that runs in this folder."""
    if not _has_prefect():
        return
    from prefect.events import emit_event

    emit_event(event, {"prefect.resource.id": resource}, payload={"detail": detail})


def resume_suspended(run_id: str, version: str, approval: "Approval", tracking: "TrackingConfig") -> None:
    """Let the flow run that waits for this decision about a version of the MLflow run continue. It asks nobody again."""
    if not run_id or not _has_prefect():
        return
    from prefect.client.orchestration import get_client

    from grpo_tasks.tracking.store import open_store, run_or_none

    run = open_store(tracking).call(lambda client: run_or_none(client, run_id))
    known = run.data.tags.get("prefect.flow_run_id") if run is not None else None
    if not known:
        return
    form = {"decision": approval.decision, "approved_by": approval.by[:_MOST_NAME], "note": approval.note[:_MOST_NOTE]}
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(known)).state
            key = state.state_details.pause_key if state is not None and state.is_paused() else None
            # A run of the same name may wait for the decision about another version.
            if (key or "").startswith(f"approval-{version}-"):
                client.resume_flow_run(UUID(known), run_input=form)
                say(f"the suspended flow run {known} continues")
    except Exception as error:  # another server, a deleted run, no permission: the decision is recorded in any case
        say(f"the flow run {known} was not resumed ({type(error).__name__}); if it still waits, resume it in Prefect")


@cache
def _has_prefect() -> bool:
    """Whether the environment, or `grpo up` in this folder, has a Prefect server that answers. This process then uses it."""
    address = os.environ.get(_ADDRESS)
    if not address:
        from grpo_tasks.operating.servers import PREFECT, Stack

        stack = Stack(Path.cwd())
        with suppress(UserError, OSError):  # a damaged record: grpo doctor and grpo up say so
            address = stack.addresses().environment[_ADDRESS] if PREFECT in stack.running() else None
    if not address:
        return False
    import httpx

    try:
        httpx.get(f"{address.rstrip('/')}/health", timeout=5.0)
    except httpx.HTTPError:
        # A server that is away must not delay the end of the command.
        say("the Prefect server is away: no automation hears of this")
        return False
    # Before Prefect is imported, because it reads its settings then.
    os.environ[_ADDRESS] = address
    return True
