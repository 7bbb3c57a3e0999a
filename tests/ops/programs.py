"""What a traced program has in it."""

import jax


def equations(jaxpr, times=1):
    """Each equation of a program with how often it runs; loops that count as they go run once."""
    for equation in jaxpr.eqns:
        yield equation, times
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, times * length)
