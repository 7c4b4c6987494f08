"""Mechanisms that every room uses, one file each."""
