"""Replicas: servers that serve the same model, and the queue of requests that they share.

This room decides which replica takes a request, how many it takes at once, and when it is left out or admitted again. It does not
know what a request is, how a server is spoken to, or which weights it serves.
"""
