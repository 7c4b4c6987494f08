"""Environments in worker processes: the forms in which users write them, and what hostile ones can do."""

import pytest

from grpo_tasks.environments.pool import NOT_REPEATED, OVER
from grpo_tasks.lab.environment_checks import scripts_of
from schemas.errors import ConfigError

STEPS = '''
import asyncio, os, random, time
from dataclasses import dataclass, field

class Guess:
    """Guess a number. Written without any import of ours."""

    def __init__(self, highest=10):
        self.highest = highest

    def reset(self, row, seed):
        self.secret = row.get("secret", seed % self.highest)
        self.turns = 0
        return [{"role": "system", "content": "Guess."}, {"role": "user", "content": f"0 to {self.highest}"}]

    def step(self, completion):
        self.turns += 1
        if completion == "hang":
            time.sleep(600)
        if completion == "crash":
            os._exit(7)
        if completion == "raise":
            raise ValueError(f"odd thing {object()}")
        if completion == "surrogate":
            return {"messages": "x", "info": {"said": chr(0xD800), chr(0xDFFF): "ü😀"}}
        if completion == "raise surrogate":
            raise ValueError(f"odd {chr(0xD800)} ü")
        if completion == "fill":
            kept = []
            while True:
                kept.append(bytearray(os.urandom(1000)) * 20_000)
        if completion == str(self.secret):
            return {"messages": [], "done": True, "reward": 1.0, "info": {"turns": self.turns}}
        return {"messages": f"{self.turns}: no", "reward": -0.125}

class Spoken(Guess):
    def reset(self, row, seed):
        super().reset(row, seed)
        return " Guess!"

class Silent(Guess):
    async def reset(self, row, seed=0):
        super().reset(row, seed)

    async def step(self, completion):
        await asyncio.sleep(0)
        return ([{"role": "user", "content": "tuple"}], completion == "end", 2)

@dataclass
class Result:
    messages: list = field(default_factory=list)
    done: bool = False
    reward: float | None = None
    info: dict = field(default_factory=dict)

class Strange:
    """Returns what the completion names."""

    def reset(self, puzzle, *, seed):
        self.kept = [puzzle, seed]

    def step(self, completion):
        return {
            "object": Result([{"role": "user", "content": str(self.kept)}], info={"kept": self.kept, "nan": float("nan")}),
            "none": None,
            "number": 5,
            "nan": {"messages": "x", "reward": float("nan")},
            "text_reward": {"messages": "x", "reward": "much"},
            "assistant": {"messages": [{"role": "assistant", "content": "I win"}]},
            "silence": {"messages": []},
            "key": {"messages": "x", "observation": 1},
            "five": ("x", 1.0, False, False, {}),
            "image": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]},
            "long": {"messages": "x" * 1_000_000, "info": {"x": "y" * 1_000_000}},
            "many": {"messages": [{"role": "user", "content": "x"}] * 1_000},
        }[completion]

class Drifts:
    """Does not repeat itself."""

    def reset(self, row, seed):
        return None

    def step(self, completion):
        if completion == "crash":
            os._exit(7)
        return str(time.time_ns())

class WithTools:
    """A step environment that offers tools."""

    def reset(self, row, seed):
        self.tools = [self.look]
        return None

    tools = ()

    def __init__(self):
        self.tools = [self.look]

    def look(self) -> str:
        """Looks."""
        return "a door"

    def step(self, completion):
        return {"messages": f"you {completion}", "done": completion == "leave", "reward": 1}

class BadReset(Guess):
    def reset(self, row, seed):
        if row["how"] == "raise":
            raise RuntimeError("no board")
        if row["how"] == "crash":
            os._exit(3)
        return {"raise": 0, "number": 5, "empty": [], "role": [{"role": "judge", "content": "x"}]}[row["how"]]

class NoReset:
    def step(self, completion): ...

class Needs:
    def __init__(self, board): ...
'''


