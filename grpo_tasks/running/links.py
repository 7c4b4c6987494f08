"""Links from a flow run to what it made in MLflow, as an artifact of the Prefect UI.

The addresses are those of MLflow's pages; MLflow is not asked.
"""

import os
from dataclasses import dataclass
from urllib.parse import quote
from uuid import UUID

from grpo_tasks.content.markdown import table
from grpo_tasks.running.orchestrator import show_artifact
from schemas.secret import hide

PUBLIC = "GRPO_MLFLOW_URL"
"""Environment variable: the address of MLflow for browsers, where it is not the one that runs use."""


@dataclass(frozen=True, slots=True)
class MlflowPages:
    """Addresses of MLflow's pages about one run."""

    base: str
    experiment_id: str
    run_id: str

    @property
    def run(self) -> str:
        """The page of the run."""
        return f"{self.base}/#/experiments/{self.experiment_id}/runs/{self.run_id}"


def mlflow_pages(uri: str, experiment_id: str, run_id: str) -> MlflowPages | None:
    """The pages about a run in the store at `uri`; None for a database that no server shows yet."""
    base = os.environ.get(PUBLIC) or uri
    return MlflowPages(hide(base).rstrip("/"), experiment_id, run_id) if base.startswith(("http://", "https://")) else None


def show_links(
    pages: MlflowPages | None, known: dict[str, UUID], *, report: bool = False, version: tuple[str, str] | None = None
) -> None:
    """Show the links of a flow run. Called again, it adds what has been made since.

    Args:
        pages: addresses of MLflow.
        known: the artifacts that this run has already shown; the links are put in.
        report: whether the run has its report.
        version: name and version of the registered model.
    """
    if pages is None:
        return
    runs = f"{pages.base}/#/experiments/{pages.experiment_id}/runs?workflowType=machine_learning"
    rows = [
        ["MLflow run", f"[metrics, parameters, files]({pages.run})"],
        ["all runs", f"[compare the runs of the experiment]({runs})"],
    ]
    if report:
        rows.append(["report", f"[report.html]({pages.run}/artifacts/report/report.html)"])
    if version is not None:
        name, number = version
        page = f"{pages.base}/#/models/{quote(name, safe='')}/versions/{number}"
        rows.append(["model version", f"[{name} version {number}]({page})"])
    show_artifact("links", table(["what", "where"], rows), "This run in MLflow", known)
