"""Training from a memory-mapped token file of `everstep pack`."""

from dataclasses import dataclass
from pathlib import Path

from everstep.data.documents import Documents
from everstep.data.token_format import TokenFileError, map_tokens, read_footer
from everstep.titan.data.rows import RowSource, Text
from everstep.titan.names import BaseTokenizer


class TokenFile(RowSource):
    """Rows of a token file. Opening reads the footer only; checksums of the tokens are compared by
    `everstep pack --verify`. A row that contradicts the footer is refused when it is read."""

    @dataclass(kw_only=True, slots=True)
    class Config(RowSource.Config):
        path: str = ""
        """The token file."""

    def _open(self, config: Config, tokenizer: BaseTokenizer) -> Text:
        if not config.path:
            raise TokenFileError("data.path is empty: name the token file that `everstep pack` made.")
        path = Path(config.path)
        footer, digest = read_footer(path)
        vocab_size = tokenizer.get_vocab_size()
        if footer.max_id >= vocab_size:
            raise TokenFileError(
                f"{path} has token ids up to {footer.max_id}, the tokenizer only {vocab_size} ids: it was "
                "packed with another tokenizer. Set hf_assets_path to that one, or pack the text again."
            )
        tokens, starts = map_tokens(path, footer)
        documents = Documents(tokens, starts, max_id=footer.max_id)
        return Text(documents, f"token file {digest[:16]}", str(path), footer.max_id + 1)