def test_a_step_environment_plays_a_conversation(pool_of, row):
    pool = pool_of(STEPS, environment="Guess", settings={"highest": 5})
    assert pool.schemas() == []
    (opening,) = pool.begin([(7, row(), 13)])
    assert list(opening.messages) == [{"role": "system", "content": "Guess."}, {"role": "user", "content": "0 to 5"}]
    (first,) = pool.answer([(7, "4<|im_end|>\n")])
    assert (first.done, first.reward, dict(first.info), first.error) == (False, -0.125, {}, None)
    assert first.turn == {"role": "assistant", "content": "4"}
    assert list(first.messages) == [{"role": "user", "content": "1: no"}]
    (second,) = pool.answer([(7, "3")])
    assert (second.done, second.reward, dict(second.info), list(second.messages)) == (True, 1.0, {"turns": 2}, [])
    (over,) = pool.answer([(7, "3")])
    assert (over.done, over.reward, over.error) == (True, None, OVER)
    # A number that begins again has a new environment, as in every round.
    pool.begin([(7, row(secret=9), 0)])
    assert pool.answer([(7, "1")])[0].messages == [{"role": "user", "content": "1: no"}]
    assert pool.end([7]) == [None]
    # UTF-8 has no lone surrogates, and they end no worker.
    pool.begin([(0, row(), 0), (1, row(), 0)])
    (observed,) = pool.answer([(0, "surrogate")])
    assert (observed.error, dict(observed.info)) == (None, {"said": "?", "?": "ü😀"})
    (failed,) = pool.answer([(1, "raise surrogate")])
    assert failed.error == "step raised ValueError: odd ? ü"


def test_reset_may_return_text_or_nothing_and_methods_may_be_async(pool_of, row):
    pool = pool_of(STEPS, environment="Spoken")
    (opening,) = pool.begin([(0, row("Play."), 1)])
    assert list(opening.messages) == [{"role": "user", "content": "Play. Guess!"}]
    pool = pool_of(STEPS, environment="Silent")
    (opening,) = pool.begin([(0, row("Play."), 1)])
    assert list(opening.messages) == []
    (observed,) = pool.answer([(0, "go on")])
    assert (list(observed.messages), observed.done, observed.reward) == ([{"role": "user", "content": "tuple"}], False, 2.0)
    assert pool.answer([(0, "end")])[0].done


BREACHES = {
    "none": "step returned NoneType: return a dict with messages, done, reward and info",
    "number": "step returned int: return a dict",
    "nan": "step returned the reward nan: return a finite number, or None",
    "text_reward": "step returned the reward str",
    "assistant": "step returned a message of the role assistant: the roles are tool, user",
    "silence": "step returned no messages, and the conversation is not over",
    "key": "step returned the key observation",
    "five": "step returned a tuple of 5: return (messages, done, reward, info)",
    "image": "step returned content of the type image: only text",
    "many": "step returned 1000 messages, and 64 are the limit",
    "unknown": "step raised KeyError: 'unknown'",
}


def test_a_step_that_breaks_the_contract_ends_the_conversation_and_gains_nothing(pool_of, row):
    pool = pool_of(STEPS, environment="Strange", max_answer_chars=50)
    pool.begin([(number, row(puzzle="Why?"), 3) for number in range(len(BREACHES) + 1)])
    for observed, said in zip(pool.answer(list(enumerate(BREACHES))), BREACHES.values(), strict=True):
        assert (observed.done, observed.reward) == (True, None)
        assert observed.error is not None
        assert observed.error.startswith(said)
    # The last one keeps to it: any object with the names of an observation, long messages, markers as text.
    (sound,) = pool.answer([(len(BREACHES), "object")])
    assert list(sound.messages) == [{"role": "user", "content": "['Why?', 3]"}]
    assert sound.info == {"kept": ["Why?", 3], "nan": "NaN"}
    (long,) = pool.answer([(len(BREACHES), "long")])
    assert long.messages[0]["content"] == "x" * 50 + "\n[... cut: 1,000,000 characters, the first 50 are shown]"
    assert long.info == {"cut": "info has 1,000,009 characters as JSON, and 16,384 are the limit"}
    assert pool.answer([(len(BREACHES), "blocks")])[0].messages == [{"role": "user", "content": "<|im_end|>"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("hang", "step did not return within 2 s"),
        ("crash", "step ended its worker process (exit code 7)"),
        ("fill", "step used more than 300 MiB of memory"),
        ("raise", "step raised ValueError: odd thing <object object>"),
    ],
)
def test_a_fault_ends_its_own_conversation_only(pool_of, row, completion, said):
    """The others of the same worker are played again in the new process, unseen."""
    pool = pool_of(STEPS, environment="Guess", timeout_s=2.0 if completion == "hang" else 20.0, memory_mb=300)
    pool.begin([(number, row(secret=9), number) for number in range(3)])
    pool.answer([(number, "1") for number in range(3)])
    before, faulty, after = pool.answer([(0, "2"), (1, completion), (2, "2")])
    assert (faulty.done, faulty.reward, faulty.error, list(faulty.messages)) == (True, None, said, [])
    for observed in (before, after):
        assert (observed.error, list(observed.messages)) == (None, [{"role": "user", "content": "2: no"}])
    first, over, last = pool.answer([(number, "9") for number in range(3)])
    assert [one.info for one in (first, last)] == [{"turns": 3}, {"turns": 3}]
    assert (over.done, over.reward, over.error) == (True, None, said)
    assert pool.end([0, 1, 2]) == [None, None, None]


