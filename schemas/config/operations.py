"""Sections `tracking` and `resources`: MLflow, devices, threads, folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from schemas.config.section import Folded, Section, T
from schemas.config.types import LONGEST_S, MOST_PROCESSES, MlflowName, OutputFolder, StoreUrl
from schemas.secret import has_password

Restarts = Annotated[T, Folded("restarts")]
Speed = Annotated[T, Folded("speed")]


def _trackers(given: Any) -> Any:
    """As TRL takes them: one name, none, or a list, in which MLflow may stand too."""
    named = [given] if isinstance(given, str) else given
    return [name for name in named if name not in ("none", "mlflow")] if isinstance(named, list) else named


class TrackingConfig(Section):
    """MLflow."""

    tracking_uri: StoreUrl | None = None
    """Address of MLflow. Empty: MLFLOW_TRACKING_URI of the environment, else the server that grpo up started here on PostgreSQL,
    else sqlite:///mlflow.db in the working directory. An address with a password belongs into MLFLOW_TRACKING_URI."""
    experiment: Annotated[str, StringConstraints(min_length=1, max_length=250)] | None = None
    """Experiment name. Empty: the name of the run."""
    registered_model: MlflowName | None = None
    """Name in the model registry. Empty: the name of the run."""
    report_to: Annotated[list[Literal["tensorboard", "wandb"]], BeforeValidator(_trackers)] = Field(default_factory=list)
    """Further trackers that get the journal of each stage, in addition to MLflow: tensorboard, wandb (extras [tensorboard] and
    [wandb]). wandb stays offline unless WANDB_MODE=online is exported."""
    patience_s: float = Field(600.0, ge=0.0, le=LONGEST_S)
    """Longest time in seconds to wait for an MLflow server that stops answering during a run. Training never waits for it."""

    def _faults(self) -> Iterator[str]:
        if has_password(self.tracking_uri or ""):
            yield (
                "tracking_uri contains a password, and a config is recorded; fix: leave it empty and export MLFLOW_TRACKING_URI, "
                "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )


class ClusterConfig(Section):
    """Where the processes of a stage run: on this machine, or on the nodes of a Ray cluster."""

    engine: Literal["local", "ray"] = "local"
    """local: on this machine. ray: on nodes of a running Ray cluster, which need no disk in common with this machine."""
    address: str = ""
    """Address of the cluster, HOST:PORT, or auto for the one that this machine belongs to. Empty: RAY_ADDRESS of the
    environment. No cluster is ever started. This machine has to be a member of the cluster, so ray:// is refused."""
    num_nodes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Nodes that train a stage together."""
    processes_per_node: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Processes of each node, one per GPU."""
    cpus_per_process: float = Field(1.0, gt=0.0, le=MOST_PROCESSES)
    """CPUs that each process reserves."""
    gpus_per_process: int | None = Field(None, ge=0, le=MOST_PROCESSES)
    """GPUs that each process reserves. Empty: 1 if a node of the cluster has GPUs and resources.device is not cpu, else 0."""
    max_restarts: Restarts[int] = Field(3, ge=0, le=1_000)
    """How often a stage resumes from its last checkpoint by itself after a node or a process died."""
    replacement_wait_s: Restarts[float] = Field(60.0, ge=0.0, le=LONGEST_S)
    """Time in seconds that a restart waits for as many nodes as before, and an evaluation for a cluster that can hold all of its
    processes. Then they continue with fewer."""
    placement: Restarts[Literal["STRICT_SPREAD", "PACK"]] = "STRICT_SPREAD"
    """STRICT_SPREAD: each of the num_nodes on a machine of its own. PACK: on as few machines as possible."""


class ResourcesConfig(Section):
    """Machine settings. They do not change what a run computes, but for rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors. auto: a GPU if there is one."""
    gpu_slot: str = "auto"
    """Slot that a run holds while it uses a GPU, so that no two runs share one. auto: one slot per GPU, none on a CPU. shared:
    never wait. Any other value is the name of a global concurrency limit in Prefect."""
    num_threads: Speed[int | None] = Field(None, ge=1, le=MOST_PROCESSES)
    """CPU threads of torch. Empty: all cores."""
    num_processes: Speed[int] = Field(1, ge=1, le=MOST_PROCESSES)
    """Processes on this machine that train a stage together, one per GPU. They share the per_device_train_batch_size x
    gradient_accumulation_steps completions of each update, so raise gradient_accumulation_steps with their number."""
    fsdp: Speed[bool] = False
    """Shard weights, gradients and optimizer state over the processes (FSDP2), for a model that one GPU cannot train. Off: each
    process holds all of them. The local engine samples from a complete copy of the weights on each GPU; a stage for which a GPU
    has no room for that is refused, and needs rollout.vllm.base_urls."""
    distributed_timeout_minutes: Speed[float] = Field(120.0, gt=0.0, le=10_000.0)
    """Time limit in minutes of a collective operation (NCCL, gloo): a process that waits longer for the others ends the stage
    with an error. It has to exceed the longest rollout, rewards included."""
    max_hours: Speed[float | None] = Field(None, gt=0.0, le=100_000)
    """Time limit in hours of one run of a stage, which then stops with a checkpoint; the same command resumes it. Empty: none."""
    compile: Speed[bool] = False
    """Compile the model's layers for training (torch.compile), for long stages on a GPU: the first passes take minutes. The
    compiler gets the layers of peft and transformers; what it gains over ours has not been measured."""
    share_prompts: Speed[bool] = True
    """Encode the prompt of a group once, in sampling and in training. Off: once per completion."""
    fold_adapter: Speed[bool] = True
    """Sample from a copy of the adapted weights: in float32 with the adapter merged in, in 16 bits with the adapter kept apart,
    because merging would round small updates away. Off: through the adapter that is trained."""
    fuse_kernels: Speed[bool] = True
    """Decode models of the Llama architecture with fewer, larger kernels."""
    deterministic: Speed[bool] = True
    """Use deterministic kernels, so that the same batches give the same bytes on the same card with the same torch. On a CPU this
    is always the case. On a GPU updates are slower (attention backward, writes by an index; by how much has not been measured),
    and a kernel that cannot be deterministic is named in a warning. Sampling with the local engine is reproducible either way
    and costs nothing more."""
    output_dir: OutputFolder = Path("runs")
    """Folder for everything a run writes outside MLflow."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Where the processes of a stage run."""

    def _faults(self) -> Iterator[str]:
        if self.cluster.engine == "ray" and self.num_processes > 1:
            yield (
                "num_processes counts processes of this machine, and the stages run on a cluster; "
                "fix: cluster.processes_per_node, and num_processes: 1"
            )

    @property
    def ways(self) -> dict[str, bool]:
        """Switches of the engine that differ from their default: they change the rounding of what is sampled and trained."""
        names = ("compile", "share_prompts", "fold_adapter", "fuse_kernels")
        return {name: getattr(self, name) for name in names if getattr(self, name) != type(self).model_fields[name].default}

    @property
    def ranks(self) -> int:
        """Processes that train a stage together, on this machine or on a cluster."""
        cluster = self.cluster
        return cluster.num_nodes * cluster.processes_per_node if cluster.engine == "ray" else self.num_processes
