"""The data room: files and hub data sets in, judged prompts with ground truth out.

    sources --load--> rows.parquet --judge--> train.parquet + eval.parquet + quarantine.parquet + report.md

`load` reads and never refuses a row, `judge` refuses and never drops one: what is refused stands in the quarantine with file,
line, rule and value. Nothing here is cut, repaired or guessed. No torch, no Prefect, no MLflow; the network only for hub ids.
"""
