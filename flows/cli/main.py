"""The command line, `grpo`: every command and the panel of `grpo --help` that lists it.

A command loads a config and calls a flow; it computes nothing itself. Help, a dry run and a refused config answer at once, so
each command imports what is heavy inside its function.
"""

import atexit
import gc
from collections.abc import Callable

import typer

from flows.cli import init, inspection, models, operate, run
from flows.sweeps import command as sweeps


def _collect_less_garbage() -> None:
    # The libraries make millions of objects that stay. Looking through them again and again, as Python does by default, took a
    # fifth of the computing time of a short command. Cycles are still collected, only later.
    gc.set_threshold(200_000, 50, 1_000)
    # At the end Python would look through all of them once more, after the result has been printed.
    atexit.register(gc.freeze)


app = typer.Typer(
    callback=_collect_less_garbage,
    help="Validate data, probe rewards, train with GRPO in stages, merge, evaluate, publish.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run the pipeline": (
        init.init,
        run.run,
        run.retrain,
        sweeps.sweep,
        run.validate,
        run.rewards,
        run.difficulty,
        run.train,
        run.evaluate,
        run.merge,
        run.step,
    ),
    "Look things up": (
        inspection.runs,
        inspection.models,
        inspection.completions,
        inspection.presets,
        inspection.fields,
        inspection.plan,
        inspection.trace,
        inspection.cluster,
        inspection.doctor,
    ),
    "Registered models": (
        models.chat,
        models.download,
        models.export,
        models.compare,
        models.lineage,
        models.promote,
        models.rollback,
        models.reproduce,
    ),
    "Servers and deployments": (
        operate.up,
        operate.down,
        operate.clean,
        operate.ui,
        operate.serve,
        operate.weights_server,
        operate.metrics_server,
        operate.deployments,
    ),
}
"""Title of a panel -> its commands, in the order of `grpo --help`."""
for _title, _commands in PANELS.items():
    for _command in _commands:
        app.command(rich_help_panel=_title)(_command)
