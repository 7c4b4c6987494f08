"""The steps of the pipeline as plain functions: no server, no tracking, no skipped steps.

    load_data -> DataReport -> train_stage -> StageResult -> merge -> MergeProof -> evaluate -> EvalReport
               measure_difficulty -> DifficultyReport --^                           generate -> texts

    from grpo_tasks.library import evaluate, generate, load_data, merge, train_stage
    from schemas.config.load import load_config

    def brief(completions, **columns):
        return [1.0 if len(completion[0]["content"]) < 80 else 0.0 for completion in completions]

    config = load_config("demo", ["stages.0.max_steps=20"])
    data = load_data(config, "work/data")
    stage = train_stage(config, "format", data, "work/format", rewards={"brief": brief})
    merged = merge(config, stage.model, data, "work/merged")
    print(evaluate(config, merged.model, data, "work/evaluation").metrics["format_rate"])
    print(generate(config, merged.model, ["What is 15 + 27?"]))

Each function writes its files into the folder that it is given, and returns the result object of the pipeline's step
(schemas/results/), which the next function takes. Training, merging and sampling run in a child process, so their memory is free
afterwards and a crash does not take the notebook along. Errors that the user can fix are `schemas.errors.UserError`s.

Within `with listening(show):` of grpo_tasks/kit/progress.py each function tells `show` how far it is.

Left out: the reward lab (`grpo rewards`), the model registry, and the decision about the champion.

Rewards run in a worker process, which imports them by name. Those of a notebook, or of the script that was started, are written
to a module, with what they use. An instance is written as its class and its plain attributes.
"""

import ast
import functools
import inspect
import linecache
import logging
import math
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from grpo_tasks.data.table import prompt_id, read_table
from grpo_tasks.kit.cards import fastest_dtype
from grpo_tasks.running.progress import StageProgress, StepProgress
from grpo_tasks.running.step import Inputs, Made, Step
from grpo_tasks.stage.kept_prompts import choose_prompts, require_prompts
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.steps.evaluate_model import evaluate_model
from grpo_tasks.steps.measure_difficulty import measure_difficulty as measure_step
from grpo_tasks.steps.merge_adapter import merge_adapter
from grpo_tasks.steps.prepare_data import prepare_data
from grpo_tasks.steps.train_stage import train_stage as train_step
from grpo_tasks.steps.validate_data import validate_data
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.config.run import RunConfig, Scoring
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.prompts import PromptRow
from schemas.results.data import DataReport
from schemas.results.evaluation import DifficultyReport, EvalReport
from schemas.results.model import MergeProof, ModelRef, StageResult

if TYPE_CHECKING:
    from grpo_tasks.rollout.engine import Completion

Reward = Callable[..., Any] | str
"""A callable with TRL's signature, a class of such callables, or "package.module:name"."""
MODULE = "notebook_rewards"
"""Name of the module that holds the source of rewards from a notebook."""
_OWN_MODULE = "put it into a module file and import it from there"
_INSTALLED = ("site-packages", "dist-packages")


def base_model(config: RunConfig) -> ModelRef:
    """The base model of a config: where training starts by default, and what to compare a trained model with."""
    adapter = config.start_from and config.start_from.resolve()
    return ModelRef(path=config.model.path, revision=config.model.revision, adapter=adapter)


def load_data(config: RunConfig, directory: str | Path) -> DataReport:
    """Read and validate the data of a config. `directory` gets train.parquet, eval.parquet, quarantine.parquet and report.md.

    `DataError` where a file cannot be read, or too many rows are bad; the message names file, line and rule.
    """
    return make(validate_data, directory, config, make(prepare_data, directory, config))


def measure_difficulty(
    config: RunConfig, data: DataReport, directory: str | Path, *, start: ModelRef | None = None
) -> DifficultyReport:
    """Measure how often each training prompt is solved, by the rewards of each stage of the config.

    Args:
        config: its section difficulty has `samples` or `pass_rate_column`.
        data: what `load_data` returned.
        directory: gets pass_rates.parquet, report.md, and samples.parquet with every completion.
        start: the model to sample from; by default the base model.

    `ConfigError` where the config asks for no samples and names no column, `DataError` where a value of it is none between 0 and
    1.
    """
    if config.difficulty.pass_rate_column is None and config.difficulty.samples == 0:
        raise ConfigError("nothing would be sampled", place="difficulty.samples", fix="difficulty.samples: 8")
    start = start or base_model(config)
    config = config.difficulty_of(config.stages, adapter=start.adapter is not None)
    return make(measure_step, directory, config, "start", start, data.train_table)


