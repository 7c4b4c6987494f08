"""Requests to OpenAI-compatible endpoints: retries with backoff, other addresses, outage, cost.

    400, 401, 403, 404      the settings are wrong: stop at once
    413, and a 400 that     this question does not fit into the judge's context: a reply without a verdict, so that one long text
    names the context       does not stop the run
    408, 409, 429, 5xx,     ask the other addresses; then wait and try again, longer each time, as Retry-After says. After
    no connection, timeout  max_outage_s without any answer the judge counts as unavailable

The key is read from the environment for each request and stands in no message.
"""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from grpo_tasks.judging.frame import Question
from grpo_tasks.judging.limits import JudgeLimits
from schemas.config.learning.judge import JudgeConfig
from schemas.errors import JudgeUnavailableError, RewardError

REST_S = 10.0
"""How long an address that failed is left out while others answer."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
CONNECT_S = 10.0
"""Time limit of a connection: what is not there should not take the time of what answers slowly."""
CHARS_PER_TOKEN = 3
"""For an endpoint that does not count tokens. Most texts have more characters a token, so this guess is rather too expensive."""
AGAIN = frozenset({408, 409, 425, 429})
TOO_LONG = re.compile(r"context[ _]?(length|size|window)|maximum model length|prompt is too long", re.IGNORECASE)
"""How endpoints name a question that does not fit: vLLM, OpenAI, llama.cpp, SGLang and others."""
MAX_REPLY_BYTES = 2**23
"""Largest reply that is received. What is cut there is no verdict."""
_MILLION = 1e6
_SHOWN = 300


@dataclass(slots=True)
class JudgeAddress:
    """One address."""

    address: str
    """Up to and including /v1."""
    in_flight: int = 0
    sent: int = 0
    """Requests so far."""
    failing: bool = False
    rests_until: float = 0.0


class JudgeAddresses:
    """The addresses of a judge; safe for threads.

    The least loaded address that is not resting gets a request. One that fails rests for REST_S. If all rest, one is asked all
    the same: `JudgeClient` decides when the judge is unavailable.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._servers = [JudgeAddress(address.rstrip("/")) for address in dict.fromkeys(addresses)]

    def __len__(self) -> int:
        return len(self._servers)

    @contextmanager
    def taken(self, tried: Collection[str]) -> Iterator[JudgeAddress]:
        """The address for a request, as long as the request takes.

        Args:
            tried: addresses that have failed for this request; they come last.
        """
        with self._lock:
            now = time.monotonic()
            server = min(self._servers, key=lambda one: (one.address in tried, one.rests_until > now, one.in_flight, one.sent))
            server.in_flight += 1
            server.sent += 1
            if server.failing:
                # Others do not try it until this request knows more.
                server.rests_until = now + REST_S
        try:
            yield server
        finally:
            with self._lock:
                server.in_flight -= 1

    def answered(self, server: JudgeAddress) -> None:
        """It has answered."""
        with self._lock:
            server.failing, server.rests_until = False, 0.0

    def failed(self, server: JudgeAddress, told_s: float) -> None:
        """It has not answered, or asks for a pause of `told_s` seconds."""
        with self._lock:
            server.failing, server.rests_until = True, time.monotonic() + max(REST_S, told_s)


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """An answer of the endpoint."""

    text: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class JudgeClient:
    """Sends questions; safe for threads."""

    judge: JudgeConfig
    limits: JudgeLimits
    sleep: Callable[[float], None] = time.sleep
    _http: httpx.Client = field(init=False)
    _servers: JudgeAddresses = field(init=False)
    _answered: float = field(init=False, default=0.0)
    """When an address last answered."""

    def __post_init__(self) -> None:
        limit = self.judge.request_timeout_s
        # No redirects: they would carry the key to another host.
        self._http = httpx.Client(timeout=httpx.Timeout(limit, connect=min(limit, CONNECT_S)), follow_redirects=False)
        self._servers = JudgeAddresses(self.judge.base_urls)

    def send(self, question: Question, *, vote: int) -> EndpointReply:
        """The reply to a question, whatever it says.

        Raises:
            RewardError: an endpoint refuses the request itself.
            JudgeUnavailableError: none has answered for `max_outage_s`.
        """
        wait, pause, begin = FIRST_WAIT_S, 0.0, None
        tried: set[str] = set()
        while True:
            self.limits.pace()
            # Waiting for a limit is no outage.
            begin = time.monotonic() if begin is None else begin
            with self._servers.taken(tried) as server:
                answer, problem, told = self._post(server, question, vote)
            if answer is not None:
                self._servers.answered(server)
                self._answered = time.monotonic()
                # Nobody charges for a refused request.
                return self._reply(answer, question) if answer.is_success else EndpointReply("", 0, 0)
            self._servers.failed(server, told)
            tried.add(server.address)
            pause = max(pause, told)
            if len(tried) < len(self._servers):
                continue
            left = max(begin, self._answered) + self.judge.max_outage_s - time.monotonic()
            if left <= 0:
                raise self._unavailable(problem)
            # Jitter, so that many threads do not come back at the same moment.
            self.sleep(min(max(wait * random.uniform(0.5, 1.0), pause), left))
            wait, pause = min(2 * wait, LONGEST_WAIT_S), 0.0
            tried.clear()

    def expected_cost(self, question: Question) -> float:
        """The most that a request should cost: all tokens that a verdict may have."""
        return self.cost(_prompt_tokens(question), self.judge.max_tokens)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost, by the prices of the config."""
        return (prompt_tokens * self.judge.input_price + completion_tokens * self.judge.output_price) / _MILLION

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, server: JudgeAddress, question: Question, vote: int) -> tuple[httpx.Response | None, str, float]:
        """The answer of a server, also one that finds the question too long; or None, what is wrong, and the pause in seconds
        that it asks for."""
        url = f"{server.address}/chat/completions"
        try:
            answer = self._received(url, self._body(question, vote))
        except httpx.HTTPError as error:
            return None, f"{type(error).__name__}: {error}", 0.0
        if answer.is_success or _too_long(answer):
            return answer, "", 0.0
        problem = f"HTTP {answer.status_code}: {answer.text[:_SHOWN]}"
        if answer.status_code < 500 and answer.status_code not in AGAIN:
            raise RewardError(
                f"the judge refuses the request: {problem}",
                place=url,
                fix="check judge.model, judge.api_key_variable, and that the endpoint supports response_format json_schema",
            )
        return None, problem, _seconds(answer.headers.get("retry-after"))

    def _received(self, url: str, body: dict[str, Any]) -> httpx.Response:
        """The complete response, or its first MAX_REPLY_BYTES.

        Raises:
            httpx.HTTPError: there is none within `request_timeout_s`.
        """
        limit, content = self.judge.request_timeout_s, bytearray()
        deadline = time.monotonic() + limit
        with self._http.stream("POST", url, json=body, headers=self._headers()) as response:
            for chunk in response.iter_bytes():
                content += chunk
                # httpx limits the time between two chunks, and some servers send a space while they compute.
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"no complete reply within {limit:g} s")
                if len(content) > MAX_REPLY_BYTES:
                    break
        kept = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=kept, content=bytes(content))

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

    def _reply(self, answer: httpx.Response, question: Question) -> EndpointReply:
        text, usage = "", None
        try:
            found = answer.json()
            usage = found.get("usage")
            text = found["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            # The caller counts it as a malformed verdict.
            pass
        text = text if isinstance(text, str) else ""
        counts = usage if isinstance(usage, dict) else {}
        # An endpoint that does not count is not free.
        prompt_tokens = _count(counts, "prompt_tokens") or _prompt_tokens(question)
        return EndpointReply(text, prompt_tokens, _count(counts, "completion_tokens") or _tokens(text))

    def _unavailable(self, problem: str) -> JudgeUnavailableError:
        return JudgeUnavailableError(
            f"the judge {self.judge.model} has not answered for {self.judge.max_outage_s:g} s ({problem})",
            place=", ".join(self.judge.base_urls),
            fix="start the same command again when it is back: the stage resumes, and verdicts so far are in judge.cache",
        )


def _too_long(answer: httpx.Response) -> bool:
    return answer.status_code == 413 or (answer.status_code == 400 and TOO_LONG.search(answer.text) is not None)


def _prompt_tokens(question: Question) -> int:
    return sum(_tokens(message["content"]) for message in question.messages)


def _tokens(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)


def _count(usage: dict[str, Any], name: str) -> int:
    found = usage.get(name)
    return found if isinstance(found, int) and 0 <= found < 2**53 else 0


def _seconds(told: str | None) -> float:
    """Retry-After in seconds; 0 where it is missing, or a date."""
    try:
        return min(max(float(told or 0.0), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return 0.0
