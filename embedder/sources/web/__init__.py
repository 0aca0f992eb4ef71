"""Images and videos at http:// and https:// addresses: fetched within limits, from servers that nobody vouches for."""
