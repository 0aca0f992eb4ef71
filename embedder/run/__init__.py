"""A run, decided and watched: what is new, which engine, who gets which CPUs, what it came to."""
