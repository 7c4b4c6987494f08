"""`python -m flows.cli` is `grpo`: the way in where the installed script is not on PATH, as in a container."""

from flows.cli.main import app

app()
