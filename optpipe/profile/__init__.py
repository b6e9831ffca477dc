"""What a model costs: by formula from a table of its sizes, or measured on this hardware."""
