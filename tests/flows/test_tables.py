"""Tables as they are read: in a terminal every cell is whole and every line fits, a pipe gets tab-separated lines."""

import json
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from io import StringIO
from itertools import pairwise

import polars as pl
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from flows.cli import show
from grpo_tasks.tracking.runs import open_run
from schemas.results.base import Section
from tests.flows.place import ROOT
from tests.tracking.conftest import (  # noqa: F401 - fixtures
    client,
    data_report,
    database,
    empty_database,
    make_config,
    make_evaluation,
    make_stage,
)

NAME = "a-project-with-a-rather-long-name"
WIDTHS = (80, 100)
DRIVER = """
import contextlib, fcntl, json, struct, sys, termios
from flows.cli.main import app
widths, calls = json.loads(sys.argv[1])
for width in widths:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    for call in calls:
        app(call, standalone_mode=False)
        print("\\x1e", end="", flush=True)
with open("piped.txt", "w") as pipe, contextlib.redirect_stdout(pipe):
    for call in calls:
        app(call, standalone_mode=False)
        print("\\x1e", end="")
"""
"""Every call in a terminal of each width, then with its output in a file: in one process, because starting one takes seconds."""


def in_terminals(calls, folder):
    """The lines that each call prints, by width; 0 is the pipe."""
    ours, theirs = pty.openpty()
    hidden = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "MLFLOW_TRACKING_URI", "PREFECT_API_URL")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {
        "TERM": "xterm-256color",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", DRIVER, json.dumps([WIDTHS, list(calls.values())])]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    found = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 65_536):
            found += piece
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error.decode()[-3000:]
    text = re.sub(r"\x1b\[[0-9;]*m", "", found.decode()) + (folder / "piped.txt").read_text()
    answers = iter(text.split("\x1e"))
    return {width: {label: next(answers).splitlines() for label in calls} for width in (*WIDTHS, 0)}


@pytest.fixture
def shown(database, client, make_config, make_stage, make_evaluation, data_report, tmp_path):  # noqa: F811
    """What the commands print that list, compare and plan, for two runs, a version and the completions of a stage."""
    ids = []
    for key, accuracy in (("1" * 16, 0.5), ("2" * 16, 0.9)):
        with open_run(make_config(database, name=NAME, seed=int(key[0])), key=key) as run:
            run.record(data_report)
            run.record(make_evaluation("merged", accuracy, key=key))
            ids.append(run.run_id[:8])
    client.create_registered_model(NAME)
    version = client.create_model_version(NAME, "elsewhere", run_id=run.run_id)
    client.set_registered_model_alias(NAME, "champion", version.version)
    folder = tmp_path / "runs" / NAME / "train_stage" / "format-key" / "completions"
    folder.mkdir(parents=True)
    texts = ["<answer>4</answer>", "<answer>4</answer>", "no idea", "<answer>4</answer>"]
    group = {"prompt_id": ["a"] * 4, "sample": range(4), "prompt": ["What is 3 + 1?"] * 4, "answer": ["4"] * 4}
    rewards = {"reward": [1.0, 1.0, 0.0, 1.0], "advantage": [0.5, 0.5, -1.5, 0.5]}
    for step in (1, 20):
        pl.DataFrame(group | {"completion": texts} | rewards).write_parquet(folder / f"step-{step:06d}.parquet")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"extends": "demo", "name": NAME}))
    over = ["--over", "stages.0.learning_rate=1e-3,1e-4", "--over", "stages.1.num_generations=4,8"]
    calls = {
        "runs": ["runs"],
        "wide": ["runs", "--wide"],
        "models": ["models"],
        "compare": ["compare", *ids],
        "completions": ["completions", "mine.yaml"],
        "presets": ["presets"],
        "plan": ["run", "demo", "--dry-run"],
        "sweep": ["sweep", "demo", *over, "--seeds", "2", "--dry-run"],
    }
    return ids, in_terminals(calls, tmp_path)


@pytest.mark.slow
def test_commands_fit_their_terminal_and_pipes_get_plain_lines(shown):
    check_terminals(*shown)
    check_pipe(*shown)


