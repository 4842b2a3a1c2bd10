"""Functions and classes of `rollout.tools` and `rollout.environment`, and their descriptions in prompts."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from grpo_ray.config.import_path import import_callable
from grpo_ray.config.schema import Config, RolloutConfig
from grpo_ray.config.tool_paths import NO_ENVIRONMENT, is_remote, runs_policy_code
from grpo_ray.errors import ConfigError, DataError

NOT_TOOLS = frozenset({"reset", "step", "get_reward"})
"""Public methods of an environment that the policy cannot call."""


@dataclass(frozen=True)
class ToolSet:
    """Tools that one completion may call."""

    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Descriptions in the form that chat templates take."""
    names: frozenset[str] = frozenset()


NO_TOOLS = ToolSet()


@dataclass(frozen=True)
class EnvironmentFacts:
    """Properties of an environment's class."""

    path: str
    tools: ToolSet
    """Tools of the environment and those of `rollout.tools`."""
    has_reward: bool
    has_step: bool


@dataclass(frozen=True)
class RolloutDefinition:
    """Checked contents of the section `rollout`."""

    tools: tuple[str, ...]
    """Path of each function."""
    shared: ToolSet
    """Tools of `rollout.tools`."""
    environments: Mapping[str | None, EnvironmentFacts]
    """Environments by name; None for one without a name."""
    settings: Mapping[str, Mapping[str, Any]]
    """Keyword arguments of each environment's constructor, by its path."""

    @property
    def has_own(self) -> bool:
        """True if modules of the user are imported."""
        return bool(self.environments) or not all(path.startswith("grpo_ray.tools.") for path in self.tools)

    @property
    def has_named(self) -> bool:
        """True if the environments have names, of which the problems choose one."""
        return bool(self.environments) and None not in self.environments

    @property
    def code_tools(self) -> frozenset[str]:
        """Names of the tools that run code of the policy, in another process than that of the environment."""
        return code_tools(self.tools)

    @property
    def remote_tools(self) -> frozenset[str]:
        """Names of the tools that run in the remote sandbox; a failure there does not affect the environment."""
        return frozenset(path.partition(":")[2] for path in self.tools if is_remote(path))

    def require(self, environment: str | None, where: str = "") -> None:
        """Raise DataError if a problem names no environment, or one that does not exist.

        Where environments have names, `NO_ENVIRONMENT` stands for none.

        Args:
            where: file and row of the problem.
        """
        is_known = environment in self.environments or (environment == NO_ENVIRONMENT and self.has_named)
        if self.environments and not is_known:
            known = ", ".join(str(each) for each in self.environments)
            given = "has no column 'environment'" if environment is None else f"has environment={environment!r}"
            raise DataError(
                f"{where or 'a problem'} {given}, and rollout.environment has {known}; correct the data or the config"
            )

    def tool_set(self, environment: str | None) -> ToolSet:
        """Return the tools of completions with an environment. Raises DataError as `require`."""
        self.require(environment)
        return self.environments[environment].tools if environment in self.environments else self.shared

    def has_reward(self, environment: str | None) -> bool:
        """Return True if the environment scores its completions."""
        return environment in self.environments and self.environments[environment].has_reward

    def has_step(self, environment: str | None) -> bool:
        """Return True if the environment answers turns without a call."""
        return environment in self.environments and self.environments[environment].has_step


def code_tools(paths: Iterable[str]) -> frozenset[str]:
    """Return the names of the tools at these paths that run code of the policy."""
    return frozenset(path.partition(":")[2] for path in paths if runs_policy_code(path))


def load_definition(config: RolloutConfig) -> RolloutDefinition:
    """Import the functions and classes that the section `rollout` names, and check them.

    Raises:
        ConfigError: something does not exist, is not described, or is named twice.
    """
    shared = _tool_set([_function(path) for path in config.tools], "rollout.tools")
    environments = {
        name: _environment(path, config.settings.get(path, {}), shared) for name, path in config.environments.items()
    }
    return RolloutDefinition(config.tools, shared, environments, config.settings)


def require_importable(config: RolloutConfig) -> None:
    """Check the functions and classes that the section `rollout` names as far as that needs no heavy library.

    Their descriptions, which `load_definition` makes too, need transformers.

    Raises:
        ConfigError: something does not exist, or an environment cannot be created.
    """
    for path in config.tools:
        _function(path)
    for path in config.environments.values():
        _environment_class(path, config.settings.get(path, {}))


def measuring_arguments(config: Config) -> dict[str, Any]:
    """Return the variables of the chat template with which lengths of prompts are measured.

    They describe the tools of all environments, so that no prompt is longer. The text of an environment's reset is not
    included: it is known only when a completion begins.

    Raises:
        ConfigError: as in `load_definition`.
    """
    if not config.rollout.has_turns:
        return config.chat_template_kwargs
    definition = load_definition(config.rollout)
    schemas = {
        schema["function"]["name"]: schema
        for tools in (definition.shared, *(each.tools for each in definition.environments.values()))
        for schema in tools.schemas
    }
    return config.chat_template_kwargs | {"tools": list(schemas.values())}


def own_tools(environment: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of an environment's class that are tools: public ones, without those of `NOT_TOOLS`."""
    methods = inspect.getmembers(environment, inspect.isfunction)
    return {
        # Bound, so that its description has no argument `self`; a static method has none.
        name: method if _is_static(environment, name) else MethodType(method, environment)
        for name, method in methods
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def _is_static(environment: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(environment, name), staticmethod)


def _function(path: str) -> Callable[..., Any]:
    function = import_callable(path, "rollout.tools")
    if not inspect.isroutine(function):
        kind = "a class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(f"rollout.tools: {path!r} must be a function; got {kind}")
    return function


def _environment_class(path: str, settings: Mapping[str, Any]) -> type:
    environment = import_callable(path, "rollout.environment")
    if not inspect.isclass(environment):
        raise ConfigError(f"rollout.environment: {path!r} must be a class; got {type(environment).__name__}")
    if not callable(getattr(environment, "reset", None)):
        raise ConfigError(f"rollout.environment: {path!r} has no method reset, which begins a completion")
    try:
        inspect.signature(environment).bind(**settings)
    except TypeError as error:
        raise ConfigError(f"rollout.settings: {path!r} cannot be created with {dict(settings)}: {error}") from None
    return environment


def _environment(path: str, settings: Mapping[str, Any], shared: ToolSet) -> EnvironmentFacts:
    environment = _environment_class(path, settings)
    tools = _tool_set([*own_tools(environment).values()], f"rollout.environment: {path!r}")
    if twice := sorted(tools.names & shared.names):
        raise ConfigError(
            f"rollout.environment: {path!r} has the tool {twice[0]!r}, which rollout.tools has too; rename one of them"
        )
    both = ToolSet([*shared.schemas, *tools.schemas], shared.names | tools.names)
    has_reward, has_step = (callable(getattr(environment, name, None)) for name in ("get_reward", "step"))
    return EnvironmentFacts(path, both, has_reward, has_step)


def _tool_set(functions: Sequence[Callable[..., Any]], where: str) -> ToolSet:
    schemas = [_schema(function, where) for function in functions]
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: two functions have the name {max(names, key=names.count)!r}; rename one of them")
    return ToolSet(schemas, frozenset(names))


def _schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the description of a function. Raises ConfigError if its hints or its docstring are missing."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        raise ConfigError(
            f"{where}: {getattr(function, '__qualname__', function)!r} cannot be described to the policy: "
            f"{str(error).splitlines()[0]}; give it type hints and a docstring with a section Args"
        ) from None
    return schema
