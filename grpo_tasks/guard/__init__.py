"""Keeps other web pages away from our servers. A vLLM server has this folder on its path: nothing else belongs here."""