def train_stage(
    config: RunConfig,
    stage: str | StageConfig,
    data: DataReport,
    directory: str | Path,
    *,
    start: ModelRef | None = None,
    rewards: Mapping[str, Reward] | None = None,
    difficulty: DifficultyReport | None = None,
    in_process: bool = False,
) -> StageResult:
    """Train one stage. Calling it again resumes an interrupted stage, and only reads a finished one.

    Args:
        config: its sections model, rewards, rollout, resources and the seed.
        stage: a stage of the config by name, or a stage of your own.
        data: what `load_data` returned.
        directory: the stage directory (grpo_tasks/stage/stage_dir.py lists its files; metrics.jsonl has a line for each update).
        start: the model to start from, for example the `model` of an earlier `StageResult`; by default the base model.
        rewards: reward functions to use besides those of the stage, by name: a function with TRL's signature
            `f(prompts, completions, **columns) -> list[float]`, or "package.module:function".
        difficulty: what `measure_difficulty` returned. The stage then trains on the prompts that its `keep_pass_rate` leaves.
        in_process: train in this process, for a debugger. By default a child process trains.

    Raises:
        ConfigError: a reward function cannot be used here, or the directory holds another stage.
        RewardError, TrainingError: the stage failed.
    """
    config = _with_dtype(config)
    folder, start = _folder(directory), start or base_model(config)
    config = config.model_copy(update={"rewards": add_rewards(config.rewards, rewards or {}, folder)})
    settings = config.stage(stage) if isinstance(stage, str) else stage
    names = [*settings.rewards, *(name for name in rewards or {} if name not in settings.rewards)]
    settings = settings.model_copy(update={"rewards": names})
    key = train_step.key(config.resources, config, settings, start, data, difficulty)
    train = data.train
    if difficulty is not None:
        choice = choose_prompts(data.train, read_table(difficulty.pass_rates), settings)
        require_prompts(choice.counts, settings, config.difficulty.min_prompts)
        train = choice.write(StageDir(folder))
    spec = StageSpec.of(config, settings, start, data, key=key, train=train, resources=config.resources)
    with (
        StepProgress(f"train_stage-{settings.name}", folder),
        StageProgress(settings, StageDir(folder), ship=lambda: None) as progress,
    ):
        return run_stage(spec, folder, in_process=in_process, tick=progress.tick)


def make(step: Step[Inputs, Made], directory: str | Path, config: RunConfig, *inputs: Any) -> Made:
    """What any step of grpo_tasks/steps makes in a folder, such as one that you have added.

    `step` is such as `grpo_tasks.steps.validate_data.validate_data`, `config` has the settings that it declares, and `inputs` are
    its further inputs, in their order.
    """
    made: Callable[..., Made] = step.made_in
    return made(_folder(directory), config.resources, _with_dtype(config), *inputs)


def _with_dtype(config: RunConfig) -> RunConfig:
    # What model.dtype auto stands for on this machine.
    named = {"dtype": fastest_dtype(config.resources.device)} if config.model.dtype == "auto" else {}
    return config.model_copy(update={"model": config.model.model_copy(update=named)})


def merge(config: RunConfig, model: ModelRef, data: DataReport, directory: str | Path) -> MergeProof:
    """Merge the adapter of a trained model into its base, save the result and prove that it is the same policy.

    Args:
        config: its sections model and rollout, and what the prompts show: `data.system_prompt` and the tools.
        model: `StageResult.model`.
        data: its held-out prompts are used for the proof.
        directory: gets model/, which `transformers` loads without this package.

    `MergeError` where the merged or the saved model differs from base + adapter.
    """
    return make(merge_adapter, directory, config, model, data)


