"""Hints for settings that a config does not know: the place of a misplaced one, and ours for a name of TRL or transformers."""
