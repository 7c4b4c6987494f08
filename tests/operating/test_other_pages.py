"""A web page from another port, in Debian's Chromium, tries to use both servers of `grpo up`: to read, write, run a command."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.operating.chromium import MARKS

pytestmark = MARKS

TRIED = """
async ([prefect, mlflow, script]) => {
  const tried = {}
  const attempt = async (name, call) => {
    try { tried[name] = await call() } catch (error) { tried[name] = error.name }
    return tried[name]
  }
  const headers = {'Content-Type': 'application/json'}
  const json = (url, body) => fetch(url, {method: 'POST', headers, body: JSON.stringify(body)}).then(answer => answer.json())
  // A Blob has no content type, so the browser sends it without asking the server first.
  const simple = (url, body) => fetch(url, {method: 'POST', mode: 'no-cors', body: new Blob([JSON.stringify(body)])})
  const text = (url, body) => fetch(url, {method: 'POST', mode: 'no-cors', headers: {'Content-Type': 'text/plain'}, body})

  await attempt('read Prefect', () => json(prefect + '/api/deployments/filter', {}).then(found => found.length))
  await attempt('read MLflow', () => fetch(mlflow + '/api/2.0/mlflow/experiments/search?max_results=9').then(a => a.status))
  await attempt('listen', () => new Promise((done, failed) => {
    const socket = new WebSocket(prefect.replace('http', 'ws') + '/api/events/out', 'prefect')
    socket.onopen = () => done('open'); socket.onerror = () => failed(new Error('closed'))
  }))
  await simple(prefect + '/api/flows/', {name: 'planted'}).catch(() => 0)
  await text(prefect + '/api/flows/', '{"name": "planted-text"}').catch(() => 0)
  await simple(mlflow + '/ajax-api/2.0/mlflow/experiments/create', {name: 'planted'}).catch(() => 0)
  await attempt('write MLflow', () => json(mlflow + '/ajax-api/2.0/mlflow/experiments/create', {name: 'planted'}))
  await attempt('run a command', async () => {
    const flow = await json(prefect + '/api/flows/', {name: 'planted'})
    const steps = [{'prefect.deployments.steps.run_shell_script': {script}}]
    const made = {name: 'planted', flow_id: flow.id, work_pool_name: 'grpo', entrypoint: 'none.py:none', pull_steps: steps}
    const deployment = await json(prefect + '/api/deployments/', made)
    return (await json(prefect + '/api/deployments/' + deployment.id + '/create_flow_run', {})).id
  })
  return tried
}
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Port of a web server that has nothing to do with ours."""
    (tmp_path / "index.html").write_text("<title>elsewhere</title>")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_page_from_another_port_reads_nothing_writes_nothing_and_runs_nothing(page, operated, elsewhere, tmp_path, name):
    page.goto(f"http://{name}:{elsewhere}/")
    planted = tmp_path / "planted"
    tried = page.evaluate(TRIED, [operated.prefect, operated.mlflow, f"touch {planted}"])
    runs = operated.runs_of("planted")
    for run in runs:
        operated.wait(run["id"])
    assert not planted.exists(), "a web page had the worker run a command"
    assert runs == []
    flows = operated.ask("/flows/filter", {"flows": {"name": {"any_": ["planted", "planted-text"]}}})
    assert flows == []
    assert operated.client.get_experiment_by_name("planted") is None
    assert set(tried.values()) <= {"TypeError", "Error"}, tried
