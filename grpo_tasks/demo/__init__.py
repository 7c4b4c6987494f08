"""The embedded demo: an arithmetic task, and a tiny base model that gets format and answer right only some of the time.

No code is here: `python -m tests.demo.build` in a checkout makes the files.
"""
