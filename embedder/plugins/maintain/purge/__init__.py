"""Deletion of items from every version of a store: plan, rewriting, audit."""
