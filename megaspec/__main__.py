"""`python -m megaspec`."""

import sys

from megaspec.cli import main

sys.exit(main())
