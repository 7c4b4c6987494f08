"""What counts as left on a node: everything but Ray itself."""

import pytest

from tests.cluster.processes import RAY, is_of_ray


@pytest.mark.parametrize(
    "command",
    [
        ["ray::IDLE", "", ""],
        ["ray::DashboardAgent"],
        [f"{RAY}/core/src/ray/raylet/raylet", "--raylet_socket_name=/tmp/ray/x"],
        ["/usr/bin/python", "-u", f"{RAY}/dashboard/agent.py", "--node-ip-address=127.0.0.1"],
        ["/usr/bin/python", f"{RAY}/_private/workers/default_worker.py"],
    ],
)
def test_rays_own_processes_may_stay_with_their_node(command):
    assert is_of_ray(command)


@pytest.mark.parametrize(
    "command",
    [
        ["VLLM::EngineCore", ""],
        ["/usr/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/tmp/ray/base"],
        ["/usr/bin/python", "-P", "-m", "grpo_tasks.grpo", "/tmp/grpo-stage-1"],
        ["/usr/bin/python", "-c", "from multiprocessing.forkserver import main; main(7)"],
        ["ray::JobNode.report"],
        [],
    ],
)
def test_whatever_a_run_has_started_may_not(command):
    assert not is_of_ray(command)