def check_terminals(ids, lines):
    for width in WIDTHS:
        for label, printed in lines[width].items():
            if label != "wide":
                # A path is printed as it is.
                assert [line for line in printed if cell_len(line) > width and not line.startswith("page: ")] == [], label
        whole = {label: "\n".join(printed) for label, printed in lines[width].items()}
        assert "…" not in "".join(whole.values())
        assert all(name in whole["runs"] for name in (*ids, NAME, "finished", "90.0 %"))
        assert all(name in whole["models"] for name in (f"{NAME}/1", "champion"))
        # Two runs of those that are listed, by the ids that the list shows, the older one first.
        assert f"grpo compare {ids[0]} {ids[1]}" in whole["runs"]
        assert f"second: {NAME}" in whole["compare"]
        assert "lenient accuracy" not in "\n".join(lines[80]["models"]).partition("not shown")[0]
        assert "3 identical completions, reward 1, advantage 0.5\n<answer>4</answer>\n--- reward 0" in whole["completions"]
        assert "prompt a (ground truth 4)\nWhat is 3 + 1?" in whole["completions"]
        assert "completions are recorded of updates 1, 20" in " ".join(whole["completions"].split())
    narrow, wider = (headings(lines[width]["runs"]) for width in WIDTHS)
    assert len(narrow) < len(wider)
    assert "started" in "\n".join(lines[80]["wide"])
    assert "not shown" not in "\n".join(lines[80]["wide"])


def headings(printed):
    rule = next(number for number, line in enumerate(printed) if set(line) == {"─"})
    return " ".join(printed[:rule]).split()


def check_pipe(ids, lines):
    assert not re.search(r"[─│┃━]|not shown|\x1b", "\n".join(line for printed in lines[0].values() for line in printed))
    for label, rows in (("runs", 2), ("models", 1), ("presets", len(lines[0]["presets"]) - 1)):
        heading, *found = (line.split("\t") for line in lines[0][label])
        assert len(found) == rows
        assert {len(row) for row in found} == {len(heading)}
    heading, *found = (line.split("\t") for line in lines[0]["runs"])
    assert [row[0] for row in found] == ids[::-1], "what compare takes, the newest first"
    assert heading[:3] == ["run", "name", "status"]
    assert dict(zip(heading, found[0], strict=True))["accuracy"] == "90.0 %"
    assert lines[0]["runs"] == lines[0]["wide"]


LETTERS = st.text("abcdefgh ぁ漢", max_size=60)


@st.composite
def sections(draw):
    columns = [f"heading {number} of {draw(st.integers(1, 10**9))}" for number in range(draw(st.integers(1, 5)))]
    rows = draw(st.lists(st.tuples(*[LETTERS] * len(columns)), min_size=1, max_size=4))
    return Section(columns=columns, rows=rows, right=columns[-1:], extra=draw(st.permutations(columns[1:])))


@given(sections(), st.integers(40, 120))
def test_no_cell_is_cut_and_no_line_is_too_long(section, width):
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(show, "out", Console(file=printed, force_terminal=True, color_system=None, width=width))
        show.show(section)
    table, _, missing = printed.getvalue().partition("not shown: ")
    assert all(cell_len(line) <= width for line in table.splitlines())
    left_out = [name for name in section.extra if name in " ".join(missing.split())]
    empty = [name for name in section.extra if not any(row[section.columns.index(name)] for row in section.rows)]
    kept = [number for number, name in enumerate(section.columns) if name not in (*left_out, *empty)]
    wanted = "".join(section.columns[number] + "".join(row[number] for row in section.rows) for number in kept)
    assert Counter(table) - Counter(" \n─") - Counter(dict.fromkeys(" \n─", 10**6)) == Counter("".join(wanted.split()))
    order = [section.extra.index(name) for name in left_out]
    assert all(before < after for before, after in pairwise(order)), "those that matter least are left out"
    assert not order or order[-1] == len(section.extra) - 1 or section.extra[-1] in empty


def test_sentences_break_between_words_in_a_terminal_only(monkeypatch):
    path = f"/data/{'very-long-folder/' * 4}report.md"
    line = f"  fix format/signal: raise num_generations or rollout.temperature of this stage, then read {path} again"
    for terminal, width in ((True, 40), (False, 40)):
        written = StringIO()
        monkeypatch.setattr(show, "out", Console(file=written, width=width, force_terminal=terminal))
        show.tell(line)
        lines = written.getvalue().splitlines()
        assert " ".join(part.strip() for part in lines) == line.strip()
        if terminal:
            assert all(len(part) < width or part.strip() == path for part in lines)
            assert {part[:4] for part in lines[1:]} == {"    "}
        else:
            assert lines == [line]
