"""Query service over a store: searches, items and facets by HTTP, and the page that shows them."""
