"""What Everstep changes in other packages is there to be changed."""

import pytest

from everstep import foreign


def test_what_replaces_or_stands_in_for_nothing_is_an_error():
    class Base:
        pass

    with pytest.raises(AttributeError, match="Base has no _count any more"):
        foreign.replace(Base(), "_count", 0)
    with pytest.raises(AttributeError, match="Base has no _begin any more"):

        @foreign.overrides(Base)
        def _begin(self):
            """Nobody calls it."""
