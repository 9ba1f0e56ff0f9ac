"""The entry point of ``python -m adapmixed_lab``."""

import sys

from adapmixed_lab.cli import main

sys.exit(main())