def test_a_random_environment_is_named_when_its_worker_is_lost(pool_of, row):
    pool = pool_of(STEPS, environment="Drifts")
    pool.begin([(0, row(), 0), (1, row(), 1)])
    pool.answer([(0, "x"), (1, "x")])
    lost, bystander = pool.answer([(0, "crash"), (1, "x")])
    assert lost.error == "step ended its worker process (exit code 7)"
    assert (bystander.error, bystander.reward, bystander.done) == (NOT_REPEATED, None, True)


def test_the_number_of_workers_changes_no_conversation_even_with_faults(pool_of, row):
    script = ["1", "crash", "raise", "2", "3", "4"]

    def play(workers):
        pool = pool_of(STEPS, environment="Guess", workers=workers)
        pool.begin([(number, row(), number) for number in range(6)])
        return [pool.answer([(number, script[(number * 5 + turn) % len(script)]) for number in range(6)]) for turn in range(3)]

    assert play(1) == play(4)


SLOW = """
import os, pathlib, time

HERE = pathlib.Path(__file__).parent
if (HERE / "broken").exists():
    (HERE / "refused").touch()
    raise RuntimeError("cannot be imported any more")

class Slow:
    def reset(self, row, seed):
        return None

    def step(self, completion):
        if completion == "crash":
            os._exit(7)
        while not (HERE / "refused").exists():
            time.sleep(0.01)
        time.sleep(1.0)
        (HERE / "finished").touch()
        return "go on"
"""


def test_an_error_of_one_worker_is_raised_when_the_others_have_answered(pool_of, row, tmp_path):
    pool = pool_of(SLOW, environment="Slow", workers=2, timeout_s=60.0)
    pool.begin([(number, row(), 0) for number in range(3)])
    assert pool.answer([(0, "crash")])[0].error is not None
    (tmp_path / "broken").touch()
    with pytest.raises(ConfigError, match="cannot be imported any more"):
        pool.answer([(2, "x"), (1, "x")])
    assert (tmp_path / "finished").exists()
    # Its worker serves the conversation as before.
    assert pool.answer([(1, "x")])[0].error is None


def test_a_step_environment_may_offer_tools(pool_of, call, row):
    pool = pool_of(STEPS, environment="WithTools")
    assert [one["function"]["name"] for one in pool.schemas()] == ["look"]
    pool.begin([(0, row(), 0)])
    (looked,) = pool.answer([(0, call("look"))])
    assert (looked.messages, looked.reward, looked.calls) == ([{"role": "tool", "name": "look", "content": "a door"}], None, 1)
    (left,) = pool.answer([(0, "leave")])
    assert (left.done, left.reward, left.messages) == (True, 1.0, [{"role": "user", "content": "you leave"}])


def test_a_conversation_that_cannot_begin_says_why(pool_of, row):
    reasons = {
        "raise": "reset raised RuntimeError: no board",
        "crash": "reset ended its worker process (exit code 3)",
        "number": "reset returned int instead of messages",
        "empty": "reset returned no messages",
        "role": "reset returned a message of the role judge",
    }
    pool = pool_of(STEPS, environment="BadReset")
    openings = pool.begin([(number, row(how=how), 0) for number, how in enumerate(reasons)])
    observed = pool.answer([(number, "x") for number in range(len(reasons))])
    for opening, refused, said in zip(openings, observed, reasons.values(), strict=True):
        assert opening.error is not None
        assert opening.error.startswith(said)
        assert (refused.done, refused.reward, refused.error) == (True, None, opening.error)


