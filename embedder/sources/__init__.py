"""Lists a run's items and fetches their bytes.

`listing.list_sources` runs on the driver and yields Arrow tables; `fetch.Fetcher` runs where items are decoded. Nothing
is imported here, so a process pays only for the half it uses.
"""
