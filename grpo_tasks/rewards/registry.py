"""From the entry of a reward in the configuration to a callable, in the worker process: a user's code never enters the trainer.

    correctness                     a built-in function
    package.module:function         a function, an async function, a partial or an instance that can be called
    package.module:Class            made with the params, then called: its instance is the reward
    package.module:factory          called with the params: the function that it returns is the reward

A class is recognised as such, a factory by taking none of the arguments of a call. Otherwise params are arguments of the call,
and override columns of the same name. A function without **kwargs receives only what it names.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_tasks.content.modules import added_code, cause_of, import_object, users_line
from grpo_tasks.judging.judge import Judge
from grpo_tasks.processes.worker_main import awaited
from grpo_tasks.rewards.builtin import BUILTIN, completion_text, judge
from grpo_tasks.rewards.contract import ARGUMENTS, MAX_GOLD_CHARS, PLAYED, shorten
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import ConfigError

_GIVEN = {"prompts", "completions", "completion_ids", "answer", "completion", "columns"} | PLAYED
_SINGLE = {"completion", "response", "solution_str"}
"""Parameters of functions for a single completion: of rubrics (verifiers), of compute_score (verl)."""
_NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded function."""

    call: Callable[..., Any]
    """Takes the arguments of a call by name. Its params are bound, and what it does not accept is left out."""
    as_text: bool = False
    """Whether it receives strings for chats too."""
    module: str = ""
    """Dotted name of the user's module; empty for a built-in function."""


def load_function(name: str, reward: RewardConfig, rewards: RewardsConfig, completion: CompletionConfig) -> RewardFunction:
    """The callable of one entry, by its resolved settings; ConfigError: it cannot be imported or called, or has no such param."""
    place = f"rewards.functions.{name}"
    if reward.judge is not None:
        _refuse_unknown(reward.params, [], place=place)
        return RewardFunction(_bind(judge, {"judge": Judge(reward.judge)}, {"judge"}))
    if reward.function in BUILTIN:
        function = BUILTIN[reward.function]
        known = inspect.signature(function).parameters.keys()
        _refuse_unknown(reward.params, sorted(known - _GIVEN), place=place)
        bound = ({"completion": completion} if "completion" in known else {}) | reward.params
        # A data column that happens to be named max_length must not set the parameter of that name.
        return RewardFunction(_bind(function, bound, known - _GIVEN))
    path = reward.function or name
    folders = rewards.module_dirs()
    found, params = _made(import_object(path, folders, place=place), path, reward.params, place=place, folders=folders)
    parameters = _parameters(found)
    # None: it accepts every name, or cannot be asked.
    accepted = None
    if parameters and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        accepted = {one.name for one in parameters if one.kind in _NAMED}
        _refuse_unknown(params, sorted(accepted - ARGUMENTS), place=place)
    return RewardFunction(_bind(found, params, frozenset(), accepted), reward.as_text, path.partition(":")[0])


def gold_completions(path: str, rows: Sequence[Mapping[str, Any]], folders: Sequence[Path]) -> list[str | None]:
    """What the user's function `path` (lab.gold) returns: one completion for each row, None where it has none; or ConfigError."""
    place = "lab.gold"
    function = import_object(path, folders, place=place)
    try:
        made = function([dict(row) for row in rows])
        texts = [None if one is None else completion_text(one) for one in made]
    except Exception as error:
        message, where = f"{path} raised {type(error).__name__}: {shorten(str(error))}", users_line(error, path.partition(":")[0])
        raise ConfigError(message, place=f"{place}; {where}", fix=cause_of(error) or "correct the function") from error
    if len(texts) != len(rows) or not all(text is None or isinstance(text, str) for text in texts):
        fix = "return a list with one text per row, None where there is none"
        raise ConfigError(f"{path} returned {len(texts)} completions for {len(rows)} rows", place=place, fix=fix)
    return [text if text is None else text[:MAX_GOLD_CHARS] for text in texts]


def _bind(
    function: Callable[..., Any], bound: Mapping[str, Any], own: Set[str], accepted: Set[str] | None = None
) -> Callable[..., Any]:
    """The function with its parameters bound. It receives the arguments of a call except those named in `own`."""

    def call(**arguments: Any) -> Any:
        given = {key: value for key, value in arguments.items() if key not in own and (accepted is None or key in accepted)}
        return awaited(function(**(given | dict(bound))))

    return call


