"""``python -m cli``: the same as ``headrace``."""

import sys

from cli.main import main

sys.exit(main())
