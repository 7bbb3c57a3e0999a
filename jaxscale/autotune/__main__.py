"""Not a command: the measured search is `python -m jaxscale.plan --measure`."""

from jaxscale import command_line

command_line.refuse(
    "jaxscale.autotune is not a command; for a measured search use "
    "python -m jaxscale.plan --config FILE --measure"
)
