"""Whoever waits for a command sees that it works, and how long it will take: the tests watch the clock of its output."""

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest

from flows.cli import progress as progress_module
from flows.cli.progress import shown_progress
from grpo_tasks.kit.progress import Progress, report
from tests.flows.place import BIN, Place
from tests.processes.waiting import until

COLUMNS = 80
ERASE = "\r\x1b[2K"


@contextmanager
def terminal():
    """A terminal of 80 columns: the file that a program writes to, and what it has shown, each piece with its second."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    shown, began = [], time.monotonic()

    def read():
        with suppress(OSError):  # the other end is closed
            while data := os.read(ours, 65536):
                shown.append((time.monotonic() - began, data.decode(errors="replace")))

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(theirs, "w") as file:
        yield file, shown
    thread.join()
    os.close(ours)


def lines_of(shown):
    """What stands in the terminal at the end: of a line that was painted again and again, the last one."""
    return [line.rpartition(ERASE)[2] for line in "".join(text for _, text in shown).split("\r\n")]


def painted(shown):
    """Every version of the last line of the terminal, without its spinner."""
    return [text[2:] for text in re.findall(r"\r\x1b\[2K([|/\\-] [^\r\n]*)", "".join(text for _, text in shown))]


def test_a_log_line_stands_above_the_line_of_progress(monkeypatch):
    monkeypatch.setattr(progress_module, "PAINT_S", 0.01)
    with terminal() as (file, shown):
        monkeypatch.setattr(sys, "stderr", file)
        with shown_progress("reading the config"):
            # As a library does: the handler keeps the stream.
            handler, log = logging.StreamHandler(), logging.getLogger("tests.waits")
            log.addHandler(handler)
            until(lambda: any(text.startswith("reading the config, ") for text in painted(shown)))
            report(Progress("sampling", 12, 64, "completions", left_s=40.0, step="probe_rewards", number=3, steps=14))
            until(lambda: painted(shown)[-1].startswith("3/14 probe_rewards: sampling 12/64 completions, "))
            log.warning("something happened at postgresql://me:planted@host/db")
            sys.stderr.write("half a line")
            time.sleep(0.05)
            sys.stderr.write(", and its end\n")
            monkeypatch.setattr(progress_module, "HALF_LINE_S", 0.0)
            sys.stderr.write("a line without an end")
            until(lambda: lines_of(shown)[-2:-1] == ["a line without an end"])
        log.removeHandler(handler)
        print("the result at postgresql://me:planted@host/db", file=sys.stderr)
    hidden = "at postgresql://me:***@host/db"
    assert lines_of(shown) == [
        f"something happened {hidden}",
        "half a line, and its end",
        "a line without an end",
        f"the result {hidden}",
        "",
    ]
    assert re.search(r"completions, (40|39) s left$", painted(shown)[-1])


def test_a_pipe_gets_whole_lines_at_intervals(monkeypatch, tmp_path):
    monkeypatch.setattr(progress_module, "LINE_S", 0.01)
    path = tmp_path / "output"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with shown_progress("training"):
            until(lambda: path.read_text().count("\n") > 3)
            report(Progress("update", 3, 100, left_s=120.0, step="train_stage-format", number=5, steps=12))
            until(lambda: "update" in path.read_text())
    lines = path.read_text().splitlines()
    assert lines[0] == "training, 0 s"
    assert lines[-1] == "5/12 train_stage-format: update 3/100, 2 min left"


SHORT = [
    *("--set", "stages.0.max_steps=2", "--set", "stages.1.max_steps=2", "--set", "stages.0.save_steps=2"),
    *("--set", "evaluation.max_prompts=16", "--set", "evaluation.num_samples=2"),
    *("--set", "lab.strict=false", "--set", "lab.num_prompts=4"),
]


def watch(place, *arguments):
    """Run a command in a terminal: what it showed, and the longest silence from its start to its end: seconds, and what came
    before it."""
    with terminal() as (file, shown):
        began = time.monotonic()
        environment = place.environment | {"COLUMNS": str(COLUMNS), "TERM": "xterm"}
        process = subprocess.Popen(
            [BIN / "grpo", *arguments], cwd=place.root, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        code = process.wait(timeout=1800)
        ended = time.monotonic() - began
    assert code == 0, "".join(text for _, text in shown)[-3000:]
    pieces = [(0.0, ""), *shown, (ended, "")]
    return shown, max((after - before, text) for (before, text), (after, _) in pairwise(pieces))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("waits"))


@pytest.fixture(scope="module")
def longest_s(place):
    """Five seconds on a free machine; on a busy one, where Python itself takes that long to start, more."""
    began = time.monotonic()
    place.grpo("fields", "lab")
    return max(5.0, 4 * (time.monotonic() - began))


@pytest.mark.long
@pytest.mark.ci
def test_a_run_is_never_silent_and_says_which_step_of_how_many(place, longest_s):
    shown, silence = watch(place, "run", "demo", *SHORT)
    assert silence < (longest_s, "")
    lines = lines_of(shown)
    finished = [line for line in lines if re.search(r"\| \d+/12 \w+(-\w+)?: done in ", line)]
    assert [re.search(r"\| (\d+)/12 ", line)[1] for line in finished] == [str(number) for number in range(1, 13)]
    assert all(len(line) < COLUMNS for line in [*finished, *painted(shown)])
    assert not [line for line in lines if "Finished in state Completed(" in line], "a finished step has one line"
    steps = "\n".join(painted(shown))
    # Which work is caught by the clock depends on the machine: a short one may begin and end between two looks.
    assert re.search(r"\d+/12 [\w-]+: [a-z ]+ [\d,]+/[\d,]+ \w+", steps), "counted work within a step"
    assert re.search(r"\d+/12 train_stage-format: ", steps)


@pytest.mark.long
def test_single_commands_are_never_silent(place, longest_s):
    for arguments in (["rewards", "demo"], ["evaluate", "embedded:base", "demo"], ["validate", "demo"]):
        # Nothing is skipped.
        shown, silence = watch(place, *arguments, *SHORT, "--fresh")
        assert silence < (longest_s, ""), arguments
        assert any(re.match(r"2/\d validate_data", text) for text in painted(shown)), arguments
