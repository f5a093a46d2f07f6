"""`python -m titan_loop` is `titan-loop`; torchrun starts its ranks this way."""

import sys

from titan_loop.cli.main import main

sys.exit(main())
