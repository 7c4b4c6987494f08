"""`grpo metrics-server`: the last update of every stage, for Prometheus.

    RUNS/NAME/train_stage/STAGE-HASH/metrics.jsonl  ->  grpo_reward{run="NAME", stage="STAGE"} 0.71

It reads journals and nothing else, so it can start and stop at any time, and a trainer opens no port. A metric has its name of
schemas/metrics.py, with underscores. A family has one name, and the label `of` says which reward function, task or server it is.
"""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from grpo_tasks.kit.request_guard import SameOrigin, further_hosts
from grpo_tasks.stage.journal import EVENT_KEYS, JOURNAL_KEYS, JsonLinesTail
from grpo_tasks.stage.stage_dir import StageDir
from schemas.errors import TrainingError
from schemas.metrics import describe

SHOWN_S = 24 * 3600.0
"""A stage is shown until its last update is this old (s)."""
LABELS = ("run", "stage", "of")


def serve_metrics(runs: Path, host: str, port: int) -> None:
    """Serve /metrics until Ctrl-C, for the runs in the folder `runs`, to requests for `host`, loopback or GRPO_ALLOWED_HOSTS."""
    import uvicorn

    registry = CollectorRegistry()
    registry.register(Journals(runs))
    app = SameOrigin(make_asgi_app(registry), hosts=(host, *further_hosts()))
    uvicorn.run(app, host=host, port=port, log_level="warning")


@dataclass(slots=True)
class _Followed:
    run: str
    stage: str
    journal: JsonLinesTail
    events: JsonLinesTail
    last: dict[str, Any]
    counts: dict[str, int]

    def read(self) -> None:
        """Take in new lines; a damaged line ends what is shown, and the stage itself reports it."""
        try:
            self.last = (self.journal.read() or [self.last])[-1]
            for event in self.events.read():
                self.counts[event["event"]] = self.counts.get(event["event"], 0) + 1
        except TrainingError:
            pass


class Journals(Collector):
    """Reads what is new in the journals each time that Prometheus asks."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._followed: dict[Path, _Followed] = {}

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing is known before a stage trains; without this, registration would read the journals."""
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family per metric, with a sample for each stage."""
        stages = [stage for stage in self._stages() if stage.last]
        update = GaugeMetricFamily("grpo_update", "number of the last update", labels=LABELS[:2])
        at = GaugeMetricFamily("grpo_update_time_seconds", "time of the last update (Unix)", labels=LABELS[:2])
        events = GaugeMetricFamily("grpo_events", "guards and other events since the stage began", labels=(*LABELS[:2], "event"))
        families: dict[str, GaugeMetricFamily] = {}
        for stage in stages:
            labels = (stage.run, stage.stage)
            update.add_metric(labels, stage.last["step"])
            at.add_metric(labels, stage.last["timestamp_ms"] / 1_000)
            for event, count in stage.counts.items():
                events.add_metric((*labels, event), count)
            for name, value in stage.last["metrics"].items():
                family, of, meaning = exported(name)
                found = families.setdefault(family, GaugeMetricFamily(family, meaning, labels=LABELS))
                found.add_metric((*labels, of), value)
        yield from (update, at, events, *families.values())

    def _stages(self) -> list[_Followed]:
        """The stages that train or trained lately; of several folders of one stage the newest."""
        newest: dict[tuple[str, str], tuple[float, Path]] = {}
        for journal in self._runs.glob("*/train_stage/*/metrics.jsonl"):
            changed = journal.stat().st_mtime
            name = (journal.parents[2].name, journal.parent.name.rpartition("-")[0])
            if time.time() - changed < SHOWN_S:
                newest[name] = max(newest.get(name, (0.0, journal)), (changed, journal.parent))
        kept = {}
        for (run, stage), (_, folder) in newest.items():
            directory = StageDir(folder)
            tails = JsonLinesTail(directory.journal, JOURNAL_KEYS), JsonLinesTail(directory.events, EVENT_KEYS)
            kept[folder] = self._followed.get(folder) or _Followed(run, stage, *tails, last={}, counts={})
            kept[folder].read()
        self._followed = kept
        return [*kept.values()]


def exported(name: str) -> tuple[str, str, str]:
    """The name of a metric for Prometheus, which member of a family it is (empty: it belongs to none), and its meaning."""
    metric = describe(name)
    if metric is None:
        head, _, member = name.partition("/")
        return _identifier(head), member, "reported by a reward function"
    before, star, after = metric.name.partition("*")
    member = name[len(before) : len(name) - len(after)] if star else ""
    unit = f" ({metric.unit})" if metric.unit else ""
    return _identifier(metric.name.replace("*/", "").replace("/*", "")), member, metric.meaning + unit


def _identifier(name: str) -> str:
    return "grpo_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
