"""The one tree that describes a run, a file a section; run.py has the tree itself."""
