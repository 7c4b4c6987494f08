"""What a browser finds in a page."""

import re
from html.parser import HTMLParser


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
