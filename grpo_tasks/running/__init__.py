"""How a step runs. What the steps compute is not here.

step.py          makes a function a step: content key, folder, lock, skip or run
prefect_task.py  the same step as a Prefect task, inside a flow
orchestrator.py  logger, artifacts and run id: Prefect's inside a flow, none or the standard ones outside
key.py           the content key: a hash of a step's inputs and of the code it reaches
step.py      whether a step is finished, and what happens to a folder that is not
slots.py         one run at a time on a GPU, or on a registered model; slot_names.py says which slots a run holds
progress.py      a stage's journal, shown in the terminal, the Prefect log and the UI while it is trained
"""
