"""`everstep pack`: a token file from text."""

from collections.abc import Sequence

from rich.console import Console

from everstep.data.pack import Pack
from everstep.data.pack import pack as make
from everstep.data.token_format import DataError, verify
from everstep.titan.data.encoders import encoder_for

__all__ = ["Pack", "pack"]


def pack(command: Pack, flags: Sequence[str]) -> int:
    """Returns the exit status: 0, 2 for something that the user can put right, 1 for what the system refused, 130 after
    Ctrl-C."""
    console = Console(stderr=True)

    def say(message: object) -> None:
        console.print(str(message), markup=False, highlight=False, soft_wrap=True)

    try:
        if command.verify and command.inputs:
            raise DataError("--verify checks --out and takes no input files.")
        footer = verify(command.out) if command.verify else make(command, lambda: encoder_for(command.tokenizer), say)
    except KeyboardInterrupt:
        say("Stopped. The same command goes on where it was.")
        return 130
    except ValueError as error:
        say(f"everstep pack: {error}")
        return 2
    except OSError as error:
        say(f"everstep pack: {error}. What is packed stays; the same command goes on with it.")
        return 1
    left_out = f", {footer.left_out:,} left out as empty" if footer.left_out else ""
    say(
        f"{command.out} is whole: {footer.documents:,} documents{left_out}, {footer.tokens:,} tokens "
        f"({footer.dtype}), ids up to {footer.max_id}."
    )
    return 0
