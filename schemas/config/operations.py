"""Sections `tracking` and `resources`: MLflow, devices, threads, folders."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from schemas.config.section import Section
from schemas.config.types import LONGEST_S, MOST_PROCESSES, MlflowName, Url


class TrackingConfig(Section):
    """MLflow."""

    tracking_uri: Url | None = None
    """Where MLflow is; empty: the environment's MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory. Never
    with a password, because all of this is recorded: an address that has one belongs into MLFLOW_TRACKING_URI."""
    experiment: Annotated[str, StringConstraints(min_length=1, max_length=250)] | None = None
    """Experiment name; empty: the run's name."""
    registered_model: MlflowName | None = None
    """Name in the model registry; empty: the run's name."""
    flush_interval_s: float = Field(5.0, gt=0.0, le=LONGEST_S)
    """Seconds between two shipments of the training journal to MLflow; the end of a stage ships what is left."""
    patience_s: float = Field(600.0, ge=0.0, le=LONGEST_S)
    """Longest time in seconds to wait for a server that goes away in the middle of a run. Training never waits for it."""


class ResourcesConfig(Section):
    """Machine settings; they do not change what a run means."""

    GROUPS: ClassVar = {
        "speed": (
            "num_threads",
            "num_processes",
            "fsdp",
            "distributed_timeout_minutes",
            "max_hours",
            "compile",
            "share_prompts",
            "fold_adapter",
            "fuse_kernels",
            "deterministic",
        ),
    }

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes a GPU when there is one."""
    gpu_slot: str = "auto"
    """Slot a run holds while it uses the card, so that no two share one: auto has one per card (none on a CPU), shared never
    waits, anything else is the name of a global concurrency limit in Prefect."""
    num_threads: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """CPU threads of torch; empty: all cores."""
    num_processes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Processes on this machine that train a stage together, one per card. They share the work of each update, which stays
    per_device_train_batch_size x gradient_accumulation_steps completions: raise gradient_accumulation_steps with them."""
    fsdp: bool = False
    """Spread weights, gradients and optimizer state over the processes (FSDP2), for a model that one card does not hold while it
    trains; off: every process has all of them. Sampling here needs a whole copy of the weights on each card all the same."""
    distributed_timeout_minutes: float = Field(120.0, gt=0.0, le=10_000.0)
    """Longest time in minutes that one of several processes waits for the others before the stage ends with an error (the time
    limit of NCCL and gloo). It has to be longer than the longest round of sampling and rewards."""
    compile: bool = False
    """torch.compile the model's layers for training. The first passes take minutes; it pays in long stages on a GPU."""
    share_prompts: bool = True
    """Encode and store the prompt of a group once, in sampling and in training; off: once for every completion."""
    fold_adapter: bool = True
    """Sample from a copy of the weights with the adapter folded in; off: through the adapter."""
    fuse_kernels: bool = True
    """Decode models of Llama's shape in fewer and larger kernels."""
    deterministic: bool = True
    """Use deterministic kernels, so that the same seed gives the same bytes (always so on CPU)."""
    max_hours: float | None = Field(None, gt=0.0, le=100_000)
    """Longest time in hours that a stage trains in one go: it then writes a checkpoint and stops, and the same command goes on
    from there. Empty: no limit."""
    output_dir: Path = Path("runs")
    """Directory for everything a run writes, besides MLflow."""
