"""The verdict on disk, and the error when too much of the data is bad. Tables are written first: the error points at them."""

import hashlib
from pathlib import Path

import polars as pl

from grpo_tasks.data.judge import Verdict
from schemas.config.data import ValidationConfig
from schemas.errors import DataError

QUARANTINE = "quarantine.parquet"


def write_tables(verdict: Verdict, directory: Path) -> str:
    """Write train.parquet, eval.parquet and quarantine.parquet; returns the digest of the accepted rows.

    The digest is a SHA-256 over side, prompt_id and extra columns of every accepted row, in order.
    """
    verdict.refused.write_parquet(directory / QUARANTINE)
    digest = hashlib.sha256()
    for side in ("train", "eval"):
        rows = verdict.side(side)
        rows.write_parquet(directory / f"{side}.parquet")
        for part in rows.iter_slices(50_000):
            lines = part.select(pl.concat_str(pl.lit(f"{side} "), "prompt_id", pl.lit(" "), "extra", pl.lit("\n"))).to_series()
            digest.update("".join(lines).encode())
    return digest.hexdigest()


def enforce(verdict: Verdict, validation: ValidationConfig) -> None:
    """Raise `DataError` when more rows are refused than allowed, or too few are left; names rules and first rows."""
    share = verdict.quarantined / max(verdict.rows, 1)
    if share > validation.max_invalid_fraction:
        raise DataError(
            f"{verdict.quarantined:,} of {verdict.rows:,} rows are refused ({share:.1%}), "
            f"max_invalid_fraction allows {validation.max_invalid_fraction:.1%}\n{_worst(verdict)}",
            place=_first_place(verdict),
            fix=f"fix the rows ({QUARANTINE} and report.md name all of them), or raise validation.max_invalid_fraction",
        )
    for side, fewest in (("train", validation.min_train_rows), ("eval", validation.min_eval_rows)):
        rows = verdict.side(side).height
        if rows < fewest:
            raise DataError(
                f"{rows} good rows on the {side} side, min_{side}_rows asks for {fewest}",
                place=f"validation.min_{side}_rows",
                fix="add data, or change data.eval_fraction" if side == "eval" else "add data",
            )


def _worst(verdict: Verdict, rules: int = 3, rows: int = 3) -> str:
    lines = []
    for count in sorted(verdict.rules, key=lambda count: -count.rows)[:rules]:
        if count.rows:
            lines.append(f"  {count.rows:,} x {count.rule}: {count.meaning}")
            first = verdict.refused.filter(rule=count.rule).head(rows)
            lines.extend(f"    {row['source']}:{row['line']}  {row['value'][:80]!r}" for row in first.iter_rows(named=True))
    return "\n".join(lines)


def _first_place(verdict: Verdict) -> str:
    first = verdict.refused.row(0, named=True)
    return f"{first['source']}:{first['line']}"
