"""Commands for the servers, the workers and the deployments."""

import os
import signal
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.environment import prepare_environment, prepare_flow, report_errors
from flows.cli.options import MlflowPort, Postgres, PrefectPort, TrackingUri, Workers, parse_age
from flows.cli.progress import shown_progress
from flows.cli.show import out, say, show
from schemas.config.load import tracking_at
from schemas.results.base import Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grpo_tasks.operating.clean import Found
    from grpo_tasks.operating.servers import Stack


def up(prefect_port: PrefectPort = 4200, mlflow_port: MlflowPort = 5000, workers: Workers = 1, postgres: Postgres = None) -> None:
    """Start the Prefect server, the MLflow server, workers and all deployments in the background. Stop them: `grpo down`.

    A supervisor starts a server or a worker again when it ends.
    """
    with report_errors():
        start_stack(prefect_port, mlflow_port, workers, postgres)
        say("stop everything: grpo down")


def down() -> None:
    """Stop what `grpo up` started in this folder, and nothing else."""
    from grpo_tasks.operating.servers import Stack

    with report_errors():
        stopped = Stack(Path.cwd()).stop()
        say(f"stopped: {', '.join(stopped)}" if stopped else "nothing is running here")


def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Runs to remove as a whole, or with --superseded or --caches the runs whose parts go; * stands for anything.",
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs (resources.output_dir).")] = Path("runs"),
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Results of steps that finished again since, with other inputs; damaged copies.")
    ] = False,
    caches: Annotated[
        bool, typer.Option("--caches", help="Downloaded models, logs of servers that were stopped, hashes of large files.")
    ] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only what was last written so long ago, such as 30d or 12h.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without this nothing is removed.")] = False,
    tracking_uri: TrackingUri = None,
) -> None:
    """List what runs, caches and servers have left on this disk, or remove some of it. What is in use stays."""
    with report_errors():
        age_s = 0.0 if older_than is None else parse_age(older_than)
        with shown_progress("measuring what lies here"):
            prepare_environment()
            from grpo_tasks.operating import clean as room

            found = room.find(runs, Path.cwd(), tracking_at(tracking_uri))
        kinds: list[room.Kind] = ["superseded", "remains"] if superseded else []
        kinds += ["cache"] if caches else []
        if not (names or kinds or older_than):
            show_leftovers(found, total="in all")
            say("remove: grpo clean NAME, --superseded, --caches or --older-than 30d, each with --yes")
            return
        room.check_names(names or [], found)
        chosen = room.select(found, names=names or [], kinds=kinds, older_than_s=age_s)
        if not yes:
            show_leftovers(chosen, total="would be removed")
            say("nothing was removed; add --yes")
            return
        show_leftovers(chosen, removed=room.delete(chosen), total="removed")


def show_leftovers(found: "Sequence[Found]", *, removed: "Sequence[Found] | None" = None, total: str) -> None:
    """Print folders with their sizes, why some of them stay, and the sum of the others."""
    rows = []
    for one in found:
        kept = "" if removed is None else "came into use"
        state = "removed" if removed and one in removed else one.keep or kept or one.by_name or one.note
        when = datetime.fromtimestamp(one.used).astimezone()
        rows.append([str(one.path), one.kind, f"{one.size_bytes / 1e6:,.1f} MB", f"{when:%Y-%m-%d %H:%M}", state])
    if rows:
        columns = ("path", "what", "size", "last written", "note")
        show(Section(columns=columns, rows=rows, right=("size",), extra=("what", "last written")))
    # What lies in the folder of a run is a part of it.
    counted = [one for one in found if not one.keep or total == "in all"] if removed is None else removed
    whole = {one.path for one in counted if one.kind == "run"}
    size = sum(one.size_bytes for one in counted if one.path in whole or not whole & set(one.path.parents))
    say(f"{total}: {size / 1e6:,.1f} MB")


def ui(prefect_port: PrefectPort = 4200, mlflow_port: MlflowPort = 5000, workers: Workers = 1, postgres: Postgres = None) -> None:
    """The same as `grpo up`, in the foreground. Ctrl-C stops everything."""
    with report_errors():
        from grpo_tasks.operating.servers import supervise

        stack = start_stack(prefect_port, mlflow_port, workers, postgres, supervised=False)
        signals: list[int] = []
        # A flag: Python drops a KeyboardInterrupt that is raised while an object is finalized, and the servers would run on.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: signals.append(number))
        say("Ctrl-C stops everything")
        try:
            supervise(stack, postgres, stop_requested=lambda: bool(signals))
            say("stopping everything" if signals else "stopped by grpo down")
        finally:
            stack.stop()


def weights_server(
    folder: Annotated[Path, typer.Argument(help="Where the weights go; the vLLM server must see it under the same path.")],
    host: Annotated[str, typer.Option(help="Address to listen on. Other than 127.0.0.1 only with VLLM_API_KEY.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8001,
) -> None:
    """Receive the policy for a vLLM server that does not see the files of the trainer (rollout.vllm.weights_urls)."""
    with report_errors():
        from grpo_tasks.content.weights_server import serve_weights

        say(f"receives weights at http://{host}:{port} into {folder}; Ctrl-C stops it")
        serve_weights(folder, host, port, os.environ.get("VLLM_API_KEY") or None)


def metrics_server(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs (resources.output_dir).")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9464,
) -> None:
    """Show the last update of every stage to Prometheus, at /metrics."""
    with report_errors():
        from grpo_tasks.operating.prometheus import serve_metrics

        say(f"http://{host}:{port}/metrics shows the stages below {runs}; Ctrl-C stops it")
        serve_metrics(runs, host, port)


def start_stack(prefect_port: int, mlflow_port: int, workers: int, postgres: str | None, *, supervised: bool = True) -> "Stack":
    """Start servers, workers and deployments, and print the addresses."""
    prepare_environment(servers=False)
    from grpo_tasks.operating.commands import create_databases, mlflow_environment
    from grpo_tasks.operating.servers import Stack
    from grpo_tasks.tracking.store import prepare
    from schemas.paths import DEPLOY

    if postgres:
        create_databases(postgres)
    # A new MLflow server migrates its database in place, and a kill in the middle leaves a half-migrated one. So migrate it here.
    prepare(mlflow_environment(postgres)["MLFLOW_BACKEND_STORE_URI"])
    stack = Stack(Path.cwd(), report=lambda line: out.print(f"[dim]{line}[/]", highlight=False))
    at = stack.start(
        prefect_port, mlflow_port, postgres=postgres, deploy_file=DEPLOY / "prefect.yaml", workers=workers, supervised=supervised
    )
    say(f"Prefect UI  {at.prefect}")
    say(f"MLflow UI   {at.mlflow}")
    return stack


def deployments(
    into: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write. Default: deploy/prefect.yaml.")
    ] = None,
) -> None:
    """Write deploy/prefect.yaml again from flows/deployments.py."""
    with report_errors():
        from flows.deployments import write_prefect_yaml

        say(f"written: {write_prefect_yaml(into)}")


def serve() -> None:
    """Serve all deployments from this process, without a work pool. Needs PREFECT_API_URL. Ctrl-C stops it."""
    with report_errors():
        prepare_flow()
        from flows.deployments import serve_all

        serve_all()
