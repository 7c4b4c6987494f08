"""Requests as a browser sends them for web pages of different places, and what it would fetch for a page."""

import http.client
import json
import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

FOREIGN = {
    "a page from elsewhere": {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    "a page of another port": {"Origin": "http://127.0.0.1:9999", "Sec-Fetch-Site": "same-site"},
    "a sandboxed frame or a file": {"Origin": "null"},
    "a page that says no origin": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a name that was bound anew": {"Host": "evil.example:4200"},
    "a name that looks like a private network": {"Host": "10.evil.example:5000"},
}


def own_page(address, name="127.0.0.1"):
    """Headers of a request by the server's own page."""
    site = "same-origin" if name == "127.0.0.1" else "cross-site"
    return {"Origin": f"http://{name}:{urlsplit(address).port}", "Sec-Fetch-Site": site}


def status(url, headers, method="GET", body=None):
    """HTTP status; a body is sent as a page can without asking first: no content type, like `fetch` sends a Blob."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


class Page(HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]


def assert_self_contained(text):
    """No scripts, no forms, and nothing that a browser would fetch."""
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "form"} & set(page.tags)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"@import|url\(", text)
