"""Dataclasses whose methods are written once, here.

`@dataclass` writes source code for every class and compiles it: 1-2 ms a class at every start, and a check that fails goes
through thirty of them. These cost a tenth of that. `fields`, `replace` and `asdict` of dataclasses work on both kinds, and
so does `__post_init__`.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, fields


class Section:
    """What may be changed: settings. Subclasses list their fields as a dataclass does, and need no decorator."""

    def __init_subclass__(cls) -> None:
        cls.__doc__ = cls.__doc__ or cls.__name__  # or dataclass works out a signature to put there
        dataclass(init=False, repr=False, eq=False, match_args=False)(cls)
        cls._defaults = {f.name: f.default for f in fields(cls)}
        cls._factories = {f.name: f.default_factory for f in fields(cls) if f.default_factory is not MISSING}

    def __init__(self, *values: object, **named: object) -> None:
        made = self._defaults | dict(zip(self._defaults, values, strict=False)) | named
        if len(made) > len(self._defaults) or len(values) > len(made) or not named.keys().isdisjoint(list(made)[:len(values)]):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(self._defaults)}, each given once; "
                            f"got {len(values)} values and {', '.join(named)}")
        for name, factory in self._factories.items():
            if made[name] is MISSING:
                made[name] = factory()
        if MISSING in made.values():
            raise TypeError(f"{type(self).__name__} lacks {', '.join(name for name, value in made.items() if value is MISSING)}")
        self.__dict__.update(made)
        self.__post_init__()

    def __post_init__(self) -> None:
        """For subclasses that check what they were given."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._defaults)})"

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if type(other) is type(self) else NotImplemented

    __hash__ = None

    def _values(self) -> tuple:
        return tuple(getattr(self, name) for name in self._defaults)


class Record(Section):
    """What never changes: a fact, a plan, a problem."""

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"{name} of a {type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{name} of a {type(self).__name__} cannot be removed")

    def __hash__(self) -> int:
        return hash(self._values())
