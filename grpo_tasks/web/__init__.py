"""The check in front of every server: it answers its own pages and programs on this machine, and no other web page."""
