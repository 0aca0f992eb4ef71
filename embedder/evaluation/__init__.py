"""How well texts find a store's pictures, by the model alone and through the index; how fast, and with what memory."""
