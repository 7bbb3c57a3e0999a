"""The studies that the command runs."""

from jaxscale.studies.compute_optimal import COMPUTE_OPTIMAL
from jaxscale.studies.critical_batch import CRITICAL_BATCH
from jaxscale.studies.scaling import SCALING
from jaxscale.studies.shortest import SHORTEST
from jaxscale.studies.study import Study
from jaxscale.studies.transfer import TRANSFER
from jaxscale.studies.trillion import TRILLION
from jaxscale.studies.zero import ZERO

SHIPPED: tuple[Study, ...] = (
    *(ZERO, SCALING, TRILLION, SHORTEST),
    *(CRITICAL_BATCH, TRANSFER, COMPUTE_OPTIMAL),  # which train
)
