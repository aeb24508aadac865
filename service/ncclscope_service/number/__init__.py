"""Numbers of operations that are true although lines were lost."""
