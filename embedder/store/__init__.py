"""The store: two Delta tables, numbered indexes, one journal a run, and CURRENT.json, which says what is published."""
