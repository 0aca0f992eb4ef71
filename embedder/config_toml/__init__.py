"""Configurations as TOML: reading files, messages about mistakes, printing values and keys.

All of it works from the fields of any configuration's classes, and names no specific key.
"""