def _made(
    found: Callable[..., Any], path: str, params: Mapping[str, Any], *, place: str, folders: Sequence[Path]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function itself: an instance of a class, what a factory returns, or what was found; and the params that are left."""
    parameters = _parameters(found)
    single = sorted(_SINGLE & {one.name for one in parameters if one.default is one.empty})
    if single and "completions" not in {one.name for one in parameters}:
        raise ConfigError(
            f"{path} scores one completion at a time (its parameter {single[0]}), and reward functions take lists, as in TRL",
            place=place,
            fix=_for_each(found, path, parameters, single[0], folders),
        )
    if inspect.isclass(found):
        if not any("__call__" in vars(base) for base in found.__mro__[:-1]):
            fix = "give it a method __call__(self, prompts, completions, **kwargs), or name a function"
            raise ConfigError(f"{path} is a class whose instances cannot be called", place=place, fix=fix)
        return _call_maker(found, f"{path} is a class. Its constructor", params, place=place), {}
    kinds = {one.kind for one in parameters}
    open_ended = kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    if not inspect.isfunction(found) or open_ended or ARGUMENTS & {one.name for one in parameters}:
        return found, dict(params)
    what = f"{path} takes none of the arguments of a reward function (completions, ...), so it counts as a factory. It"
    made = _call_maker(found, what, params, place=place)
    if not callable(made):
        fix = "give it the parameters of a reward function: def NAME(prompts, completions, **kwargs)"
        raise ConfigError(f"{what} returned {type(made).__name__} instead of a function", place=place, fix=fix)
    return made, {}


def _for_each(
    function: Callable[..., Any], path: str, parameters: Sequence[inspect.Parameter], single: str, folders: Sequence[Path]
) -> str:
    """A function of lists around one for a single completion, as code with what to name in the config."""
    module, _, name = path.partition(":")
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = ""
    # verifiers passes messages as completion; a function that never reads their content is one of text.
    messages = single == "completion" and ("content" in source or "parser" in source)
    completion = "completions[i]" if messages else 'completions[i][-1]["content"]'
    known = {
        single: completion,
        "prompt": "prompts[i]",
        "answer": 'columns["answer"][i]',
        "ground_truth": 'columns.get("ground_truth", columns["answer"])[i]',
        "state": f'{{"prompt": prompts[i], "completion": {completion}, "answer": columns["answer"][i]}}',
        "parser": "parser",
    }
    named = [one for one in parameters if one.kind in _NAMED and (one.default is one.empty or one.name in ("answer", "prompt"))]
    arguments = [f"            {one.name}={known.get(one.name, f'columns[{one.name!r}][i]')}," for one in named]
    is_async = inspect.iscoroutinefunction(function)
    made, called = f"{name.replace('.', '_')}_each", f"await {name}" if is_async else name
    lines = [
        f"{'async ' if is_async else ''}def {made}(prompts, completions, **columns):",
        "    return [",
        f"        {called}(",
        *arguments,
        "        )",
        "        for i in range(len(completions))",
        "    ]",
    ]
    return added_code(module, name, made, lines, folders)


def _call_maker(maker: Callable[..., Any], what: str, params: Mapping[str, Any], *, place: str) -> Callable[..., Any]:
    parameters = _parameters(maker)
    missing = [one.name for one in parameters if one.default is one.empty and one.kind in _NAMED and one.name not in params]
    if missing:
        values = ", ".join(f"{name}: VALUE" for name in missing)
        raise ConfigError(f"{what} needs {', '.join(missing)}", place=place, fix=f"params: {{{values}}}")
    if parameters and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        _refuse_unknown(params, [one.name for one in parameters], place=place)
    try:
        made: Callable[..., Any] = maker(**params)
    except Exception as error:
        message, where = f"{what} raised {type(error).__name__}: {error}", users_line(error, maker.__module__)
        raise ConfigError(message, place=f"{place}; {where}", fix=cause_of(error) or "correct its params") from error
    return made


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # Some callables of C code have no signature.
        return []


def _refuse_unknown(params: Mapping[str, Any], known: list[str], *, place: str) -> None:
    for param in params:
        if param not in known:
            near = difflib.get_close_matches(param, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"parameters: {', '.join(known) or 'none'}"
            raise ConfigError(f"{param} is not a parameter of this reward", place=f"{place}.params", fix=hint)
