"""The one door from encoded bytes to uint8 pixels; kept empty, because the decoding child imports this package too."""
