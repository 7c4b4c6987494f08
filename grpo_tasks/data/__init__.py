"""Data: files and hub data sets in, validated prompts with ground truth out. A row passes through these files in order.

    sources, jsonl   lines, cells, Parquet values -> Record
    records          Record -> Row                   structure checked, faults noted
    chunks           Row -> rows.parquet             big files in parallel
    normalise        Row -> prompt, answer, prompt_id
    rules            WHAT MAKES A ROW BAD: the table of reason codes, and how each is checked
    chat_tokens      prompt -> tokens after the chat template
    judge            every rule on every row;  split: train or eval
    validation       train.parquet, eval.parquet, quarantine.parquet, report.md
    table            PromptRow for the lab, the trainer and the evaluation

Reading never refuses a row, and judging never drops one: a refused row is in the quarantine with file, line, rule and value.
Nothing is cut, repaired or guessed. No torch, no Prefect, no MLflow; network access only for hub data sets.
"""
