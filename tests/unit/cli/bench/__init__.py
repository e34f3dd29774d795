"""headrace bench."""
