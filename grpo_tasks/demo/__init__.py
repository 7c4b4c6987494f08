"""The embedded demo: a tiny base model that can add and format only half the time, and the task that teaches it."""
