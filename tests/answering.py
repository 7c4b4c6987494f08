"""Servers that answer every request in one way, as what stands in front of a server does: a proxy, a page to sign in."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS = {
    "login refused": (401, "text/plain", b"You are not authenticated"),
    "login page": (200, "text/html", b"<html><body>Please sign in</body></html>"),
    "another server": (404, "application/json", b'{"detail": "Not Found"}'),
    "error": (500, "application/json", b'{"error_code": "INTERNAL_ERROR", "message": "it cannot"}'),
    "another page": (404, "text/html", b"<html>nothing here</html>"),
}


@contextmanager
def answering(kind):
    """A server that gives this one of ANSWERS; yields its address."""
    status, content_type, content = ANSWERS[kind]

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer  # noqa: N815 - names of the library

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
