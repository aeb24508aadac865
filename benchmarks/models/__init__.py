"""What the models say, held against what was published and measured."""
