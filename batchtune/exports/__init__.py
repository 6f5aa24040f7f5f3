"""A recommendation → one framework's config, one module per framework."""
