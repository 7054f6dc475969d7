"""``python -m fedplat`` is the same as ``fedplat``."""

import sys

from .cli import main

sys.exit(main())
