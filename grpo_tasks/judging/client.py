"""Requests to an OpenAI-compatible endpoint: rate, retries with backoff, outage, cost.

    400, 401, 403, 404      the settings are wrong: stop at once
    408, 409, 429, 5xx,     wait and try again, longer each time, as Retry-After says; after max_outage_s without any answer
    no connection, timeout  the judge counts as unavailable

The key is read from the environment for each request and stands in no message.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from grpo_tasks.judging.frame import Question
from schemas.config.learning.judge import JudgeConfig
from schemas.errors import JudgeUnavailableError, RewardError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
AGAIN = frozenset({408, 409, 425, 429})
_MILLION = 1e6
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the endpoint."""

    text: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class JudgeClient:
    """Sends questions; safe for threads."""

    judge: JudgeConfig
    sleep: Callable[[float], None] = time.sleep
    _http: httpx.Client = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _next: float = field(init=False, default=0.0)
    """When the next request may be sent."""
    _answered: float = field(init=False, default_factory=time.monotonic)
    """When the endpoint last answered, or the present call began."""

    def __post_init__(self) -> None:
        # No redirects: they would carry the key to another host.
        self._http = httpx.Client(timeout=self.judge.request_timeout_s, follow_redirects=False)

    def begin(self) -> None:
        """A batch begins: the time without an answer counts from now."""
        self._answered = time.monotonic()

    def send(self, question: Question, *, vote: int) -> Reply:
        """The reply to a question, whatever it says.

        Raises:
            RewardError: the endpoint refuses the request itself.
            JudgeUnavailableError: it has not answered for `max_outage_s`.
        """
        wait = FIRST_WAIT_S
        while True:
            self._take_turn()
            try:
                answer = self._http.post(self._url, json=self._body(question, vote), headers=self._headers())
            except httpx.HTTPError as error:
                problem, told = f"{type(error).__name__}: {error}", None
            else:
                if answer.is_success:
                    self._answered = time.monotonic()
                    return self._reply(answer)
                problem, told = f"HTTP {answer.status_code}: {answer.text[:_SHOWN]}", answer.headers.get("retry-after")
                if answer.status_code < 500 and answer.status_code not in AGAIN:
                    raise self._refused(problem)
            # Jitter, so that many threads do not come back at the same moment.
            pause = max(wait * random.uniform(0.5, 1.0), _seconds(told))
            left = self._answered + self.judge.max_outage_s - time.monotonic()
            if left <= 0:
                raise unavailable(self.judge, f"has not answered for {self.judge.max_outage_s:g} s ({problem})")
            self.sleep(min(pause, left))
            wait = min(2 * wait, LONGEST_WAIT_S)

    def cost(self, reply: Reply) -> float:
        """What a reply cost, by the prices of the config."""
        judge = self.judge
        return (reply.prompt_tokens * judge.input_price + reply.completion_tokens * judge.output_price) / _MILLION

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def _url(self) -> str:
        return f"{self.judge.base_url.rstrip('/')}/chat/completions"

    def _headers(self) -> dict[str, str]:
        name = self.judge.api_key_variable
        if name is None:
            return {}
        key = os.environ.get(name, "").strip()
        if not key:
            raise RewardError(f"{name} is not set", place="judge.api_key_variable", fix=f"export {name}=... before the run")
        return {"Authorization": f"Bearer {key}"}

    def _body(self, question: Question, vote: int) -> dict[str, Any]:
        judge = self.judge
        form = {"name": "verdict", "strict": True, "schema": question.schema}
        return {
            "model": judge.model,
            "messages": question.messages,
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
            "seed": vote,
            "response_format": {"type": "json_schema", "json_schema": form},
        }

    def _reply(self, answer: httpx.Response) -> Reply:
        try:
            found = answer.json()
            text = found["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            # The caller counts it as a malformed verdict.
            return Reply("", 0, 0)
        usage = found.get("usage")
        counts = usage if isinstance(usage, dict) else {}
        return Reply(text if isinstance(text, str) else "", _count(counts, "prompt_tokens"), _count(counts, "completion_tokens"))

    def _take_turn(self) -> None:
        """Wait until the limit of requests per minute allows another one."""
        limit = self.judge.max_requests_per_minute
        if limit is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + 60.0 / limit
        if begin > now:
            self.sleep(begin - now)

    def _refused(self, problem: str) -> RewardError:
        return RewardError(
            f"the judge refuses the request: {problem}",
            place=self._url,
            fix="check judge.model, judge.api_key_variable, and that the endpoint supports response_format json_schema",
        )


def unavailable(judge: JudgeConfig, what: str) -> JudgeUnavailableError:
    """The error that stops a stage, which can be resumed."""
    return JudgeUnavailableError(
        f"the judge {judge.model} {what}",
        place=judge.base_url,
        fix="start the same command again when it is back: the stage resumes, and verdicts so far are in judge.cache",
    )


def _count(usage: dict[str, Any], name: str) -> int:
    found = usage.get(name)
    return found if isinstance(found, int) and 0 <= found < 2**53 else 0


def _seconds(told: str | None) -> float:
    """Retry-After in seconds; 0 where it is missing, or a date."""
    try:
        return min(max(float(told or 0.0), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return 0.0
