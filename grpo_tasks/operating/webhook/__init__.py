"""A message to a receiver of your own when the champion changes: what it says (champion.py), how it is sent (send.py)."""
