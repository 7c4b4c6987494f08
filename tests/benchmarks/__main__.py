"""`make bench`: ours beside TRL and beside the plain way, on this machine, in one go; ratios on the screen and in .bench/.

Times of one run mean something only beside each other; the ratios are what is promised.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from schemas.paths import resolve
from tests.benchmarks.comparison import Line, best, child, report
from tests.benchmarks.noisy import GOAL, MOST_COMPLETIONS
from tests.benchmarks.real import share_lines
from tests.benchmarks.sides import Work
from tests.real_model import real_model_folder
from tests.zoo import build as zoo

PARTS = {"results": "--cpu", "results-noisy": "--noisy", "results-real": "--real"}
"""The options that choose one part."""
LEARNING_UPDATES = 40
SEEDS = (1, 2, 3)
NOISY_SEEDS = (1, 2, 3, 4, 5, 6)
"""Three seeds mislead here."""


def shortcut_lines(work: Work) -> list[Line]:
    """What sharing prompts and folding the adapter save, each alone and both together."""
    on, repeated, unfolded, plain = best(
        [
            ("ours", work),
            ("ours", replace(work, resources={"share_prompts": False})),
            ("ours", replace(work, resources={"fold_adapter": False})),
            ("ours", replace(work, resources={"share_prompts": False, "fold_adapter": False})),
        ]
    )
    return [
        Line("share_prompts", "update, long prompts: prompts shared, against off", "s", on["step_s"], repeated["step_s"]),
        Line("fold_adapter", "update, long prompts: adapter folded in, against off", "s", on["step_s"], unfolded["step_s"]),
        Line("both", "update, long prompts: both, against both off", "s", on["step_s"], plain["step_s"]),
    ]


def hybrid_lines() -> list[Line]:
    """A tiny Qwen3.5 of random weights, three of whose four layers have a state of their own."""
    with tempfile.TemporaryDirectory() as folder:
        zoo.save("qwen3_5_text", Path(folder))
        work = Work(folder, prompt_tokens=96, completion_tokens=32, prompts=8, group=8, updates=3)
        sides = [("ours", work), ("ours", replace(work, resources={"share_prompts": False})), ("theirs", work)]
        ours, plain, theirs = best(sides)
    what = "update, hybrid (8 x 8 completions of 32 tokens, prompts of 96)"
    return [
        Line("step_hybrid", what, "s", ours["step_s"], theirs["step_s"], promised=2.0),
        Line("hybrid_plain", f"{what}: packed, against the plain layout", "s", ours["step_s"], plain["step_s"]),
    ]


def cpu_lines() -> list[Line]:
    """The comparisons of `make bench`."""
    base = str(resolve("embedded:base"))
    demo = Work(base, prompt_tokens=86, completion_tokens=24, prompts=8, group=8, updates=8)
    long = Work(base, prompt_tokens=512, completion_tokens=128, prompts=4, group=8, updates=4, beta=0.0)
    lines = []
    for name, what, work, promised in (
        ("step_demo", "update, demo preset (8 x 8 completions of 24 tokens, KL)", demo, 3.0),
        ("step_long_prompt", "update, 512-token prompts (4 x 8 completions of 128)", long, 4.0),
    ):
        ours, theirs = best([("ours", work), ("theirs", work)])
        lines.append(Line(name, what, "s", ours["step_s"], theirs["step_s"], promised=promised))
    for name, what, promised in (
        ("decode", "decode, policy with its adapter, against generate", 2.5),
        ("decode_plain", "decode, bare model, against generate", None),
    ):
        rates = child("parts", name)
        lines.append(Line(name, what, "tokens/s", rates["ours"], rates["theirs"], higher_is_better=True, promised=promised))
    ours, theirs = child("parts", "memory", "ours"), child("parts", "memory", "plain")
    assert abs(ours["check"] / theirs["check"] - 1) < 1e-4
    lines.append(
        Line(
            "logprob_memory",
            "peak memory of log-probs, vocabulary 151,936",
            "bytes",
            ours["bytes"],
            theirs["bytes"],
            promised=4.0,
        )
    )
    lines += shortcut_lines(long) + hybrid_lines()
    half = replace(demo, tied=0.5)
    skipped, kept = best([("ours", half), ("ours", replace(half, stage={"skip_dead_groups": False}))])
    lines.append(
        Line(
            "dead_groups",
            "update, demo, half of the groups dead: skipped, against computed",
            "s",
            skipped["step_s"],
            kept["step_s"],
        )
    )
    rewards = {
        side: statistics.mean(child("learning", side, str(seed), str(LEARNING_UPDATES))["reward"] for seed in SEEDS)
        for side in ("ours", "theirs")
    }
    what = f"reward after {LEARNING_UPDATES} updates of the demo's first stage, mean of {len(SEEDS)} seeds"
    lines.append(Line("learning", what, "", rewards["ours"], rewards["theirs"], higher_is_better=True, promised=1.0))
    return lines


def noisy_lines() -> list[Line]:
    """noisy256: leaving out prompts that cannot teach, against training on all of them; medians of `NOISY_SEEDS`."""
    runs = {arm: [child("noisy", str(seed), arm) for seed in NOISY_SEEDS] for arm in ("kept", "all")}
    print(json.dumps(runs, indent=1))
    # A training that never reached the goal counts with all its completions, which is less than it would have needed.
    reached = {arm: statistics.median(_completions(one) for one in runs[arm]) for arm in runs}
    final = {arm: statistics.median(one["final"] for one in runs[arm]) for arm in runs}
    counted = statistics.median(_completions(one) + one["measured"] for one in runs["kept"])
    never = {arm: sum(one["reached"] is None for one in runs[arm]) for arm in runs}
    what = f"median of {len(NOISY_SEEDS)} seeds; never reached: {never['kept']} and {never['all']}"
    return [
        Line("noisy256", f"completions to {GOAL}, {what}", "", reached["kept"], reached["all"], promised=2.5),
        Line("noisy256_counted", "the same, measuring counted", "", counted, reached["all"], promised=1.2),
        Line("noisy256_final", "noisy256, final accuracy", "", final["kept"], final["all"], higher_is_better=True),
    ]


def _completions(run: dict[str, Any]) -> int:
    """Completions until the goal; all of them where it was never reached."""
    return int(run["reached"] or MOST_COMPLETIONS)


def real_lines() -> list[Line]:
    """How much of what the cores can multiply a real language model reaches; nothing where there is none."""
    try:
        return share_lines(str(real_model_folder(None)))
    except FileNotFoundError as absent:
        print(f"shares of the machine's rate skipped: {absent}")
        return []


def main() -> None:
    """Measure one part, or all; each is printed and written when it is known."""
    parts = {"results": cpu_lines, "results-noisy": noisy_lines, "results-real": real_lines}
    chosen = [name for name in parts if not sys.argv[1:] or sys.argv[1] == PARTS[name]]
    for name in chosen:
        began = time.monotonic()
        lines = parts[name]()
        if lines:
            report(name, lines, time.monotonic() - began)


if __name__ == "__main__":
    main()
