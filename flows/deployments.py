"""What can be triggered from the Prefect UI: every deployment with its queue, defaults, schedules and triggers.

deploy/prefect.yaml is written from here (`grpo deployments`) and applied by `prefect deploy --all`; `grpo up` does that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml

from schemas.config.load import PRESETS, read_tree
from schemas.config.run import RunConfig
from schemas.config.section import form_values

POOL = "grpo"
QUEUES = ("cpu", "gpu")
FILE = PRESETS.parent / "prefect.yaml"
WORKDIR = "GRPO_WORKDIR"
"""Environment variable with the folder that relative paths of a config start from."""

Queue = Literal["cpu", "gpu"]
NIGHTLY = {"cron": "0 3 * * *", "timezone": "UTC", "slug": "nightly", "active": False}
WEEKLY = {
    "cron": "0 4 * * 0",
    "timezone": "UTC",
    "slug": "weekly-other-seed",
    "active": False,
    "parameters": {"overrides": ["seed=7"]},
}
ON_NEW_DATA = {
    "type": "event",
    "enabled": True,
    "name": "retrain when the data changed",
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
    "match_related": {"prefect.resource.name": "validate", "prefect.resource.role": "deployment"},
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """One entry of the UI's list of deployments."""

    name: str
    flow: str
    """Module path; by file path Prefect would load a second copy of the module."""
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    queue: Queue = "cpu"
    schedules: tuple[Mapping[str, Any], ...] = ()
    triggers: tuple[Mapping[str, Any], ...] = ()

    @property
    def tags(self) -> list[str]:
        """For the filter of the UI."""
        return ["grpo", self.queue]

    def entry(self) -> dict[str, Any]:
        """This deployment as prefect.yaml wants it."""
        lists = {"schedules": [dict(item) for item in self.schedules], "triggers": [dict(item) for item in self.triggers]}
        return {
            "name": self.name,
            "version": version("grpo-pipeline"),
            "tags": self.tags,
            "description": self.description,
            "entrypoint": self.flow,
            "parameters": dict(self.parameters),
            "work_pool": {"name": POOL, "work_queue_name": self.queue},
            **{name: items for name, items in lists.items() if items},
        }


def deployments() -> list[Deployment]:
    """All of them. The forms of whole configs come filled in with a preset, so there is one for each preset."""
    demo = {"config": _preset("demo")}
    return [
        *(
            Deployment(
                name,
                "flows.pipeline.grpo_pipeline",
                f"The whole pipeline; the form is filled in with the preset {name}.",
                {"config": _preset(name), "fresh": False},
                queue,
            )
            for name, queue in _PIPELINES.items()
        ),
        Deployment(
            "preset",
            "flows.single.preset_flow",
            "The whole pipeline from a preset or a YAML file, with a few settings changed.",
            {"source": "demo", "overrides": []},
        ),
        Deployment("validate", "flows.single.validate_flow", "Read the data and judge every row.", demo),
        Deployment("rewards", "flows.single.rewards_flow", "The reward lab alone: try every reward before any training.", demo),
        Deployment("train", "flows.single.train_flow", "One stage alone.", demo | {"stage": "format"}, "gpu"),
        Deployment("merge", "flows.single.merge_flow", "Merge an adapter into the base model, with the proof.", demo),
        Deployment("publish", "flows.single.publish_flow", "Merge an adapter, evaluate, register it, decide.", demo),
        Deployment(
            "evaluate",
            "flows.single.evaluate_flow",
            "Evaluate any model: a registered one, a folder, an adapter or a hub id.",
            demo | {"model": "models:/grpo-demo@champion"},
        ),
        Deployment(
            "retrain",
            "flows.retrain.retrain_flow",
            "Train again if data, code or config changed since the last version; promote or not.",
            {"source": "demo", "overrides": [], "start_from": "base", "force": False},
            schedules=(NIGHTLY, WEEKLY),
            triggers=(ON_NEW_DATA, AFTER_VALIDATION),
        ),
        Deployment(
            "watch-data",
            "flows.retrain.watch_data_flow",
            "Send the event that retrains when the content of the data files is new.",
            {"source": "demo"},
            schedules=({"interval": 300, "slug": "every-five-minutes", "active": False},),
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
    head = f"# Written by `grpo deployments` from flows/deployments.py. {WORKDIR}: the folder that relative paths start from.\n"
    return head + yaml.dump(tree, sort_keys=False, allow_unicode=True, width=120, Dumper=_Plain)


class _Plain(yaml.SafeDumper):
    """Without anchors, which make a file hard to read and to change by hand."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def _preset(name: str) -> dict[str, Any]:
    return form_values(read_tree(name), RunConfig)


def write_prefect_yaml(path: Path = FILE) -> Path:
    """Write the file anew."""
    path.write_text(prefect_yaml(), encoding="utf-8")
    return path
