"""Operators: one interface (`ops`), and an implementation each for plain torch, native CPU code and Triton."""
