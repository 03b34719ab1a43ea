"""Nodes where the Python probe cannot run: a shell reader of the tools that are there, parsed on this side."""
