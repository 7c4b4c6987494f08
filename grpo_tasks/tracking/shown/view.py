"""A saved view of an experiment's runs: what came out of each, in columns.

MLflow shows no figure, parameter or tag of a run until somebody chooses columns. A saved view is a tag of the experiment, which
its pages list under Views. It is written once, with a new experiment: what a person changes or deletes stays so.
"""

import base64
import json
import zlib

from grpo_tasks.tracking.shown.headline import AT_A_GLANCE
from schemas.results.publication import DECISIONS_VIEW

TITLE = "Decisions"
TAG = f"mlflow.sharedViewState.{DECISIONS_VIEW}"
COLUMNS = (
    "attributes.`Models`",
    *(f"metrics.`{name}`" for name in AT_A_GLANCE),
    *(f"tags.`{name}`" for name in ("promoted", "grpo.decision", "base_model", "data", "seed")),
)
_WIDTHS = {"tags.`grpo.decision`": 420}


def view_tags(now_ms: int) -> dict[str, str]:
    """The tag of a new experiment that holds the view."""
    view = {"name": TITLE, "createdAt": now_ms, "updatedAt": now_ms, "state": _packed(_STATE)}
    return {TAG: json.dumps(view)}


def _packed(state: dict[str, object]) -> str:
    return f"deflate;{base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()}"


# Everything that MLflow 3.17 itself writes into a saved view.
_STATE: dict[str, object] = {
    "searchFilter": "",
    "orderByKey": "attributes.start_time",
    "orderByAsc": False,
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "datasetsFilter": [],
    "modelVersionFilter": "All Runs",
    "selectedColumns": list(COLUMNS),
    "columnOrder": [],
    "columnWidths": _WIDTHS,
    "runsHiddenMode": "FIRST_10_RUNS",
    "viewMaximized": False,
    "runListHidden": False,
    "isAccordionReordered": False,
    "useGroupedValuesInCharts": True,
    "hideEmptyCharts": True,
    "groupBy": None,
    "groupsExpanded": {},
    "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
}
