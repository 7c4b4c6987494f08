"""How a step runs: its content key, its folder, its Prefect task, its child process. What steps do is not here."""
