"""`everstep pack`: make a token file from text."""

from pathlib import Path

import tyro
from rich.console import Console

from everstep.data.pack import pack as make
from everstep.data.token_format import DataError
from everstep.data.token_format import verify as verified
from everstep.titan.data.encoders import encoder_for


def pack(
    inputs: tyro.conf.Positional[tuple[Path, ...]] = (),
    out: Path = Path("corpus.tokens"),
    tokenizer: str = "bytes",
    text_key: str = "text",
    verify: bool = False,
) -> int:
    """Make a token file from text. If it is interrupted, the same command continues where it stopped. Exit status: 2
    for a mistake in the arguments or the input, 1 for an error of the system (a full disk), 130 after Ctrl-C.

    Args:
        inputs: Text files (a document each), .jsonl and .parquet files (one per line or row), .gz too, or folders.
        out: The token file to make, or to check with --verify.
        tokenizer: A directory with a Hugging Face tokenizer.json (a model's hf_assets_path), or `bytes`.
        text_key: The key or column of the text in JSONL and parquet.
        verify: Make nothing. Compare all of --out with its checksums.
    """
    console = Console(stderr=True)

    def say(message: object) -> None:
        console.print(str(message), markup=False, highlight=False, soft_wrap=True)

    try:
        if verify and inputs:
            raise DataError("--verify checks --out and takes no input files.")
        footer = verified(out) if verify else make(inputs, out, encoder_for(tokenizer), text_key, say)
    except KeyboardInterrupt:
        say(f"Stopped. Run the same command again to continue, or remove {out}.*.partial.")
        return 130
    except ValueError as error:
        say(f"everstep pack: {error}")
        return 2
    except OSError as error:
        say(f"everstep pack: {error}. {out}.*.partial has what is packed. Run the same command again to continue.")
        return 1
    left_out = f", {footer.left_out:,} left out as empty" if footer.left_out else ""
    say(
        f"{out} is complete: {footer.documents:,} documents{left_out}, {footer.tokens:,} tokens "
        f"({footer.dtype}), ids up to {footer.max_id}."
    )
    return 0
