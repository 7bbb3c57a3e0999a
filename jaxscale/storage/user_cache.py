"""The folder of the user's cache: compiled programs, traces of models, local tiers of runs."""

import os
import pathlib

VARIABLE = "JAXSCALE_CACHE"
"""The environment variable that replaces the folder; when empty, programs and traces are not kept.
"""


def user_cache() -> pathlib.Path:
    """The folder `jaxscale` in the user's cache.

    Raises:
      RuntimeError: the user has no home folder.
    """
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxscale"


def cache_folder() -> pathlib.Path | None:
    """The folder of compiled programs and traces, which may be deleted; None when none are kept.

    Raises:
      RuntimeError: the user has no home folder.
    """
    name = os.environ.get(VARIABLE)
    if name == "":
        return None
    return pathlib.Path(name).expanduser() if name else user_cache()
