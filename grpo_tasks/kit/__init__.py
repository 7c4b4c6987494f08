"""Mechanisms that every room uses, one file each.

files.py           replace a file or a folder as a whole
lock.py            one process at a time
share.py           requests over several servers: which one gets what, and what happens to one that fails
request_guard.py   which requests a server answers
"""
