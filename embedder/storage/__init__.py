"""Access to bytes: file adapters and the names of files, below everything that stores or lists."""
