"""Import of functions and classes that a config names as `package.module:name`."""

import importlib
from collections.abc import Callable
from typing import Any

from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError


def import_callable(path: str, where: str) -> Callable[..., Any]:
    """Import the function or class `package.module:name`.

    Args:
        path: its path.
        where: field of the config that names it, for the message.

    Raises:
        ConfigError: the path has another form, the module cannot be imported, or it has no callable of that name.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{where}: {path!r} must have the form package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{where}: {path!r} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{where}: {module_name} has no {name!r}{suggestion(name, vars(module), likeness=0.4)}")
    return found
