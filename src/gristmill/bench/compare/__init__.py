"""Two files of results, compared."""