def evaluate(
    config: RunConfig,
    model: ModelRef,
    data: DataReport,
    directory: str | Path,
    *,
    label: str = "model",
    rewards: Mapping[str, Reward] | None = None,
) -> EvalReport:
    """Evaluate a model on the held-out prompts: each metric of schemas/metrics.py EVALUATION with its confidence interval.

    Args:
        config: its sections evaluation, completion, rewards, rollout, resources and the seed.
        model: `base_model(config)`, `StageResult.model` or `MergeProof.model`.
        data: what `load_data` returned.
        directory: gets samples.parquet (every completion with its scores) and report.md.
        label: name of the model in the report.
        rewards: functions that are reported besides those of the config, by name, as in `train_stage`; they have no weight.
    """
    scoring = config.scoring()
    if rewards:
        section = scoring.rewards if scoring is not None else config.rewards
        weighted, reported = (scoring.weighted, scoring.reported) if scoring is not None else ([], [])
        reported = [*reported, *rewards]
        section = add_rewards(section, rewards, _folder(directory))
        scoring = Scoring(rewards=section, weighted=weighted, reported=reported, tasks=config.task_rewards(reported))
    return make(evaluate_model, directory, config.evaluated(), label, model, data, scoring)


def generate(
    config: RunConfig, model: ModelRef, questions: Sequence[str], *, num_samples: int = 1, temperature: float = 0.0
) -> list[list[str]]:
    """Ask a model questions in this process, with the system prompt of the config; its tools or its environment answer the model.

    Args:
        config: its sections model, data (`system_prompt`), rollout, interaction, completion, resources and the seed.
        model: as in `evaluate`.
        questions: one user message each.
        num_samples: completions per question.
        temperature: 0 always takes the most likely token.

    Returns for each question its completions; of a conversation the last turn. A warning names each conversation that a fault of
    its environment ended. `UserError` where the model, a tool or the environment cannot be loaded.
    """
    drawn = completions_of(config, model, questions, num_samples=num_samples, temperature=temperature)
    for question, completions in zip(questions, drawn, strict=True):
        for one in completions:
            if one.conversation is not None and one.conversation.error is not None:
                warnings.warn(f"{question[:80]!r}: its conversation ended early: {one.conversation.error}", stacklevel=2)
    return [[completion.text for completion in each] for each in drawn]


def completions_of(
    config: RunConfig, model: ModelRef, questions: Sequence[str], *, num_samples: int, temperature: float
) -> "list[list[Completion]]":
    """`generate` with whole completions: tokens and the turns of conversations."""
    # On some CPUs bitsandbytes says when it is imported that it misses a package. Nothing here needs it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # Imports torch, which the other functions leave to their child processes.
    from grpo_tasks.policy.load import load_policy, load_tokenizer, pick_device
    from grpo_tasks.rollout.conversations import player
    from grpo_tasks.rollout.engine import Sampling, completion_seed
    from grpo_tasks.rollout.local import LocalEngine
    from grpo_tasks.rollout.sample_table import sample_rows

    config, system = _with_dtype(config), config.data.system_prompt
    before = [{"role": "system", "content": system}] if system else []
    chats = [(*before, {"role": "user", "content": question}) for question in questions]
    rows = [PromptRow(prompt_id(chat, None), "question", number, chat, None, 0, {}) for number, chat in enumerate(chats)]
    seeds = [
        (row, completion_seed(config.seed, "generate", number) + sample)
        for number, row in enumerate(rows)
        for sample in range(num_samples)
    ]
    sampling = Sampling.of(config.rollout, temperature=temperature)
    settings = (config.interaction, model, config.model, config.rollout)
    with player(*settings, completion=config.completion) as found:
        values = config.rollout.chat_template_kwargs
        tokenizer = load_tokenizer(model, config.model, values) if found is None else found.tokenizer
        policy = load_policy(model, config.model, device=pick_device(config.resources), token_seed=config.seed)
        engine = LocalEngine.of(policy, tokenizer, config.resources)
        drawn = sample_rows(engine, tokenizer, found, seeds, sampling, seed=config.seed)
    return [list(drawn[first : first + num_samples]) for first in range(0, len(drawn), num_samples)]


