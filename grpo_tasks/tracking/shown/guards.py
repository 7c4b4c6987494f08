"""The guards of a promotion as Markdown: what each measured, and what got worse, with examples."""

from collections.abc import Sequence

from grpo_tasks.content.markdown import table
from schemas.results.evaluation import GuardCheck


def guards_markdown(guards: Sequence[GuardCheck]) -> str:
    """A table of all guards, then the examples of those that failed; empty when there are no guards."""
    if not guards:
        return ""
    rows = [
        [
            f"{guard.name} against {guard.against}",
            guard.metric,
            f"{guard.theirs:.4g}",
            f"{guard.ours:.4g}",
            guard.limit,
            f"{guard.p_value:.2g}",
            "yes" if guard.passed else "no",
        ]
        for guard in guards
    ]
    headings = ["guard", "metric", "before", "after", "limit", "p", "passed"]
    sections = ["", table(headings, rows, right=["before", "after", "p"])]
    for guard in guards:
        if not guard.passed:
            sections.append(f"## Worse: {guard.name} ({guard.metric})")
        sections += [
            f"Question:\n\n{_block(one.question)}\n\nBefore:\n\n{_block(one.before)}\n\n"
            f"After ({one.change:+.4g}):\n\n{_block(one.after)}"
            for one in guard.worse
        ]
    return "\n\n".join(sections) + "\n"


def _block(text: str) -> str:
    # An indented block shows any text literally; a completion may itself contain fences, HTML or headings.
    return "\n".join("    " + line for line in text.splitlines()) or "    (empty)"
