"""Small programs to copy from; each is run by a test."""
