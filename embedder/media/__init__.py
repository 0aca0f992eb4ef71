"""Decoding of encoded bytes to uint8 pixels; kept empty because the sandbox process also imports this package."""
