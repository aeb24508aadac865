"""Everything that is known: tables of rows, the records they point at, and how both leave memory."""
