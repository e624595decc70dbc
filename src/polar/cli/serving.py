"""What the options say of the models that answer."""

from collections.abc import Sequence

from polar.errors import UsageError
from polar.rollout.connect import EngineOptions


def serving(engine: str, model: str, renderer: str, routes: Sequence[str], accept_unproven: bool) -> EngineOptions:
    """Options as they were given; `routes` are `NAME=URL`.

    Raises:
        UsageError: a route is none, or a name has two.
    """
    named: dict[str, str] = {}
    for text in routes:
        name, _, address = text.partition("=")
        if not (name and address):
            raise UsageError(f"--route: expected NAME=URL, got {text!r}")
        if name in named:
            raise UsageError(f"--route: {name!r} has two routes, to {named[name]} and to {address}")
        named[name] = address
    return EngineOptions(engine, model, renderer, named, accept_unproven)
