"""Everything that can be started from the Prefect UI: each deployment with its queue, defaults, schedules and triggers.

`grpo up` applies deploy/prefect.yaml, which is written from this file, and keeps what users changed on the server
(operating/deployments.py). That concerns the parameters in this file, so a deployment without a form of its own names all.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from schemas.config.load import read_tree
from schemas.config.run import RunConfig
from schemas.config.section import form_values
from schemas.errors import UserError
from schemas.paths import DEPLOY

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment

POOL = "grpo"
QUEUES = ("cpu", "gpu")
FILE = DEPLOY / "prefect.yaml"
WORKDIR = "GRPO_WORKDIR"
"""Environment variable: the folder that relative paths in a config start from."""

Queue = Literal["cpu", "gpu"]
NIGHTLY = {"cron": "0 3 * * *", "timezone": "UTC", "slug": "nightly", "active": False}
WEEKLY = NIGHTLY | {"cron": "0 4 * * 0", "slug": "weekly-other-seed", "parameters": {"overrides": ["seed=7"]}}
SWEEP = {
    "source": "demo", "over": ["stages.0.learning_rate=1e-3,3e-4"], "seeds": 1, "overrides": [], "parallel": 1, "prune": True,
    "min_siblings": 2,
}  # fmt: skip
ON_NEW_DATA = {
    "type": "event",
    "enabled": True,
    "name": "retrain when the data has changed",
    "expect": ["grpo.data.changed"],
    "match": {"prefect.resource.id": "grpo.data.*"},
    "parameters": {
        "source": {"template": "{{ event.payload.source }}", "__prefect_kind": "jinja"},
        "overrides": {
            "__prefect_kind": "json",
            "value": {"__prefect_kind": "jinja", "template": "{{ event.payload.overrides | tojson }}"},
        },
    },
}
AFTER_VALIDATION = {
    "type": "event",
    "enabled": False,
    "name": "retrain after a validation of the data",
    "expect": ["prefect.flow-run.Completed"],
    # `grpo serve` serves it under the second name.
    "match_related": {"prefect.resource.name": ["validate", "validate-served"], "prefect.resource.role": "deployment"},
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """One entry in the list of deployments of the UI."""

    name: str
    flow: str
    """Module path. By file path, Prefect would load a second copy of the module."""
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    queue: Queue = "cpu"
    schedules: tuple[Mapping[str, Any], ...] = ()
    triggers: tuple[Mapping[str, Any], ...] = ()

    def entry(self) -> dict[str, Any]:
        """This deployment in the form that prefect.yaml needs."""
        lists = {"schedules": [dict(item) for item in self.schedules], "triggers": [dict(item) for item in self.triggers]}
        return {
            "name": self.name,
            "version": version("grpo-pipeline"),
            "tags": ["grpo", self.queue],
            "description": self.description,
            "entrypoint": self.flow,
            "parameters": dict(self.parameters),
            "work_pool": {"name": POOL, "work_queue_name": self.queue},
            **{name: items for name, items in lists.items() if items},
        }


def deployments() -> list[Deployment]:
    """All deployments. The form of a pipeline is filled in with a preset, so there is one deployment for each preset."""
    return [
        Deployment(
            "preset",
            "flows.pipeline.preset_flow",
            "Recommended. The whole pipeline from a preset or a YAML file, with a few settings changed: a form of three fields.",
            {"source": "demo", "overrides": [], "fresh": False},
        ),
        *(
            Deployment(
                name,
                "flows.pipeline.grpo_pipeline",
                f"The whole pipeline with every setting in the form, filled in with the preset {name}. "
                "To change a few settings, the deployment preset is quicker.",
                {"config": _preset(name), "fresh": False},
                queue,
            )
            for name, queue in _PIPELINES.items()
        ),
        *_single_steps(),
        Deployment(
            "sweep",
            "flows.sweeps.flow.sweep_flow",
            "Train every combination of the values of some settings, prune what lags behind, and compare.",
            SWEEP,
        ),
        Deployment(
            "retrain",
            "flows.retrain.retrain_flow",
            "Train again if data, code or config have changed since the last version, then decide on the champion.",
            {"source": "demo", "overrides": [], "start_from": "base", "force": False},
            schedules=(NIGHTLY, WEEKLY),
            triggers=(ON_NEW_DATA, AFTER_VALIDATION),
        ),
        Deployment(
            "watch-data",
            "flows.retrain.watch_data_flow",
            "Check the data files, and send the event that starts a retraining if they have changed.",
            {"source": "demo", "overrides": []},
            schedules=({"interval": 300, "slug": "every-five-minutes", "active": False},),
        ),
    ]


def _single_steps() -> list[Deployment]:
    demo = {"config": _preset("demo")}
    return [
        Deployment("validate", "flows.single.validate_flow", "Read the data and check every row.", demo),
        Deployment("rewards", "flows.single.rewards_flow", "The reward lab: test every reward, without any training.", demo),
        Deployment("train", "flows.single.train_flow", "Train a single stage.", demo | {"stage": "format"}, "gpu"),
        Deployment("merge", "flows.single.merge_flow", "Merge an adapter into the base model and prove the merge.", demo),
        Deployment(
            "publish",
            "flows.single.publish_flow",
            "Merge an adapter, compare it with base and champion, register it, decide.",
            demo,
        ),
        Deployment(
            "evaluate",
            "flows.single.evaluate_flow",
            "Evaluate any model: a registered model, a folder, an adapter or a hub id.",
            demo | {"model": "models:/grpo-demo@champion"},
        ),
    ]


_PIPELINES: dict[str, Queue] = {
    "demo": "cpu",
    "gsm8k-qwen2.5-0.5b": "gpu",
    "gsm8k-qwen2.5-1.5b": "gpu",
    "gsm8k-qwen2.5-1.5b-4gpu": "gpu",
}


def prefect_yaml() -> str:
    """The content of deploy/prefect.yaml."""
    tree = {
        "name": "grpo-pipeline",
        "prefect-version": version("prefect"),
        "pull": [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $" + WORKDIR + " }}"}}],
        "deployments": [deployment.entry() for deployment in deployments()],
    }
    head = f"# Written by `grpo deployments` from flows/deployments.py. Relative paths start from the folder in {WORKDIR}.\n"
    # Without anchors, which would make the file hard to read and to edit.
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    return head + yaml.dump(tree, sort_keys=False, allow_unicode=True, width=120, Dumper=dumper)


def _preset(name: str) -> dict[str, Any]:
    return form_values(read_tree(name), RunConfig)


def write_prefect_yaml(path: Path | None = None) -> Path:
    """Write `path`, by default deploy/prefect.yaml; raises `UserError` in an installed package, which has no checkout."""
    if path is None and FILE.is_relative_to(Path(__file__).parents[1] / "schemas"):
        raise UserError(
            "deploy/prefect.yaml belongs to a checkout, and this is an installed package", fix="name a file with --out"
        )
    path = path or FILE
    path.write_text(prefect_yaml(), encoding="utf-8")
    return path


def serve_all() -> None:
    """Create the deployments on the server at PREFECT_API_URL (`UserError` without one) and execute their runs, until Ctrl-C."""
    import prefect

    if not os.environ.get("PREFECT_API_URL"):
        raise UserError("no Prefect server is configured", fix="export PREFECT_API_URL=http://127.0.0.1:4200/api, or use grpo up")
    prefect.serve(*served())


def served() -> "list[RunnerDeployment]":
    """All deployments for a process that executes their runs itself."""
    from prefect.events import DeploymentEventTrigger
    from prefect.flows import EntrypointType  # type: ignore[attr-defined]
    from prefect.schedules import Cron, Interval, Schedule
    from prefect.utilities.importtools import import_object

    def schedule_of(*, cron: str | None = None, interval: float = 0.0, **options: Any) -> Schedule:
        return Cron(cron, **options) if cron else Interval(interval, **options)

    made = []
    for deployment in deployments():
        entry = deployment.entry()
        one = import_object(deployment.flow).to_deployment(
            f"{deployment.name}-served",
            description=entry["description"],
            tags=entry["tags"],
            version=entry["version"],
            parameters=entry["parameters"],
            schedules=[schedule_of(**given) for given in deployment.schedules],
            triggers=[DeploymentEventTrigger.model_validate(dict(given)) for given in deployment.triggers],
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        # Prefect would name the function that the flow wraps, which is none.
        one.entrypoint = deployment.flow
        made.append(one)
    return made
