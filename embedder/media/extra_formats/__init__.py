"""Decoders of the extra `formats`, imported in the sandbox process only, with the first file of their kind."""
