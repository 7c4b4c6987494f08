"""Step: read every source into one table of raw rows."""

import time

from grpo_tasks.data.sources import load_sources
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.results.data import PreparedData


@step(reads="data")
def prepare_data(work: Work, config: RunConfig) -> PreparedData:
    """Read all rows of all sources, each with its file and line. Rows that cannot be read are kept, with their faults."""
    began = time.perf_counter()
    sources = load_sources(config.data, directory=work.directory)
    return PreparedData(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        sources=sources,
        rows=sum(source.rows for source in sources),
    )
