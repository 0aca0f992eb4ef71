"""Store: two Delta tables, numbered indexes, one journal per run, and CURRENT.json, which names what is published."""
