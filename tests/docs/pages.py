"""The pages a person reads, and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = ("reference.md", "models.md", "promises.md")
TABLES = ("scale.md",)
"""Pages that a person wrote, with tables that are generated."""
PROGRAMS = {
    "cd", "cp", "docker", "grpo", "kubectl", "make", "mc", "pg_dump", "pg_restore", "pip", "pre-commit", "prefect", "python",
    "python3", "torchrun",
}  # fmt: skip
NOT_RUN = re.compile(r"<!-- not run: .+ -->")


def written_pages():
    """Every page that a person wrote: README, guides, examples."""
    guides = [path for path in sorted(DOCS.glob("*.md")) if path.name not in GENERATED]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *guides, *sorted((ROOT / "examples").glob("*/README.md"))]


@dataclass(frozen=True)
class Command:
    """One line of a code block that starts a program."""

    page: str
    line: int
    text: str
    """Without the folder of the program, variables in front of it and a comment behind it."""
    not_run: bool
    """Whether the block stands below a comment `<!-- not run: REASON -->`."""


def commands(path):
    """Every command of a page: lines of indented blocks and of blocks fenced as console."""
    fence, marked = None, False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fence = line[3:] if fence is None else None
        elif fence == "console" or (fence is None and line.startswith("    ")):
            text = command_text(line)
            if text is not None:
                yield Command(path.relative_to(ROOT).as_posix(), number, text, marked)
        elif line.strip():
            marked = NOT_RUN.fullmatch(line.strip()) is not None


def command_text(line):
    """The command of a line, or None for a line that starts no program we know."""
    text = re.sub(r"^([A-Z_]+=\S+\s+)+", "", re.split(r"\s{2,}#", line.strip())[0])
    program, _, rest = text.partition(" ")
    name = program.rsplit("/", 1)[-1]
    return f"{name} {rest}".strip() if name in PROGRAMS else None
