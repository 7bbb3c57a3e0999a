"""What `jaxscale` offers by name stays what it is, whatever is imported."""

import importlib
import pkgutil

import jaxscale


def test_no_public_name_is_a_modules():
    """Importing jaxscale.NAME would put the module in the function's place."""
    found = pkgutil.walk_packages(jaxscale.__path__, "jaxscale.")
    modules = {module.name.split(".")[-1] for module in found}
    assert {"describe", "evaluate", "plan", "train", "orders"} <= modules
    assert not modules & set(dir(jaxscale))


def test_every_public_name_is_there_after_every_command():
    before = {name: getattr(jaxscale, name) for name in dir(jaxscale)}
    for module in pkgutil.iter_modules(jaxscale.__path__):
        if module.name not in ("trial",):  # a process of its own
            importlib.import_module(f"jaxscale.{module.name}")
    assert {name: getattr(jaxscale, name) for name in before} == before
    assert all(callable(value) for value in before.values())
