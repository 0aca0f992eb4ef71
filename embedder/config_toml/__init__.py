"""Configurations as TOML: how a file is read, what is said of mistakes in it, how values and keys are printed.

Everything here is general: it works from the fields of any configuration's classes, and names no key of one.
"""
