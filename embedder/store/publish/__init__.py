"""What is published: commits of both tables, CURRENT.json, the history of publications."""
