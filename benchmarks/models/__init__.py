"""The models, held against what was published and measured."""
