"""A training's own configuration, read as data: nothing in it is ever run."""
