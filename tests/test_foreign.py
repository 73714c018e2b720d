"""What Everstep changes in other packages is there to be changed."""

import pytest

from everstep import foreign


def test_what_replaces_nothing_is_an_error():
    class Base:
        pass

    with pytest.raises(AttributeError, match="Base has no _count any more"):
        foreign.replace(Base(), "_count", 0)
