"""``python -m adapmixed``: the command line."""

import sys

from adapmixed.cli import main

sys.exit(main())