def _folder(directory: str | Path) -> Path:
    folder = Path(directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def add_rewards(section: RewardsConfig, rewards: Mapping[str, Reward], directory: Path) -> RewardsConfig:
    """The rewards section of a config with further functions; the source of those without a module goes into `directory`.

    `ConfigError` where a reward uses something that only exists in this process.
    """
    notebook = _Notebook()
    paths: dict[str, str] = {}
    folders = {section.module_dir.resolve()} if section.module_dir else set()
    for name, reward in rewards.items():
        if isinstance(reward, str):
            paths[name] = reward
            continue
        found = _importable(reward)
        if found is None:
            paths[name] = f"{MODULE}:{notebook.add_reward(name, reward)}"
            folders.add(directory)
            continue
        module, attribute = found
        paths[name] = f"{module.__name__}:{attribute}"
        path = Path(str(module.__file__)).resolve()
        folder = path.parents[module.__name__.count(".") + (path.name == "__init__.py")]
        # What is installed needs no folder to be found.
        if not set(_INSTALLED) & set(folder.parts):
            folders.add(folder)
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in sorted(folders))
        raise ConfigError(f"the reward functions come from several folders: {names}", place="rewards", fix="use one module file")
    if notebook.definitions:
        source = "\n\n".join(["from __future__ import annotations", *notebook.definitions.values()]) + "\n"
        (directory / f"{MODULE}.py").write_text(source, "utf-8")
    entries = {name: RewardConfig(function=path) for name, path in paths.items()}
    return section.model_copy(update={"functions": section.functions | entries, "module_dir": next(iter(folders), None)})


def _importable(value: Any) -> tuple[ModuleType, str] | None:
    """The module and the dotted name by which another process can import a value; None when there are none."""
    if isinstance(value, MethodType):
        owner = _importable(value.__self__)
        return owner and (owner[0], f"{owner[1]}.{value.__name__}")
    for module in _modules_that_may_hold(value):
        named: Any = module
        qualified = getattr(value, "__qualname__", "")
        for part in filter(None, qualified.split(".")):
            named = getattr(named, part, None)
        if named is value:
            return module, qualified
        for name, held in list(vars(module).items()):
            if held is value:
                return module, name
    return None


def _modules_that_may_hold(value: Any) -> Iterator[ModuleType]:
    """Modules with a file, the one where the value or its class is defined first; never the script that was started."""
    home = getattr(value, "__module__", None)
    # An instance may stand in another module than its class; a function elsewhere would be an import of it.
    others = [] if inspect.isroutine(value) or inspect.isclass(value) else sorted(sys.modules)
    for name in dict.fromkeys([home, *others]):
        module = sys.modules.get(name or "")
        # multiprocessing calls the script that was started __mp_main__ too.
        started = module is sys.modules["__main__"]
        if isinstance(module, ModuleType) and not started and isinstance(vars(module).get("__file__"), str):
            yield module


