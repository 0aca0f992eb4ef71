"""Is what the shards compute what the unsplit towers compute, and what does a dtype cost in quality?"""
