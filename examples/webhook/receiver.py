"""Receives MLflow's signed messages about a new champion, on the standard library alone: python receiver.py [PORT].

    POST  ->  length  ->  time within five minutes  ->  signature, compared in constant time  ->  id never seen  ->  on_champion()

MLflow signs "ID.TIME.BODY". The secret comes from WEBHOOK_SECRET. Put a server with TLS in front of it, or keep it on 127.0.0.1.
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BYTES = 1_000_000
TOLERANCE_S = 300
"""Largest difference between a message's time and this machine's clock."""
HEADERS = ("X-MLflow-Delivery-Id", "X-MLflow-Timestamp", "X-MLflow-Signature")


def on_champion(name: str, version: str) -> None:
    """Replace this by what you want to happen: deploy the version, write to a chat, start a test."""
    print(f"version {version} of {name} is the champion", flush=True)


class Seen:
    """Ids of the messages of the last minutes. An older message is refused by its time."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, message_id: str, now: float) -> bool:
        """Whether the id is new."""
        with self._lock:
            self._until = {known: until for known, until in self._until.items() if until > now}
            is_new = message_id not in self._until
            self._until[message_id] = now + 2 * TOLERANCE_S
            return is_new

    def forget(self, message_id: str) -> None:
        """Let a message come again, because it could not be handled."""
        with self._lock:
            self._until.pop(message_id, None)


def why_not(secret: bytes, message_id: str, sent: str, given: str, body: bytes, now: float) -> str:
    """Why a message is refused; empty for one that is genuine and recent."""
    if not (message_id and sent.isascii() and sent.isdigit() and len(sent) <= 12):
        return "id or time is missing"
    if abs(now - int(sent)) > TOLERANCE_S:
        return "too old, or from the future"
    wanted = base64.b64encode(hmac.digest(secret, f"{message_id}.{sent}.".encode() + body, hashlib.sha256))
    # A header may hold several signatures, because a secret is being replaced. All are compared, each in constant time.
    fits = [hmac.compare_digest(b"v1," + wanted, one.encode()) for one in given.split(" ")[:8]]
    return "" if any(fits) else "the signature does not fit"


class Receiver(BaseHTTPRequestHandler):
    """Answers 204 to a genuine message, also to a repeated one, which changes nothing."""

    timeout = 10
    secret = b""
    seen = Seen()

    def do_POST(self) -> None:
        """Check the message, then hand it over once."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BYTES:
            self._answer(413)
            return
        body = self.rfile.read(int(length))
        message_id, sent, given = (self.headers.get(name, "") for name in HEADERS)
        refused = why_not(self.secret, message_id, sent, given, body, time.time())
        if refused:
            self.log_message("refused: %s", refused)
            self._answer(401)
            return
        if self.seen.add(message_id, time.time()):
            try:
                data = json.loads(body)["data"]
                if data.get("alias") == "champion":
                    on_champion(data["name"], data["version"])
            except Exception:
                # The sender repeats it after this answer.
                self.seen.forget(message_id)
                self._answer(500)
                raise
        self._answer(204)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True


def main() -> None:
    """Serve on 127.0.0.1 until Ctrl-C."""
    Receiver.secret = os.environ.get("WEBHOOK_SECRET", "").strip().encode()
    if not Receiver.secret:
        sys.exit("export WEBHOOK_SECRET first: the one that the webhook is registered with")
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8099
    server = ThreadingHTTPServer(("127.0.0.1", port), Receiver)
    print(f"waiting on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
