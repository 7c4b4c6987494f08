"""Requests to OpenAI-compatible endpoints: retries with backoff, other addresses, outage, cost.

    400, 401, 403, 404      the settings are wrong: stop at once
    413, and a 400 that     this question does not fit into the judge's context: a reply without a verdict, so that one long text
    names the context       does not stop the run
    408, 409, 429, 5xx,     ask the other addresses; then wait and try again, longer each time, as Retry-After says. After
    no connection, timeout  max_outage_s without any answer the judge counts as unavailable

The key is read from the environment for each request and stands in no message.
"""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from grpo_tasks.judging.frame import Question
from grpo_tasks.judging.store import JudgeLimits
from grpo_tasks.kit.share import Pool
from schemas.config.rewards import JudgeConfig
from schemas.errors import JudgeUnavailableError, RewardError, ServerGoneError

CONNECT_S = 10.0
"""Time limit of a connection: what is not there should not take the time of what answers slowly."""
LONGEST_PAUSE_S = 30.0
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
    """One address, up to and including /v1, as kit/share.py wants to know it."""

    address: str
    own: bool = False


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """What the judge says, and the tokens that count."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class JudgeClient:
    """Sends questions; safe for threads."""

    def __init__(self, judge: JudgeConfig, limits: JudgeLimits) -> None:
        self.judge, self.limits = judge, limits
        limit = judge.request_timeout_s
        # No redirects: they would carry the key to another host.
        self._http = httpx.Client(timeout=httpx.Timeout(limit, connect=min(limit, CONNECT_S)), follow_redirects=False)
        addresses = [JudgeAddress(address.rstrip("/")) for address in dict.fromkeys(judge.base_urls)]
        self._pool = Pool(addresses, concurrency=judge.max_concurrency, patience_s=judge.max_outage_s)

    def send(self, question: Question, *, vote: int) -> EndpointReply:
        """The reply to a question, whatever it says. `RewardError` where an endpoint refuses the request itself.

        `JudgeUnavailableError` where none has answered for `max_outage_s`.
        """
        try:
            answer = self._pool.answer(lambda server: self._post(server.address, question, vote))
        except ServerGoneError as fault:
            raise JudgeUnavailableError(
                f"the judge {self.judge.model} has not answered for {self.judge.max_outage_s:g} s ({fault.message})",
                place=", ".join(self.judge.base_urls),
                fix="start the same command again when it is back: the stage resumes, and verdicts so far are in judge.cache",
            ) from fault
        if not answer.is_success:
            # Nobody charges for a refused request.
            return EndpointReply("", 0, 0)
        text, usage = "", None
        # The caller counts anything else as a malformed verdict.
        with suppress(ValueError, KeyError, IndexError, TypeError, AttributeError):
            found = answer.json()
            usage = found.get("usage")
            text = found["choices"][0]["message"]["content"]
        text = text if isinstance(text, str) else ""
        counts = usage if isinstance(usage, dict) else {}
        # An endpoint that does not count is not free.
        prompt_tokens = _count(counts, "prompt_tokens") or _prompt_tokens(question)
        return EndpointReply(text, prompt_tokens, _count(counts, "completion_tokens") or _tokens(text))

    def expected_cost(self, question: Question) -> float:
        """The most that a request should cost: all tokens that a verdict may have."""
        return self.cost(_prompt_tokens(question), self.judge.max_tokens)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost, by the prices of the config."""
        return (prompt_tokens * self.judge.input_price + completion_tokens * self.judge.output_price) / _MILLION

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, address: str, question: Question, vote: int) -> httpx.Response:
        """The answer of a server, also one that finds the question too long; ServerGoneError: there is none for now."""
        self.limits.pace()
        url = f"{address}/chat/completions"
        try:
            answer = self._received(url, question, vote)
        except httpx.HTTPError as error:
            raise ServerGoneError(f"{type(error).__name__}: {error}") from error
        too_long = answer.status_code == 413 or (answer.status_code == 400 and TOO_LONG.search(answer.text) is not None)
        if answer.is_success or too_long:
            return answer
        problem = f"HTTP {answer.status_code}: {answer.text[:_SHOWN]}"
        if answer.status_code < 500 and answer.status_code not in AGAIN:
            raise RewardError(
                f"the judge refuses the request: {problem}",
                place=url,
                fix="check judge.model, judge.api_key_variable, and that the endpoint supports response_format json_schema",
            )
        fault = ServerGoneError(problem)
        # Retry-After may be a date.
        with suppress(ValueError):
            fault.pause_s = min(max(float(answer.headers.get("retry-after", 0.0)), 0.0), LONGEST_PAUSE_S)
        raise fault

    def _received(self, url: str, question: Question, vote: int) -> httpx.Response:
        """The complete response, or its first MAX_REPLY_BYTES; httpx.HTTPError: there is none within `request_timeout_s`."""
        judge, name = self.judge, self.judge.api_key_variable
        headers = {}
        if name is not None:
            if not (key := os.environ.get(name, "").strip()):
                raise RewardError(f"{name} is not set", place="judge.api_key_variable", fix=f"export {name}=... before the run")
            headers["Authorization"] = f"Bearer {key}"
        form = {"name": "verdict", "strict": True, "schema": question.schema}
        body = {
            "model": judge.model,
            "messages": question.messages,
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
            "seed": vote,
            "response_format": {"type": "json_schema", "json_schema": form},
        }
        limit, content = judge.request_timeout_s, bytearray()
        deadline = time.monotonic() + limit
        with self._http.stream("POST", url, json=body, headers=headers) as response:
            for chunk in response.iter_bytes():
                content += chunk
                # httpx limits the time between two chunks, and some servers send a space while they compute.
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"no complete reply within {limit:g} s")
                if len(content) > MAX_REPLY_BYTES:
                    break
        kept = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=kept, content=bytes(content))


def _prompt_tokens(question: Question) -> int:
    return sum(_tokens(message["content"]) for message in question.messages)


def _tokens(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)


def _count(usage: dict[str, Any], name: str) -> int:
    found = usage.get(name)
    return found if isinstance(found, int) and 0 <= found < 2**53 else 0
