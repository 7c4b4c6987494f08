"""How a step runs: its content key, folder and lock, its Prefect task, its slots. What the steps compute is not here."""
