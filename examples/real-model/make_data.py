"""Writes train.jsonl and test.jsonl from SVAMP, and from MultiArith where it is given.

    python make_data.py SVAMP.json [multiarith.jsonl]

SVAMP (https://github.com/arkilpatel/SVAMP, MIT) is a JSON list of problems with Body, Question, Equation and Answer. The last 200
are held out. The first 100 keep their equation, as a demonstration; of all others only the answer is used. MultiArith (a line for
each problem, with `input` and `target`) adds further problems with answers alone.
"""

import json
import re
import sys
from pathlib import Path

HELD_OUT, DEMONSTRATIONS = 200, 100


def main(svamp: str, *multiarith: str) -> None:
    """Write both files into the folder where this is called."""
    rows = []
    for number, problem in enumerate(json.loads(Path(svamp).read_text(encoding="utf-8"))):
        body = problem["Body"].strip()
        rows.append(
            {
                # Many bodies have no full stop.
                "question": f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {problem['Question'].strip()}",
                "answer": f"{problem['Answer']}".removesuffix(".0"),
                "solution": f"<answer>{calculation(problem['Equation'])}</answer>" if number < DEMONSTRATIONS else None,
            }
        )
    train, test = rows[:-HELD_OUT], rows[-HELD_OUT:]
    for file in multiarith:
        problems = map(json.loads, Path(file).read_text(encoding="utf-8").splitlines())
        train += [{"question": one["input"], "answer": str(one["target"]), "solution": None} for one in problems]
    for name, chosen in (("train.jsonl", train), ("test.jsonl", test)):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        print(f"{name}: {len(chosen):,} rows")


def calculation(equation: str) -> str:
    """An equation such as ( 76.0 - 25.0 ) without what a person would not write: 76 - 25."""
    short = re.sub(r"\b(\d+)\.0\b", r"\1", equation).strip()
    if short.startswith("(") and short.endswith(")"):
        short = short[1:-1].strip()
    return short.replace("( ", "(").replace(" )", ")")


if __name__ == "__main__":
    main(*sys.argv[1:])
