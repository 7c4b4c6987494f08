"""Sections `tracking` and `resources`: MLflow, devices, threads, folders."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.config.section import Section
from schemas.config.types import LONGEST_S, MOST_PROCESSES, MlflowName, Url
from schemas.secret import has_password


class TrackingConfig(Section):
    """MLflow."""

    tracking_uri: Url | None = None
    """Address of MLflow. Empty: MLFLOW_TRACKING_URI of the environment, else sqlite:///mlflow.db in the working directory. It
    must not contain a password, because the config is recorded; export such an address as MLFLOW_TRACKING_URI."""
    experiment: Annotated[str, StringConstraints(min_length=1, max_length=250)] | None = None
    """Experiment name. Empty: the name of the run."""
    registered_model: MlflowName | None = None
    """Name in the model registry. Empty: the name of the run."""
    flush_interval_s: float = Field(5.0, gt=0.0, le=LONGEST_S)
    """Seconds between two uploads of the training journal to MLflow. The rest is uploaded when the stage ends."""
    patience_s: float = Field(600.0, ge=0.0, le=LONGEST_S)
    """Longest time in seconds to wait for an MLflow server that stops answering during a run. Training never waits for it."""

    @model_validator(mode="after")
    def _check_password(self) -> Self:
        if has_password(self.tracking_uri or ""):
            raise ValueError(
                "tracking_uri contains a password, and a config is recorded; fix: leave it empty and export MLFLOW_TRACKING_URI, "
                "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self


class ResourcesConfig(Section):
    """Machine settings. They do not change what a run computes."""

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
    """Device of the tensors. auto: a GPU if there is one."""
    gpu_slot: str = "auto"
    """Slot that a run holds while it uses a GPU, so that no two runs share one. auto: one slot per GPU, none on a CPU. shared:
    never wait. Any other value is the name of a global concurrency limit in Prefect."""
    num_threads: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """CPU threads of torch. Empty: all cores."""
    num_processes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Processes on this machine that train a stage together, one per GPU. They share the per_device_train_batch_size x
    gradient_accumulation_steps completions of each update, so raise gradient_accumulation_steps with their number."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer state over the processes (FSDP2), for a model that one GPU cannot train. Off: each
    process holds all of them. The local engine still needs a full copy of the weights on each GPU while it samples."""
    distributed_timeout_minutes: float = Field(120.0, gt=0.0, le=10_000.0)
    """Time limit in minutes of a collective operation (NCCL, gloo): a process that waits longer for the others ends the stage
    with an error. It has to exceed the longest rollout, rewards included."""
    compile: bool = False
    """Compile the model's layers for training with torch.compile. The first passes take minutes, so it pays off in long stages
    on a GPU."""
    share_prompts: bool = True
    """Encode the prompt of a group once, in sampling and in training. Off: once per completion."""
    fold_adapter: bool = True
    """Sample from a copy of the weights with the adapter merged in. Off: through the adapter."""
    fuse_kernels: bool = True
    """Decode models of the Llama architecture with fewer, larger kernels."""
    deterministic: bool = True
    """Use deterministic kernels, so that the same seed gives the same bytes. On a CPU this is always the case. On a GPU the
    backward pass of attention is slower, and a kernel that cannot be deterministic is named in a warning."""
    max_hours: float | None = Field(None, gt=0.0, le=100_000)
    """Time limit in hours of one run of a stage. The stage then writes a checkpoint and stops; the same command resumes it.
    Empty: no limit."""
    output_dir: Path = Path("runs")
    """Folder for everything a run writes outside MLflow."""
