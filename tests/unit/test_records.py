"""Records are dataclasses in all but the cost of their definition."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, field, fields, is_dataclass, replace

import pytest

from mfsdp_cli.records import Record, Section


class Point(Record):
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)


class Named(Point):
    """A point with a name."""

    name: str = ""
    y: int = 7

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("left of the paper")


class Options(Section):
    rate: float = field(default=0.5, metadata={"doc": "how often"})
    layers: list[int] = field(default_factory=lambda: [1])


def test_values_by_place_and_by_name_defaults_and_own_factories():
    assert (Point(1).x, Point(1).y, Point(1).tags) == (1, 2, []) and Point(1, 5).y == 5 and Point(y=3, x=1).y == 3
    first, second = Options(), Options()
    first.layers.append(2)
    assert (first.layers, second.layers, second.rate) == ([1, 2], [1], 0.5)


@pytest.mark.parametrize("values, named, told", [
    ((), {}, "Point lacks x"), ((1, 2, [], 4), {}, "got 4 values"), ((1,), {"x": 2}, "each given once"), ((1,), {"z": 2}, "and z"),
    ((), {"tags": []}, "lacks x"),
])
def test_wrong_calls_are_type_errors_that_tell_the_fields(values, named, told):
    with pytest.raises(TypeError, match=told):
        Point(*values, **named)


def test_equality_hash_and_text():
    assert Point(1) == Point(1, 2, []) != Point(2) and Point(1) != Named(1, 2) and Options() == Options()
    assert repr(Point(1)) == "Point(x=1, y=2, tags=[])"
    assert len({Named(1, tags=()), Named(1, tags=()), Named(2, tags=())}) == 2
    with pytest.raises(TypeError):
        hash(Options())


def test_a_record_does_not_change_and_a_section_does():
    with pytest.raises(FrozenInstanceError):
        Point(1).x = 3
    with pytest.raises(FrozenInstanceError):
        del Point(1).x
    options = Options()
    options.rate = 1.0
    assert options != Options()


def test_what_dataclasses_offers_works():
    named = Named(1, name="a")
    assert is_dataclass(named) and [f.name for f in fields(Named)] == ["x", "y", "tags", "name"] and fields(Options)[0].metadata["doc"]
    assert replace(named, x=4) == Named(4, name="a") and asdict(named) == {"x": 1, "y": 7, "tags": [], "name": "a"}
    assert named == copy.deepcopy(named) == pickle.loads(pickle.dumps(named))
    with pytest.raises(ValueError, match="left"):
        replace(named, x=-1)
