"""Which data component `[data]` means."""

from pathlib import Path
from typing import Any


def bind_data(config: Any) -> None:
    """Put the data source that `[data]` names in the place of `config.dataloader` (and of the tokenizer,
    where the source brings its own), in place. Idempotent.

    Runs when the trainer is built, after the command line: `--data.source` and `--dataloader.dataset` both
    count.

    Args:
        config: a trainer config with our sections.
    """
    from everstep.data.byte_tokenizer import ByteTokenizer
    from everstep.data.stdlib_text import StdlibText
    from everstep.data.streams import SlotStreams
    from everstep.data.token_format import in_bytes
    from everstep.data.tokens import TokenFile

    data, seed = config.data, config.debug.seed or 0
    if data.source == "stdlib":
        config.dataloader = StdlibText.Config(shuffle=data.shuffle, seed=seed)
        config.tokenizer = ByteTokenizer.Config()
    elif data.source == "tokens":
        config.dataloader = TokenFile.Config(path=data.path, shuffle=data.shuffle, seed=seed)
        if in_bytes(Path(data.path)):
            config.tokenizer = ByteTokenizer.Config()
    elif config.fault_tolerance.enable and not isinstance(config.dataloader, SlotStreams.Config):
        config.dataloader = SlotStreams.Config(base=config.dataloader)
