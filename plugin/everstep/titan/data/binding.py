"""Sets the data component that `[data]` names, and checks that the files it reads exist."""

from pathlib import Path
from typing import Any

from everstep.config.errors import ConfigError, nearest
from everstep.data.token_format import DataError, in_bytes
from everstep.titan.data.byte_tokenizer import ByteTokenizer
from everstep.titan.data.rows import Rows
from everstep.titan.data.streams import SlotStreams
from everstep.titan.names import DATASETS, HFDataSource, HuggingFaceTextDataLoader, HuggingFaceTokenizer

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""Files of a tokenizer. torchtitan reads the first one that exists."""


def bind_data(config: Any) -> None:
    """Set `config.dataloader` to the data source that `[data]` names, and `config.tokenizer` to the source's own
    tokenizer if it has one. Changes `config` in place. Idempotent.

    Called when the trainer is built, after the command line is parsed, so that the flags `--data.source` and
    `--dataloader.dataset` take effect.

    Args:
        config: a trainer config with Everstep's sections.
    """
    data, seed = config.data, config.debug.seed or 0
    if data.source in ("stdlib", "tokens"):
        path = data.path if data.source == "tokens" else ""
        config.dataloader = Rows.Config(path=path, shuffle=data.shuffle, seed=seed)
        if data.source == "stdlib" or in_bytes(Path(path)):
            config.tokenizer = ByteTokenizer.Config()
    elif config.fault_tolerance.enable and not isinstance(config.dataloader, SlotStreams.Config):
        config.dataloader = SlotStreams.Config(base=config.dataloader, seed=seed)


def check_files(config: Any, file: Path) -> None:
    """Refuse a config if torchtitan does not know its dataset, or files of its tokenizer or dataset do not exist. Not
    part of `config.checks.problems`, because only a machine that trains needs these files.

    Raises:
        ConfigError: names the config's `file`, the key and what to do.
    """
    folder = Path(config.hf_assets_path)
    source, path = config.data.source, Path(config.data.path)
    try:
        brings_its_own = source == "stdlib" or (source == "tokens" and in_bytes(path))
    except DataError as error:
        raise ConfigError(f"{file}: [data] path: {error}") from error
    reads_folder = not brings_its_own and isinstance(config.tokenizer, HuggingFaceTokenizer.Config)
    if reads_folder and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        old = f"; {folder.name} is torchtitan 0.1's format, which nothing reads any more" * (folder.suffix == ".model")
        raise ConfigError(
            f'{file}: hf_assets_path = "{folder}" has no tokenizer ({" or ".join(_TOKENIZER_FILES)}), which '
            f'[data] source = "{source}" needs{old}; download the model\'s tokenizer, or set [data] source = "stdlib"'
        )
    if source == "dataloader":
        _check_dataset(f"{file}: [dataloader]", config.dataloader)
    if config.validator.enable:
        _check_dataset(f"{file}: [validator.dataloader]", getattr(config.validator, "dataloader", None))


def _check_dataset(section: str, loader: Any) -> None:
    for at, source in enumerate(getattr(loader, "sources", ())):  # of one that interleaves datasets
        _check_dataset(f"{section} sources[{at}]:", source)
    if not isinstance(loader, HuggingFaceTextDataLoader.Config | HFDataSource):
        return
    name, given = loader.dataset, loader.dataset_path
    if name not in DATASETS:
        raise ConfigError(
            f'{section} dataset = "{name}" is not one of torchtitan\'s; the nearest is "{nearest(name, DATASETS)}". '
            'Text of your own: `everstep pack` and [data] source = "tokens"'
        )
    place = given or DATASETS[name].path
    if (given or place.startswith(("/", ".", "tests/"))) and not Path(place).exists():
        raise ConfigError(f'{section} dataset = "{name}" is read from {place}, which does not exist')
