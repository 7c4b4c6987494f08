"""Reward functions that write to the worker's socket, patch its libraries or keep it from reading.

The parent never waits past the time limit, every deviation is a named fault, and the next call is answered.
"""

import pytest

from grpo_tasks.rewards.contract import FunctionScores, RewardFault
from tests.processes.waiting import until
from tests.rewards.processes import server_process

FUNCTIONS = """
    import json, os, threading, time
    from multiprocessing.connection import Connection

    def texts(completions):
        return [chat[0]["content"] for chat in completions]

    def write_everywhere(data):
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, data)
            except OSError:
                pass

    def good(prompts, completions, **columns):
        return [1.0] * len(completions)

    def writes(prompts, completions, **columns):
        for text in texts(completions):
            if text == "half":
                write_everywhere(b"GRPO" + (1000).to_bytes(8, "big") + b"{")
                time.sleep(600)
            if text == "huge":
                write_everywhere(b"GRPO" + (2**30).to_bytes(8, "big"))
                time.sleep(600)
            if text == "garbage":
                write_everywhere(b"hello")
            if text == "endless":
                while True:
                    write_everywhere(b"x" * 65536)
            if text == "forged":
                forged = b'{"request": "1", "scores": {"scores": [9.0], "seconds": 0.0, "tokens": {}, "metrics": {}}}'
                write_everywhere(b"GRPO" + len(forged).to_bytes(8, "big") + forged)
            if text == "later":
                threading.Timer(0.2, write_everywhere, [b"GRPO"]).start()
            if text == "deaf":
                os.closerange(3, 256)
                time.sleep(600)
        return [1.0] * len(completions)

    def patches(prompts, completions, **columns):
        json.dumps = lambda *_, **__: "[]"
        json.JSONEncoder.encode = lambda *_: "[]"
        Connection.send_bytes = lambda *_: None
        os.write = lambda *_: 0
        return [1.0] * len(completions)

    def twice(prompts, completions, **columns):
        from grpo_tasks.processes import worker_main
        worker_main.__dict__.setdefault("_kept", worker_main.write_frame)
        def both(descriptor, payload):
            worker_main._kept(descriptor, payload)
            worker_main._kept(descriptor, payload)
        worker_main.write_frame = both
        return [1.0] * len(completions)
"""

LIMIT_S = 2.0

WRITES = [
    ("half", "hung", "after 13 bytes of a reply"),
    ("huge", "broken", "announced a reply of 1,073,741,824 bytes"),
    ("garbage", "broken", "wrote bytes that are no reply"),
    ("endless", "broken", "wrote bytes that are no reply"),
    ("forged", "broken", "repl"),
    ("deaf", "died", "closed the socket"),
]


@pytest.mark.slow
def test_writing_to_the_socket_is_a_named_fault(worker_of, make_batch):
    worker = worker_of("writes")
    for text, kind, words in WRITES:
        outcome = worker.call("writes", make_batch(text), LIMIT_S if kind == "hung" else 30.0)
        assert isinstance(outcome, RewardFault), text
        assert (outcome.kind, words in outcome.detail) == (kind, True), outcome
        assert isinstance(worker.call("writes", make_batch("honest"), 30.0), FunctionScores)


@pytest.mark.slow
def test_bytes_written_between_two_calls_fail_the_next_call_and_no_other(worker_of, make_batch):
    worker = worker_of("writes")
    assert isinstance(worker.call("writes", make_batch("later"), 30.0), FunctionScores)
    until(worker.link.has_unread_bytes)
    outcome = worker.call("writes", make_batch("honest"), 30.0)
    assert isinstance(outcome, RewardFault)
    assert "outside any request" in outcome.detail
    assert isinstance(worker.call("writes", make_batch("honest"), 30.0), FunctionScores)


def test_a_reply_sent_twice_is_a_fault(worker_of, make_batch):
    worker = worker_of("twice")
    outcomes = [worker.call("twice", make_batch("a"), 30.0) for _ in range(2)]
    assert any(isinstance(outcome, RewardFault) and outcome.kind == "broken" for outcome in outcomes)


@pytest.mark.slow
def test_a_function_that_patches_libraries_still_replies_or_is_a_fault(worker_of, make_batch):
    worker = worker_of("patches")
    for _ in range(2):
        outcome = worker.call("patches", make_batch("a"), 30.0)
        assert isinstance(outcome, FunctionScores) or "wrong shape" in outcome.detail


@pytest.mark.slow
def test_a_worker_that_does_not_read_costs_only_its_limit(worker_of, make_batch):
    worker = worker_of("good")
    server = server_process(worker)
    server.suspend()
    outcome = worker.call("good", make_batch("x" * 2**22), 0.5)
    assert isinstance(outcome, RewardFault)
    assert outcome.kind == "hung"
    assert isinstance(worker.call("good", make_batch("x" * 2**22), 30.0), FunctionScores)
