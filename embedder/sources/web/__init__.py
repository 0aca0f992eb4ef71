"""Images and videos at http:// and https:// addresses: fetched within limits, from servers that can't be trusted."""
