"""What counts as left on a node: everything but Ray itself."""

from tests.cluster.processes import RAY, is_of_ray

RAYS = [
    ["ray::IDLE", "", ""],
    ["ray::DashboardAgent"],
    [f"{RAY}/core/src/ray/raylet/raylet", "--raylet_socket_name=/tmp/ray/x"],
    ["/usr/bin/python", f"{RAY}/_private/workers/default_worker.py"],
]
OURS = [
    ["VLLM::EngineCore", ""],
    ["/usr/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/tmp/ray/base"],
    ["/usr/bin/python", "-P", "-m", "grpo_tasks.grpo", "/tmp/grpo-stage-1"],
    ["ray::JobNode.report"],
    [],
]


def test_only_rays_own_processes_may_stay_with_their_node():
    assert all(map(is_of_ray, RAYS))
    assert not any(map(is_of_ray, OURS))
