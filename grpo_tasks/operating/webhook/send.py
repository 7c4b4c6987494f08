"""Sends a signed JSON message to the address in the config, and to no other.

    body, id, time  --HMAC-SHA256 with the secret of the environment-->  POST url  --no answer, 429, 5xx-->  again, until limit_s

The signature is that of MLflow's own webhooks and of Standard Webhooks: base64 of the HMAC over "ID.TIME.BODY", with "v1," in
front. A message that is repeated keeps its id and gets a new time. Redirects are not followed.
"""

import base64
import hashlib
import hmac
import json
import os
import time
import uuid
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx

from schemas.config.operations import WebhookConfig
from schemas.errors import ConfigError

ID, TIME, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
"""Headers of a message."""
TRY_LIMIT_S = 10.0
"""Longest wait for one answer."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_TOO_MANY = 429


def secret_of(hook: WebhookConfig) -> bytes:
    """The secret, from the environment.

    Raises:
        ConfigError: the variable is not set.
    """
    secret = os.environ.get(hook.secret_variable, "").strip()
    if not secret:
        raise ConfigError(
            f"the environment variable {hook.secret_variable} is not set, and an unsigned message is never sent",
            place="tracking.webhook.secret_variable",
            fix=f"export {hook.secret_variable}=... where runs, workers and commands start; the receiver has the same secret",
        )
    return secret.encode()


def signature(secret: bytes, message_id: str, sent: str, body: bytes) -> str:
    """`v1,` and base64 of the HMAC-SHA256 over id, time and body."""
    signed = f"{message_id}.{sent}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()


def send(hook: WebhookConfig, message: Mapping[str, object]) -> str:
    """Send a message; repeat it while the receiver is away or busy, for at most `hook.limit_s` seconds.

    Returns:
        Why it did not arrive; empty if it did.

    Raises:
        ConfigError: there is no secret.
    """
    assert hook.url is not None, "the caller has checked that there is a receiver"
    secret, body, message_id = secret_of(hook), json.dumps(message).encode(), f"msg_{uuid.uuid4().hex}"
    deadline, wait = time.monotonic() + hook.limit_s, _FIRST_WAIT_S
    with httpx.Client(follow_redirects=False) as client:
        while True:
            sent = str(int(time.time()))
            headers = {"content-type": "application/json", ID: message_id, TIME: sent}
            headers[SIGNATURE] = signature(secret, message_id, sent, body)
            limit_s = max(0.1, min(TRY_LIMIT_S, deadline - time.monotonic()))
            try:
                answer = client.post(hook.url, content=body, headers=headers, timeout=limit_s)
            except httpx.HTTPError as error:
                problem = type(error).__name__
            else:
                if answer.is_success:
                    return ""
                problem = f"HTTP {answer.status_code}"
                if answer.status_code < 500 and answer.status_code != _TOO_MANY:
                    return problem
            if time.monotonic() + wait >= deadline:
                return f"{problem}, for {hook.limit_s:g} s"
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)


def host_of(url: str) -> str:
    """The address without its path, which may be a secret."""
    found = urlsplit(url)
    return f"{found.scheme}://{found.hostname or ''}" + (f":{found.port}" if found.port else "")
