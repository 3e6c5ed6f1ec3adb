"""`python -m services.engine`. Owns how it begins; what it does is in program.py."""

import sys

from services import garbage

if __name__ == "__main__":
    with garbage.not_looked_for():
        from services.engine.program import main
    sys.exit(main())
