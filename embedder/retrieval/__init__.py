"""From a query to an answer: search, conditions, words of captions, grouping and folding, hits as people see them."""
