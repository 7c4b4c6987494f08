"""Step: read every source into one table of raw rows."""

import time

from grpo_tasks.data.sources import load_sources
from grpo_tasks.running.step import Work, step
from schemas.config.data import DataConfig
from schemas.results.data import PreparedData


@step()
def prepare_data(work: Work, data: DataConfig) -> PreparedData:
    """Read all rows of all sources, each with its file and line. Rows that cannot be read are kept, with their faults."""
    began = time.perf_counter()
    loaded = load_sources(data, directory=work.directory)
    return PreparedData(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        sources=loaded.sources,
        rows=loaded.rows,
    )
