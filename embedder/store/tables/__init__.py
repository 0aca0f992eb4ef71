"""The store's Delta tables: log, state, rows, views of each model."""
