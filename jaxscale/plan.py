"""python -m jaxscale.plan --config configs/X.py --hardware NAME --devices N

The command; what it does is in `jaxscale.planning`, and a notebook's `jaxscale.plan_layouts` in
`planner/answer.py`.
"""

import sys

from jaxscale.planning import main

if __name__ == "__main__":
    sys.exit(main())
