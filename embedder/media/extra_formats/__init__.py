"""Decoders of the extra `formats`, imported only in the sandbox process, with the first file of their kind."""
