"""The receiver of examples/webhook as a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECEIVER = Path(__file__).resolve().parents[3] / "examples" / "webhook" / "receiver.py"
SECRET = "correct horse battery staple"


@pytest.fixture
def receiver():
    """Its address, and a function that reads the next message from its output. It accepts what is signed with `SECRET`."""
    environment = os.environ | {"GRPO_WEBHOOK_SECRET": SECRET}
    process = subprocess.Popen(
        [sys.executable, str(RECEIVER), "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    address = process.stdout.readline().split()[-1]

    def next_message():
        text = ""
        while not text.endswith("}\n") or text.count("{") != text.count("}"):
            text += process.stdout.readline()
        return json.loads(text)

    yield address, next_message
    process.kill()
    process.wait()
    process.stdout.close()
