"""The command line: `grpo`. Reads a config and calls a flow; nothing is computed here.

Help, a dry run and a refused config answer at once, so everything heavy is imported inside the command that needs it.
"""

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.panel import Panel

from schemas.config.load import load_config, tracking_at
from schemas.errors import ConfigError, OrchestratorError, UserError, refused_by_system
from schemas.secret import has_password, hide, hide_output

if TYPE_CHECKING:
    from grpo_tasks.operating.servers import Stack
    from schemas.config.run import RunConfig

app = typer.Typer(
    help="Validate data, probe rewards, train with GRPO in stages, merge, evaluate, publish.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
out = Console()

PATIENT, BRIEF = "8", "4"
"""Times that a request to Prefect is repeated, after 2, 4, 8 ... seconds."""

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset's name: demo, gsm8k-qwen2.5-0.5b, ...")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field, e.g. stages.0.learning_rate=1e-5.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run every step again, also those whose inputs have not changed.")]


@app.command()
def run(
    config: Config,
    override: Set = None,
    fresh: Fresh = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config and show the plan; run nothing.")] = False,
) -> None:
    """The whole pipeline: validate, probe rewards, train every stage, merge, evaluate, publish."""
    with errors_told():
        settings = checked_config(config, override)
        if dry_run:
            from flows.cli.show import show_plan

            show_plan(out, settings)
            return
        prepare_flow()
        from flows.cli.show import show_pipeline
        from flows.pipeline import grpo_pipeline

        show_pipeline(out, settings, grpo_pipeline(settings, fresh))


@app.command()
def validate(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Read the data and judge every row."""
    with errors_told():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_data
        from flows.single import validate_flow

        show_data(out, validate_flow(settings, fresh))


@app.command()
def rewards(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """The reward lab alone: try every reward function of every stage before any training."""
    with errors_told():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_lab
        from flows.single import rewards_flow

        show_lab(out, rewards_flow(settings, fresh))


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model or adapter folder, a hub id, or models:/NAME@ALIAS.")],
    config: Config,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Evaluate a model on the config's held-out prompts."""
    with errors_told():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_evaluations
        from flows.single import evaluate_flow

        show_evaluations(out, [evaluate_flow(model, settings, fresh)])


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A folder with adapter_config.json.")],
    config: Config,
    into: Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Copy the merged model there.")] = None,
    override: Set = None,
) -> None:
    """Merge an adapter into the config's base model and prove that nothing changed."""
    with errors_told():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_merge
        from flows.single import merge_flow

        show_merge(out, merge_flow(adapter, settings, into))


@app.command()
def trace(
    row: Annotated[str, typer.Argument(metavar="ROW", help="A prompt_id (a column of every table), or FILE:LINE of the data.")],
    config: Config,
    override: Set = None,
) -> None:
    """One row's way through the last run: line, verdict, completions with their rewards, evaluations."""
    with errors_told():
        settings = load_config(config, override)
        from flows.cli.show import show_trace
        from grpo_tasks.operating.trace import trace_row

        show_trace(out, trace_row(settings.resources.output_dir / settings.name, row))


Model = Annotated[str, typer.Argument(metavar="MODEL", help="NAME@ALIAS, NAME/VERSION, or NAME for its champion.")]


def _without_password(address: str | None) -> str | None:
    # Prefect records it, and everybody on the machine can read a command line.
    if address and has_password(address):
        raise typer.BadParameter(
            "it holds a password; export MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return address


TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        callback=_without_password,
        help="Where MLflow is; without it MLFLOW_TRACKING_URI, without that sqlite:///mlflow.db.",
    ),
]


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Registered model.")],
    to: Annotated[str | None, typer.Option("--to", metavar="VERSION", help="Restore this version instead of `previous`.")] = None,
    reason: Annotated[str, typer.Option(help="Kept as a tag of the version that is rolled back.")] = "",
    tracking_uri: TrackingUri = None,
) -> None:
    """Restore the previous champion."""
    with errors_told():
        prepare_environment()
        from grpo_tasks.tracking.registry import rollback as roll_back

        left, now = roll_back(name, to=to, reason=reason, tracking=tracking_at(tracking_uri))
        out.print(f"{name}: version {now} is the champion now, version {left} is `previous`")


