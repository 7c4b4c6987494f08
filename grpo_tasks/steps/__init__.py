"""The steps of the pipeline, a file each, in the order of flows/pipeline.py.

prepare_data.py        read the files of a config into one table
validate_data.py       judge every row
check_guard.py         judge the prompts of a promotion guard
probe_rewards.py       test the reward functions
measure_difficulty.py  pass rates of the training prompts
train_stage.py         train one stage
merge_adapter.py       merge the adapter, and prove the merge
evaluate_model.py      evaluate a model on the held-out prompts
publish_model.py       register the model, and decide about the champion
write_report.py        the report of the run
"""
