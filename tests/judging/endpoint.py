"""A real HTTP server that speaks the chat protocol, with a judge whose opinions a test chooses."""

import json
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint:
    """What the server thinks, and what it was asked."""

    def __init__(self, opinion):
        self.opinion = opinion
        """(labels and texts, properties of a criterion) -> the answer to every criterion."""
        self.requests, self.headers = [], []
        self.failures = []
        """Answers to give first: (status, headers, body) or a text that stands in the place of a verdict."""
        self.down = False
        self.usage = {"prompt_tokens": 100, "completion_tokens": 20}
        """What it says about tokens; None: nothing."""
        self.delay_s = 0.0
        self.spaces, self.pause_s = 0, 0.0
        """Spaces that it sends before each reply, and the seconds before each of them: what keeps a slow connection open."""
        self.in_flight = self.most_in_flight = 0
        self.arrivals = []
        """Time of each request."""
        self.lock = threading.Lock()

    def answer(self, body):
        """Status, headers and body of the reply to a request."""
        with self.lock:
            self.requests.append(body)
            if self.down:
                return 503, {}, "overloaded"
            failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, tuple):
            return failure
        content = failure if failure is not None else json.dumps(self.verdict(body))
        found = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        return 200, {}, json.dumps(found if self.usage is None else found | {"usage": self.usage})

    def count(self, change):
        """A request arrives (1) or is answered (-1)."""
        with self.lock:
            self.in_flight += change
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if change > 0:
                self.arrivals.append(time.monotonic())

    def verdict(self, body):
        """A verdict that fits the schema of the request, by this server's opinion."""
        schema = body["response_format"]["json_schema"]["schema"]
        [marker] = schema["properties"]["marker"]["enum"]
        texts = {}
        for line in body["messages"][1]["content"].splitlines():
            label, text = line.removeprefix(f"[{marker} ").split("]", 1)
            if text:
                texts[label] = json.loads(text)
        criteria = schema["properties"]["criteria"]["properties"]
        answers = {name: {"reason": "so", **self.opinion(texts, one["properties"])} for name, one in criteria.items()}
        says_no = schema["properties"]["manipulation"]["enum"][0]
        return {"marker": marker, "criteria": answers, "manipulation": says_no}


@contextmanager
def serving(endpoint, port=0):
    """The address of a server with this endpoint, up to and including /v1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            assert self.path == "/v1/chat/completions"
            endpoint.headers.append(dict(self.headers))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.count(1)
            time.sleep(endpoint.delay_s)
            status, headers, text = endpoint.answer(body)
            # Before the answer is on its way: whoever reads it may send the next request at once.
            endpoint.count(-1)
            content = text.encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(endpoint.spaces + len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            # The client may have given up.
            with suppress(OSError):
                for _ in range(endpoint.spaces):
                    time.sleep(endpoint.pause_s)
                    self.wfile.write(b" ")
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def good(text):
    """What this judge likes: the word good, as often as possible, up to four times."""
    return min(4, text.count("good"))


def fair(texts, properties):
    """Points for the word good, or the completion that has more of it."""
    if "points" in properties:
        return {"points": good(texts["completion"])}
    first, second = good(texts["completion a"]), good(texts["completion b"])
    return {"winner": "tie" if first == second else "a" if first > second else "b"}
