"""The check in front of every server, which refuses web pages of others, and the receiver of weights for a vLLM server."""
