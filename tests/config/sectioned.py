"""A trainer's Config with our sections, for tests of how it is filled; nothing here trains."""

from dataclasses import dataclass, field

from torchtitan.trainer import Trainer

from everstep.attention.section import AttentionCheck
from everstep.config.sections import Data, FaultTolerance, Job
from everstep.semi.section import SemiSync
from everstep.snapshot.section import SnapshotSection


class SectionedTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        job: Job = field(default_factory=Job)
        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        data: Data = field(default_factory=Data)
        snapshot: SnapshotSection = field(default_factory=SnapshotSection)
        attention_check: AttentionCheck = field(default_factory=AttentionCheck)
        semi_sync: SemiSync = field(default_factory=SemiSync)
