"""Import of functions and classes that a config names as `package.module:name`."""

import importlib
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError

LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
"""How the files of Python and of installed packages begin; modules that are part of Python itself are `<frozen os>`."""


def describe_own_error(error: BaseException) -> str:
    """Describe an error of the user's code on one line: its class and message, and the file and line.

    An error that a library raised has the place where the user's code called it. The first frame of the traceback is
    the one that caught the error, never the user's.
    """
    if isinstance(error, SyntaxError):  # no frame of its traceback is in the file that cannot be compiled
        file, line, text = error.filename, error.lineno, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((each for each in reversed(frames[1:]) if not each.filename.startswith(LIBRARIES)), frames[-1])
        file, line, text = frame.filename, frame.lineno, str(error)
    return f"{type(error).__name__}: {' '.join(text.split())} ({file}, line {line})"


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
    if module_name.endswith(".py") or "/" in module_name:
        module_name = module_name.strip("./").removesuffix(".py").replace("/", ".")
        raise ConfigError(f"{where}: {path!r} must name a module, not a file: write {module_name}:{name}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        advice = ""
        if isinstance(error, ModuleNotFoundError):
            is_own = f"{module_name}.".startswith(f"{error.name}.")
            advice = "; is its folder on PYTHONPATH?" if is_own else f"; {module_name} imports it: is it installed?"
        raise ConfigError(f"{where}: {path!r} cannot be imported ({error}){advice}") from error
    except (Exception, SystemExit) as error:  # the module's own code may raise any class
        raise ConfigError(f"{where}: {path!r} cannot be imported: {describe_own_error(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{where}: {module_name} has no {name!r}{suggestion(name, known, likeness=0.4)}")
    return found