@dataclass(slots=True)
class _Notebook:
    """The module that is written for the rewards of a notebook."""

    definitions: dict[str, str] = field(default_factory=dict)
    """Source by name, each after those that it uses."""

    def add_reward(self, name: str, reward: Any) -> str:
        """The name that a reward has in the module."""
        place = f"rewards.{name}"
        if isinstance(reward, FunctionType) or inspect.isclass(reward):
            return self._add_source(reward, place)
        variable = f"reward_{''.join(letter if letter.isalnum() else '_' for letter in name)}"
        self.definitions[variable] = f"{variable} = {self._expression(reward, place)}"
        return variable

    def _expression(self, value: Any, place: str) -> str:
        """Code that makes a value."""
        if _is_plain(value):
            return repr(value)
        if (found := _importable(value)) is not None:
            module, attribute = found
            self.definitions[f"import {module.__name__}"] = f"import {module.__name__}"
            return f"{module.__name__}.{attribute}"
        if isinstance(value, FunctionType) or inspect.isclass(value):
            return self._add_source(value, place)
        if isinstance(value, functools.partial):
            named = [f"{key}={self._expression(one, place)}" for key, one in value.keywords.items()]
            given = [self._expression(one, place) for one in (value.func, *value.args)]
            self.definitions["import functools"] = "import functools"
            return f"functools.partial({', '.join([*given, *named])})"
        if isinstance(value, MethodType):
            return f"{self._expression(value.__self__, place)}.{value.__name__}"
        if isinstance(value, BuiltinFunctionType) or not callable(value):
            raise ConfigError(
                f"the worker process cannot import {value!r}: it is not a plain function", place=place, fix=_OWN_MODULE
            )
        return self._instance(value, place)

    def _instance(self, value: Any, place: str) -> str:
        """Code that makes an instance with the same attributes, without calling its constructor."""
        kind = type(value)
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        state = {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))
        for name, held in state.items():
            if not _is_plain(held):
                raise ConfigError(
                    f"the worker process cannot import this {kind.__name__}: its attribute {name} is no plain value",
                    place=place,
                    fix=_OWN_MODULE,
                )
        made = self._expression(kind, place)
        self.definitions["_with_attributes"] = _WITH_ATTRIBUTES
        return f"_with_attributes({made}, {state!r})"

    def _add_source(self, value: Any, place: str) -> str:
        """Write a function or a class down, after what it uses."""
        name: str = value.__name__
        if name == "<lambda>" or (isinstance(value, FunctionType) and value.__code__.co_freevars):
            raise ConfigError(
                f"the worker process cannot import {value!r}: it is not a plain function", place=place, fix=_OWN_MODULE
            )
        try:
            source = textwrap.dedent(_class_source(value) if inspect.isclass(value) else inspect.getsource(value))
        except (OSError, TypeError, SyntaxError) as error:
            raise ConfigError(f"the source of {name} is not known: {error}", place=place, fix=_OWN_MODULE) from error
        known = self.definitions.get(name)
        if known is not None:
            if not known.endswith(source):
                raise ConfigError(f"two different rewards are called {name}", place=place, fix="rename one of them")
            return name
        # First, so that a function which calls itself ends here; the final text replaces it below, after what it uses.
        self.definitions[name] = source
        uses = value.__globals__ if isinstance(value, FunctionType) else vars(sys.modules[value.__module__])
        lines = [
            self._definition(each, uses[each], place)
            for each in sorted(_names_in(compile(source, name, "exec")) & uses.keys() - {name})
        ]
        del self.definitions[name]
        self.definitions[name] = "\n".join([*filter(None, lines), "", source])
        return name

    def _definition(self, name: str, value: Any, place: str) -> str:
        """The line that makes a name known which a reward uses; empty when it is written down elsewhere in the module."""
        if inspect.ismodule(value):
            return f"import {value.__name__} as {name}"
        if value is None or isinstance(value, str | int | float | bool):
            return f"{name} = {value!r}"
        if inspect.isroutine(value) or inspect.isclass(value):
            module = getattr(value, "__module__", None)
            if module not in (None, "__main__", "builtins"):
                return f"from {module} import {value.__name__} as {name}"
            if module == "__main__" and not isinstance(value, BuiltinFunctionType):
                written = self._add_source(value, place)
                return "" if written == name else f"{name} = {written}"
        raise ConfigError(
            f"the function uses {name}, which is defined outside of it", place=place, fix=f"define it inside, or {_OWN_MODULE}"
        )


def _class_source(kind: type) -> str:
    """The source of a class, found by its methods: inspect does not know the file of a class of a notebook."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            lines = linecache.getlines(method.__code__.co_filename)
            for node in ast.walk(ast.parse("".join(lines))):
                if not isinstance(node, ast.ClassDef) or node.name != kind.__name__:
                    continue
                if node.lineno <= method.__code__.co_firstlineno <= (node.end_lineno or 0):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
    raise OSError("it has no method that was written in Python")


_WITH_ATTRIBUTES = """\
def _with_attributes(kind, attributes):
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
"""


def _is_plain(value: object) -> bool:
    """Whether the repr of a value makes it again."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))  # type: ignore[call-overload]  # one of the four
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(held) for key, held in value.items())
    return value is None or type(value) in (str, bytes, int, bool) or (type(value) is float and math.isfinite(value))


def _names_in(code: CodeType) -> set[str]:
    """Every global name that the code may read, also inside comprehensions and inner functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    # Every module has __name__ and the like of its own.
    own = {name for name in code.co_names if not name.startswith("__")}
    return own.union(*map(_names_in, inner))
