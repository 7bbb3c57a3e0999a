"""No command: the search by measuring belongs to `python -m jaxscale.plan`."""

from jaxscale import command_line

command_line.refuse(
    "jaxscale.autotune is not a command; search by measuring with "
    "python -m jaxscale.plan --config FILE --measure"
)
