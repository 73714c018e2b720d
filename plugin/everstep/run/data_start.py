"""At which step a run turned to its data, when a checkpoint is loaded without its position in the data.

`RUN_DIR/state/data/DIGEST.json` is written by the first start that does so, for each data. A start after it goes on
with the rows that come then, and does not begin with the first ones again.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.run.files import read_typed, write_json
from everstep.run.typed import Count


@dataclass(frozen=True)
class _Start:
    """What the file holds."""

    data: str
    began_after: Count


def began_after(run_dir: Path, data: str, step: int) -> int:
    """The step after which the run reads from this data's beginning: `step`, if it is the first to ask.

    data: what tells it from others (`SlotSource.fingerprint`).
    """
    place = Path(run_dir) / "state" / "data" / f"{hashlib.sha256(data.encode()).hexdigest()[:16]}.json"
    known = read_typed(_Start, place)
    if known is not None and known.began_after <= step:
        return known.began_after
    write_json(place, asdict(_Start(data, step)))  # nobody has asked, or the run went back before that
    return step