@app.command()
def download(
    model: Model,
    into: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the model.")],
    tracking_uri: TrackingUri = None,
) -> None:
    """Fetch a registered model and check every file; after an interruption only the missing files are fetched."""
    with errors_told():
        prepare_environment()
        from grpo_tasks.tracking.models import ORIGIN, fetch_version
        from grpo_tasks.tracking.registry import find_version, lineage_of

        tracking = tracking_at(tracking_uri)
        version = find_version(model, tracking)
        folder = fetch_version(version, tracking, into)
        lineage_of(f"{version.name}/{version.version}", tracking).save(folder / ORIGIN)
        out.print(f"{version.name} version {version.version}: {folder} (every file verified)", soft_wrap=True)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="NAME@ALIAS, NAME/VERSION, NAME, or a model folder.")],
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="One question; without it, one after the other.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; else the one the model was trained with.")] = None,
    temperature: Annotated[float, typer.Option(min=0.01)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 0.9,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    tracking_uri: TrackingUri = None,
) -> None:
    """Ask a model in the terminal."""
    with errors_told():
        prepare_environment()
        from flows.cli.chat import talk
        from grpo_tasks.policy.chat_session import ChatSettings

        manner = ChatSettings(temperature, top_p, max_new_tokens, greedy)
        talk(out, model, question, system=system, manner=manner, tracking=tracking_at(tracking_uri))


@app.command()
def lineage(model: Model, tracking_uri: TrackingUri = None) -> None:
    """Where a registered model came from: run, data, rewards, config, commit, environment."""
    with errors_told():
        prepare_environment()
        from flows.cli.show import show_lineage
        from grpo_tasks.tracking.registry import lineage_of

        show_lineage(out, lineage_of(model, tracking_at(tracking_uri)))


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="MLflow run id (or its beginning), run name, or NAME@ALIAS.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The other one.")],
    into: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path("comparison.html"),
    tracking_uri: TrackingUri = None,
) -> None:
    """Two runs side by side: settings, paired differences of the evaluation, curves, completions where they disagree."""
    with errors_told():
        prepare_environment()
        from flows.cli.show import show_comparison
        from grpo_tasks.reporting.compare import compare_runs, write_comparison
        from grpo_tasks.tracking.past_runs import load_past_run

        tracking = tracking_at(tracking_uri)
        found = compare_runs(load_past_run(first, tracking), load_past_run(second, tracking))
        show_comparison(out, found)
        out.print(f"page: {write_comparison(found, into.resolve())}", soft_wrap=True)


@app.command()
def reproduce(
    model: Model,
    output_dir: Annotated[Path, typer.Option("--output-dir", metavar="DIR", help="New folder for everything written.")] = Path(
        "reproduced"
    ),
    tracking_uri: TrackingUri = None,
) -> None:
    """Make a registered model again from what is recorded; exit code 1 when the adapter came out different."""
    with errors_told():
        prepare_environment()
        from flows.cli.show import show_reproduction
        from flows.registry import reproduce_flow

        made = reproduce_flow(model, output_dir, tracking_uri)
        show_reproduction(out, made)
        if not made.same:
            sys.exit(1)


@app.command()
def doctor() -> None:
    """What is installed, which device, which servers answer, how much disk is free."""
    from grpo_tasks.operating.doctor import findings

    with errors_told():
        for finding in findings():
            out.print(f"[{'green' if finding.well else 'yellow'}]{finding.what:<18}[/] {finding.found}")


@app.command()
def fields() -> None:
    """Every field of a config with its meaning and default."""
    from flows.cli.show import show_fields

    show_fields(out)


PrefectPort = Annotated[int, typer.Option(help="Port of the Prefect UI; if it is taken, the next free one.", min=1, max=65535)]
MlflowPort = Annotated[int, typer.Option(help="Port of the MLflow UI; if it is taken, the next free one.", min=1, max=65535)]
Workers = Annotated[int, typer.Option(help="Worker processes that run what the UI triggers.", min=1, max=256)]
Postgres = Annotated[
    str | None,
    typer.Option(envvar="GRPO_POSTGRES", metavar="URL", help="postgresql://USER:PASSWORD@HOST:PORT instead of SQLite files."),
]


@app.command()
def up(prefect_port: PrefectPort = 4200, mlflow_port: MlflowPort = 5000, workers: Workers = 1, postgres: Postgres = None) -> None:
    """Prefect server, MLflow server, workers and all deployments on this machine, in the background; `grpo down` ends them."""
    with errors_told():
        start_stack(prefect_port, mlflow_port, workers, postgres)
        out.print("grpo down ends them")


@app.command()
def down() -> None:
    """End what `grpo up` started in this folder, and nothing else."""
    from grpo_tasks.operating.servers import Stack

    with errors_told():
        ended = Stack(Path.cwd()).stop()
        out.print(f"ended: {', '.join(ended)}" if ended else "nothing runs here")


@app.command()
def ui(prefect_port: PrefectPort = 4200, mlflow_port: MlflowPort = 5000, workers: Workers = 1, postgres: Postgres = None) -> None:
    """The same as `grpo up` in the foreground: Ctrl-C ends all."""
    with errors_told():
        stack = start_stack(prefect_port, mlflow_port, workers, postgres)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        out.print("Ctrl-C ends all")
        try:
            while True:
                stack.check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            out.print("ending all")
        finally:
            stack.stop()


