"""What every test shares."""

from __future__ import annotations

import hypothesis

# Shared machines make single examples slow; the time limit of a whole test is pytest's.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")