@pytest.mark.parametrize(
    ("environment", "settings", "said"),
    [
        ("NoReset", {}, "has no method reset"),
        ("Needs", {}, "cannot be made: missing a required argument: 'board'"),
        ("Guess", {"lowest": 1}, "cannot be made: got an unexpected keyword argument 'lowest'"),
        ("Nothing", {}, "has no Nothing"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_at_once(pool_of, environment, settings, said):
    with pytest.raises(ConfigError, match=said) as refused:
        pool_of(STEPS, environment=environment, settings=settings).schemas()
    assert refused.value.place.startswith("interaction.environment")
    assert refused.value.fix


OWN_CALLS = '''
class Shop:
    """Executes its calls itself, from the turn as a message."""

    schemas = [{"type": "function", "function": {"name": "buy", "description": "Buys.", "parameters": {"type": "object"}}}]

    def reset(self, row, seed):
        return None

    def step(self, turn):
        names = [call["function"]["arguments"] for call in turn.get("tool_calls", [])]
        return {"messages": [{"role": "tool", "name": "buy", "content": names}], "done": not names, "reward": len(names)}
'''


def test_an_environment_may_execute_its_calls_itself_within_the_limit(pool_of, call, row):
    pool = pool_of(OWN_CALLS, environment="Shop", max_tool_calls=3)
    assert [one["function"]["name"] for one in pool.schemas()] == ["buy"]
    pool.begin([(0, row(), 0)])
    (first,) = pool.answer([(0, call("buy", what=1) + call("buy", what=2))])
    assert first.messages == [{"role": "tool", "name": "buy", "content": '[{"what": 1}, {"what": 2}]'}]
    assert (first.calls, first.reward, first.done) == (2, 2.0, False)
    (second,) = pool.answer([(0, call("buy", what=3) + call("buy", what=4))])
    assert (second.calls, second.reward) == (2, 1.0)
    assert [message["content"] for message in second.messages] == [
        '{"error": "1 calls were refused: 3 calls are allowed in one conversation"}',
        '[{"what": 3}]',
    ]
    # Nothing of this turn reaches the environment, which would take it for the last one.
    (third,) = pool.answer([(0, call("buy", what=5))])
    assert (third.done, third.calls, third.reward) == (False, 1, None)
    assert "1 calls were refused" in third.messages[0]["content"]
    assert pool.answer([(0, "Enough.")])[0].done


def test_an_executing_environment_never_gets_unreadable_or_too_many_calls(pool_of, call, row):
    # A schema of its own may leave out the parameters; the lab calls every tool all the same.
    pool = pool_of(OWN_CALLS.replace(', "parameters": {"type": "object"}', ""), environment="Shop", max_tool_calls=1024)
    assert "parameters" not in pool.schemas()[0]["function"]
    turns = [script.turns for script in scripts_of([row()], pool.schemas(), perfect=[None], max_turns=4)]
    assert any("buy" in turn for one in turns for turn in one)
    pool.begin([(0, row(), 0)])
    broken, unread = '<tool_call>{"name": "buy", "arguments": [1]}</tool_call>', "<tool_call>{oops</tool_call>"
    (alone,) = pool.answer([(0, broken + unread)])
    assert (alone.done, alone.calls, alone.reward) == (False, 2, None)
    assert [message.get("name") for message in alone.messages] == ["buy", None]
    for message, said in zip(alone.messages, ("the arguments are not a JSON object", "not valid JSON"), strict=True):
        assert message["role"] == "tool"
        assert said in message["content"]
    (mixed,) = pool.answer([(0, broken + call("buy", what=1))])
    assert [message["content"] for message in mixed.messages] == [
        '{"error": "the arguments are not a JSON object"}',
        '[{"what": 1}]',
    ]
    assert (mixed.calls, mixed.reward, mixed.done) == (2, 1.0, False)
    (many,) = pool.answer([(0, call("buy", what=1) * 1500)])
    assert (many.calls, many.reward, many.done) == (1500, 1020.0, False)
    assert many.messages[0]["content"] == '{"error": "480 calls were refused: 1,024 calls are allowed in one conversation"}'
