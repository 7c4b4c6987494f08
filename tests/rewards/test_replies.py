"""Which bytes of a worker are accepted as a reply: exactly those of the right shape, and nothing else raises or hangs."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_tasks.processes.worker_main import HEADER, MAGIC, frame
from grpo_tasks.processes.worker_process import MalformedReplyError, WorkerEndedError, WorkerLink
from grpo_tasks.rewards.contract import (
    MAX_EXTRA_CHARS,
    MAX_EXTRAS,
    MAX_METRIC_CHARS,
    MAX_METRICS,
    MAX_TEXT_CHARS,
    FunctionScores,
    RewardFault,
)
from grpo_tasks.rewards.worker import Loaded, Scored, max_reply_bytes

# What may arrive: raw bytes, frames of any JSON, and frames of nearly the right shape.
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSONS = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4))
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "request": st.sampled_from(["7", "8", 7]),
        "scores": st.fixed_dictionaries(
            {},
            optional={
                "scores": st.lists(NUMBERS, max_size=3) | JSONS,
                "seconds": NUMBERS,
                "tokens": JSONS,
                "metrics": JSONS,
                "more": JSONS,
            },
        ),
        "fault": st.fixed_dictionaries(
            {"kind": JSONS, "detail": JSONS}, optional={"source": JSONS, "index": JSONS, "fix": JSONS}
        ),
    },
)
PIECES = st.lists(
    st.binary(max_size=40)
    | st.builds(lambda size: HEADER.pack(MAGIC, size), st.integers(0, 2**64 - 1))
    | (JSONS | NEARLY).map(lambda value: frame(json.dumps(value).encode())),
    max_size=3,
)


def read_scores(payload):
    reply = Scored.read(payload, "7", {"completion_ids": [[0, 0], [0, 0, 0]]})
    return reply.scores or reply.fault


@settings(max_examples=150)
@given(PIECES, st.booleans())
def test_arbitrary_bytes_never_hang_the_parent_and_raise_nothing_unexpected(pieces, closes):
    link = WorkerLink()
    data = link.worker_ends[0]
    try:
        data.sendall(b"".join(pieces))
        if closes:
            data.close()
        limit = time.monotonic() + (0.0 if not closes else 5.0)
        try:
            outcome = read_scores(link.receive(max_reply_bytes([2, 3]), limit))
        except (MalformedReplyError, WorkerEndedError, TimeoutError):
            return
        assert isinstance(outcome, RewardFault) or len(outcome.scores) == 2
    finally:
        link.close()


GOOD = {"scores": [1.0, None], "seconds": 0.0, "tokens": {"1": [0.0, 1.0, 0.5]}, "metrics": {"seen": 2.0}}
GOOD |= {"extra": {"verdict": ["good", None]}}
FAULT = {"kind": "raised", "detail": "", "source": "", "index": None, "fix": "", "arguments": ""}


def reply(**parts):
    return json.dumps({"request": "7", **parts}).encode()


def test_a_reply_of_the_right_shape_is_accepted():
    expected = FunctionScores([1.0, None], 0.0, {1: [0.0, 1.0, 0.5]}, {"seen": 2.0}, {"verdict": ["good", None]})
    assert read_scores(reply(scores=GOOD)) == expected
    assert read_scores(reply(fault=FAULT)) == RewardFault("raised", "")


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [1.0]},
        {"scores": [1.0, "1"]},
        {"scores": [1.0, True]},
        {"scores": [1.0, float("nan")]},
        {"seconds": float("inf")},
        {"seconds": -1.0},
        {"tokens": {"2": [1.0]}},
        {"tokens": {"-1": [1.0, 1.0, 1.0]}},
        {"tokens": {"0": [1.0]}},
        {"tokens": None},
        {"metrics": {"seen": float("nan")}},
        {"metrics": {"seen": "1"}},
        {"metrics": {"x" * (MAX_METRIC_CHARS + 1): 1.0}},
        {"metrics": {str(number): 1.0 for number in range(MAX_METRICS + 1)}},
        {"extra": {"verdict": ["good"]}},
        {"extra": {"verdict": ["x" * (MAX_EXTRA_CHARS + 1), None]}},
        {"extra": {str(number): [None, None] for number in range(MAX_EXTRAS + 1)}},
        {"more": 1},
    ],
)
def test_scores_of_the_wrong_shape_are_no_reply(change):
    with pytest.raises(MalformedReplyError):
        read_scores(reply(scores=GOOD | change))


@pytest.mark.parametrize(
    "change", [{"kind": "hung"}, {"index": 2}, {"index": -1}, {"detail": "x" * (MAX_TEXT_CHARS + 1)}, {"more": 1}]
)
def test_faults_of_the_wrong_shape_are_no_reply(change):
    with pytest.raises(MalformedReplyError):
        read_scores(reply(fault=FAULT | change))


@pytest.mark.parametrize(
    "payload",
    [
        b"{}",
        b"[[]]",
        reply(),
        reply(scores=GOOD, fault=FAULT),
        reply(scores=GOOD).replace(b'"7"', b'"8"'),
        b"\xff",
        b"[" * 10_000,
    ],
)
def test_anything_else_is_no_reply(payload):
    with pytest.raises(MalformedReplyError):
        read_scores(payload)


def test_the_largest_honest_replies_fit_the_size_limit():
    lengths, number = [3, 0, 500], -1.2345678901234567e-300
    scores = {"scores": [number] * 3, "seconds": number, "tokens": {index: [number] * size for index, size in enumerate(lengths)}}
    metrics = {f"{index:02}" + "\U0001d7d8" * (MAX_METRIC_CHARS - 2): number for index in range(MAX_METRICS)}
    for parts in ({"scores": scores | {"metrics": metrics}}, {"fault": FAULT | {"detail": "\U0001d7d8" * MAX_TEXT_CHARS}}):
        assert len(reply(**parts)) <= max_reply_bytes(lengths)
    # The limit grows with the completions and not without bound: a worker cannot make the parent read gigabytes.
    assert max_reply_bytes(lengths) < 2**18


@pytest.mark.parametrize("answer", [{"loaded": ["other"]}, {"error": "{"}, {"error": "{}"}, {"error": "[]"}, {"loaded": 1}])
def test_a_worker_that_loaded_something_else_is_refused(answer):
    with pytest.raises(MalformedReplyError):
        Loaded.read(reply(**answer), "7", {"names": ["mine"]})
