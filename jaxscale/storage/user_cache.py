"""The folder of the user's cache: compiled programs, traces of models, local tiers of runs."""

import os
import pathlib

VARIABLE = "JAXSCALE_CACHE"
"""The environment variable that names the folder instead; empty keeps no programs and no traces."""


def user_cache() -> pathlib.Path:
    """`jaxscale` in the user's cache.

    Raises:
      RuntimeError: a user without a home.
    """
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxscale"


def cache_folder() -> pathlib.Path | None:
    """The folder for what is made again where it is missing; None where nothing is kept.

    Raises:
      RuntimeError: a user without a home.
    """
    name = os.environ.get(VARIABLE)
    if name == "":
        return None
    return pathlib.Path(name).expanduser() if name else user_cache()
