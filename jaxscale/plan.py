"""python -m jaxscale.plan --config configs/X.py --hardware NAME --devices N

The command; what it does is in `jaxscale.planning`. Import that, not this: `jaxscale.plan` is also
the name of a function, and importing a module of that name would hide it.
"""

import sys

from jaxscale.planning import main

if __name__ == "__main__":
    sys.exit(main())
