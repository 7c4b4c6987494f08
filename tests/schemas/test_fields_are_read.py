"""A setting that nothing reads is a promise that nobody keeps."""

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from mypy import build, nodes
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.types import Instance, UnionType, get_proper_type

from grpo_tasks.stage.guards import GUARDS
from schemas.config.guards import GuardsConfig
from schemas.config.section import Section

ROOT = Path(__file__).resolve().parent.parent.parent
THROUGH = {
    ("EvaluationConfig", "rewards"): ("RunConfig", "scoring"),
    ("EvaluationConfig", "evaluators"): ("RunConfig", "scoring"),
    ("EvaluationConfig", "engine"): ("RunConfig", "evaluated"),
    ("RewardsConfig", "functions"): ("RewardsConfig", "resolve"),
    ("RewardsConfig", "module_dir"): ("RewardsConfig", "module_dirs"),
    ("DemonstrationsConfig", "module_dir"): ("DemonstrationsConfig", "module_dirs"),
    ("InteractionConfig", "module_dir"): ("InteractionConfig", "module_dirs"),
    ("RewardConfig", "weight"): ("RewardsConfig", "resolve"),
    ("StageConfig", "gradient_accumulation_steps"): ("StageConfig", "completions_per_update"),
    ("StageConfig", "skip_dead_groups"): ("StageConfig", "skips_dead"),
    ("StageConfig", "num_iterations"): ("StageConfig", "updates_per_rollout"),
    ("StageConfig", "steps_per_generation"): ("StageConfig", "updates_per_rollout"),
    ("ModelConfig", "merged_system_prompt"): ("RunConfig", "merged_system_prompt"),
    ("TaskConfig", "rewards"): ("DataConfig", "rewards_of"),
    ("TrackingConfig", "experiment"): ("RunConfig", "experiment"),
    ("TrackingConfig", "registered_model"): ("RunConfig", "registered_model"),
}
"""Fields that are read through a method or property of schemas/config, which is what the pipeline reads."""
BY_NAME = {("GuardsConfig", guard.event) for guard in GUARDS} | {
    (type(getattr(GuardsConfig(), guard.event)).__name__, field) for guard in GUARDS for field in ("action", "threshold")
}
"""`Guards.look` reads action and threshold of all guards as getattr(config, guard.event)."""


def sections():
    files = sorted((ROOT / "schemas/config").rglob("*.py"))
    modules = [import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)) for file in files]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Section)}
    return sorted(kinds - {Section}, key=lambda kind: kind.__name__)


def reads(*packages):
    """How often each attribute of a section is read, by the types that mypy infers: a `name` of something else is none."""
    options = Options()
    options.export_types, options.incremental = True, False
    # Types of libraries say nothing here, and would take a minute.
    options.follow_imports, options.ignore_missing_imports = "skip", True
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    types = build.build([BuildSource(str(file), name) for file, name in zip(files, names, strict=True)], options).types
    found = Counter()
    for expression in types:
        if isinstance(expression, nodes.MemberExpr) and expression.expr in types:
            owner = get_proper_type(types[expression.expr])
            for kind in map(get_proper_type, owner.items if isinstance(owner, UnionType) else [owner]):
                if isinstance(kind, Instance) and kind.type.module_name.startswith("schemas.config."):
                    found[kind.type.name, expression.name] += 1
    return found


@pytest.fixture(scope="module")
def read():
    """Without the reads of schemas/ itself: a validator that looks at a field does nothing with it."""
    return reads("flows", "grpo_tasks", "schemas") - reads("schemas")


@pytest.mark.slow
def test_every_field_of_a_config_is_read_by_the_pipeline(read):
    used = set(read) | BY_NAME | {field for field, through in THROUGH.items() if through in read}
    dead = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name in section.model_fields
        if (section.__name__, name) not in used
    ]
    assert dead == []


def test_a_field_that_is_read_through_a_method_is_read_there():
    source = "".join(file.read_text() for file in sorted((ROOT / "schemas/config").glob("*.py")))
    for (_, field), (_, method) in THROUGH.items():
        body = source.split(f"def {method}(")[1].split("    def ")[0]
        assert f".{field}" in body or f'"{field}"' in body