def start_stack(prefect_port: int, mlflow_port: int, workers: int, postgres: str | None) -> "Stack":
    """Bring everything up and say where it is."""
    prepare_environment()
    from flows.deployments import FILE
    from grpo_tasks.operating.servers import Stack, create_databases, mlflow_environment
    from grpo_tasks.tracking.store import prepare

    if postgres:
        create_databases(postgres)
    # A server migrates its database in place; killed meanwhile, it leaves half of one. It finds a whole one instead.
    prepare(mlflow_environment(postgres)["MLFLOW_BACKEND_STORE_URI"])
    stack = Stack(Path.cwd(), tell=lambda line: out.print(f"[dim]{line}[/]", highlight=False))
    at = stack.start(prefect_port, mlflow_port, postgres=postgres, deploy_file=FILE, workers=workers)
    out.print(f"Prefect UI  {at.prefect}", highlight=False)
    out.print(f"MLflow UI   {at.mlflow}", highlight=False)
    return stack


@app.command()
def deployments() -> None:
    """Regenerate deploy/prefect.yaml from flows/deployments.py."""
    from flows.deployments import write_prefect_yaml

    out.print(f"written: {write_prefect_yaml()}")


@app.command()
def serve() -> None:
    """Serve all deployments from this process, without a work pool; needs PREFECT_API_URL. Ctrl-C ends it."""
    with errors_told():
        prepare_flow()
        from flows.serving import serve_all

        serve_all()


def checked_config(source: str, override: list[str] | None) -> "RunConfig":
    """The config, once its inputs are there: refused here, before Prefect takes seconds to start."""
    from flows.checks import check_inputs

    settings = load_config(source, override)
    check_inputs(settings)
    return settings


def prepare_environment() -> None:
    """Settings of the libraries underneath, where the user has made none: no telemetry, no chatter, patience."""
    defaults = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # On a busy or slow machine Prefect's own server needs more than its 20 s.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        # A server that goes away in the middle: up to eight minutes, twice as long each time.
        "PREFECT_CLIENT_MAX_RETRIES": PATIENT,
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    hide_output()
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        with suppress(KeyError):
            _check_address(name, os.environ[name])
    _check_working_directory()
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)
        logging.getLogger(name).addFilter(_without_secrets)


def _check_address(name: str, address: str) -> None:
    try:
        urlsplit(address)
    except ValueError as error:
        raise ConfigError(f"{address} is no address: {error}", place=name, fix=f"correct it, or unset {name}") from error


def _check_working_directory() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UserError("the working directory does not exist any more", fix="change to a folder that does") from error


def prepare_flow() -> None:
    """The same, and the Prefect server that is configured answers."""
    prepare_environment()
    _look_for_prefect(os.environ.get("PREFECT_API_URL"))
    _lock_temporary_server()


def _lock_temporary_server() -> None:
    """Give the server that Prefect starts for a flow without one a password that only this command and its children know.

    Without it every web page could write to that server's database, from which a later worker takes what it runs.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    # A profile may name a server where the environment names none.
    if get_current_settings().api.url is None:
        password = os.environ.setdefault("PREFECT_SERVER_API_AUTH_STRING", f"grpo:{secrets.token_urlsafe(24)}")
        os.environ["PREFECT_API_AUTH_STRING"] = password
        # Nobody starts this server again while the command waits for it.
        if os.environ["PREFECT_CLIENT_MAX_RETRIES"] == PATIENT:
            os.environ["PREFECT_CLIENT_MAX_RETRIES"] = BRIEF
        refresh_global_settings_context()


def _look_for_prefect(address: str | None) -> None:
    """Say at once that a server was never there, instead of waiting for it as for one that went away."""
    if address is None:
        return
    import httpx

    for attempt in range(5):
        time.sleep(attempt)
        with suppress(httpx.TransportError):
            httpx.get(f"{address.rstrip('/')}/health", timeout=5.0)
            return
    raise OrchestratorError(
        "the Prefect server does not answer",
        place=f"PREFECT_API_URL={address}",
        fix="start it (grpo up, or prefect server start), or unset PREFECT_API_URL: flows then use a temporary one",
    )


def _without_traceback(record: logging.LogRecord) -> bool:
    # An error of the user's says where and what to do; the way it took through our code helps nobody.
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UserError) or refused_by_system(error) is not None:
        record.exc_info = record.exc_text = None
    return True


def _without_secrets(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (hidden := hide(message)) != message:
        record.msg, record.args = hidden, None
    return True


@contextmanager
def errors_told() -> Iterator[None]:
    """Show an error of the user's as a panel and end with its exit code; anything else is ours and keeps its traceback."""
    try:
        yield
    except UserError as error:
        _show_and_exit(error)
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None:
            raise
        _show_and_exit(refused)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_and_exit(error: UserError) -> NoReturn:
    panel = Panel(str(error), title=error.title, border_style="red", title_align="left")
    Console(stderr=True, highlight=False, markup=False).print(panel)
    sys.exit(error.exit_code)
