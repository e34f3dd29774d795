"""``headrace bench``: measure a server, the engine by itself, and one engine step by part."""
