"""Arrays of rows and columns: growing tables, row operations, grouping, keys and intervals."""
