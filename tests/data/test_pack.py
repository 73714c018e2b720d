"""`everstep pack`: the same file whatever interrupts it, and one clear sentence for whatever is wrong."""

import contextlib
import gzip
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from damage import damaged, planted
from everstep.commands.pack import pack as command
from everstep.data import token_format
from everstep.data.documents import Documents
from everstep.data.inputs import InputError
from everstep.data.pack import Pack, pack
from everstep.data.token_format import TokenFileError, map_tokens, read_footer, verify
from everstep.titan.data.encoders import encoder_for
from everstep.titan.data.tokens import TokenFile


def write_lines(path, texts):
    lines = "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts))
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.write(lines)


def write_parquet(path, texts, key="text"):
    table = pyarrow.table({"id": list(range(len(texts))), key: pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=7)


def texts_in(path, tokenizer):
    footer, _ = read_footer(path)
    tokens, starts = map_tokens(path, footer)
    pairs = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return [tokenizer.decode(tokens[begin:end].tolist()) for begin, end in pairs]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A model's directory with a small trained tokenizer that adds no BOS or EOS itself."""
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the slot of a step is a pure function of the step and the slot"] * 50, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return directory


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.tokens"


@pytest.fixture
def packed(tmp_path, out):
    """The file of the format's test vector, in two chunks."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "word " * (n % 7)}) + "\n" for n in range(60)))
    pack(Pack((tmp_path / "in.jsonl",), out), chunk_tokens=500)
    return out


def test_the_format_is_that_of_the_files_that_there_are(packed):
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    assert digest == "af76ddce9be6fe4c9ae263496be2524af65060b9ba3d553e3fc3d0c2badc7abc"
    footer, _ = read_footer(packed)
    assert (footer.tokens, footer.documents, footer.left_out) == (972, 51, 9)  # nine are empty


def test_text_jsonl_and_parquet_give_the_same_documents(tmp_path, documents, tokenizer):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(documents):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(text)
    for name in ("lines.jsonl", "lines.jsonl.gz"):
        write_lines(tmp_path / name, documents)
    write_parquet(tmp_path / "table.parquet", documents)
    for name in ("texts", "lines.jsonl", "lines.jsonl.gz", "table.parquet"):
        out = tmp_path / f"{name}.tokens"
        footer = pack(Pack((tmp_path / name,), out))
        assert texts_in(out, tokenizer) == documents
        assert (footer.documents, footer.dtype, footer.max_id) == (60, "uint16", 257)
        verify(out)
    assert not list(tmp_path.glob("*.partial*"))


def test_a_hugging_face_tokenizer_gives_the_ids_that_torchtitan_trains_on(jsonl, assets, documents, out):
    footer = pack(Pack((jsonl,), out), partial(encoder_for, str(assets / "tokenizer.json")))
    tokens, starts = map_tokens(out, footer)
    theirs = HuggingFaceTokenizer(tokenizer_path=str(assets))
    expected = [theirs.encode(text, add_bos=True, add_eos=True) for text in documents]
    assert tokens.tolist() == [token for document in expected for token in document]
    assert np.diff(starts).tolist() == [len(document) for document in expected]
    assert (token_format.dtype_for(65536), token_format.dtype_for(65537)) == ("uint16", "uint32")


# Interrupted.

PACK = """
import itertools, os, signal, sys
from pathlib import Path
from everstep.data.pack import Pack, pack
left = itertools.count(-2)
inputs = tuple(Path(name) for name in sys.argv[2:])
pack(Pack(inputs, Path(sys.argv[1])),
     tell=lambda _: next(left) or os.kill(os.getpid(), signal.SIGKILL), chunk_tokens=60000)
"""


@pytest.fixture
def corpus(tmp_path):
    """All kinds of input."""
    chance = np.random.default_rng(0)
    words = np.array(["slot", "ledger", "quorum", "keeper", "group", "Zeichen ü"])
    texts = [" ".join(words[chance.integers(0, len(words), count)]) for count in chance.integers(1, 300, 1200)]
    write_lines(tmp_path / "a.jsonl", texts[:400])
    write_parquet(tmp_path / "b.parquet", texts[400:800])
    write_lines(tmp_path / "c.jsonl.gz", texts[800:1199])
    (tmp_path / "d.txt").write_text(texts[1199])
    return tuple(tmp_path / name for name in ("a.jsonl", "b.parquet", "c.jsonl.gz", "d.txt"))


class CrashError(Exception):
    pass


def crash_after(chunks):
    def tell(_):
        nonlocal chunks
        chunks -= 1
        if chunks == 0:
            raise CrashError

    return tell


def begun(out):
    (folder,) = out.parent.glob("out.tokens.*.partial")
    return folder


def test_killed_crashed_and_with_a_chunk_torn_it_makes_the_same_file(tmp_path, corpus, out):
    whole = tmp_path / "whole.tokens"
    assert len(pack(Pack(corpus, whole), chunk_tokens=60000).chunks) > 10
    assert subprocess.run([sys.executable, "-c", PACK, out, *corpus]).returncode == -signal.SIGKILL
    for chunks in (1, 4):
        newest = max(begun(out).glob("*.npz"))
        newest.write_bytes(newest.read_bytes()[:-9])  # as a host that lost its power may leave it
        (begun(out) / "whole").write_bytes(b"half of it")
        with pytest.raises(CrashError):
            pack(Pack(corpus, out), tell=crash_after(chunks), chunk_tokens=60000)
    assert len(list(begun(out).glob("*.npz"))) == 6
    told = []
    pack(Pack(corpus, out), tell=told.append, chunk_tokens=60000)
    assert len(told) == len(read_footer(whole)[0].chunks) - 6, "what was there is not made again"
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("out.tokens.*"))


# Refused.


def test_a_finished_file_is_kept_and_never_overwritten_by_other_input(packed, tmp_path, jsonl, assets):
    made = (packed.stat().st_mtime_ns, packed.read_bytes())
    pack(Pack((tmp_path / "in.jsonl",), packed), chunk_tokens=500)
    for wrong in [{"chunk_tokens": 400}, {"encoder_of": lambda: encoder_for(str(assets)), "chunk_tokens": 500}]:
        with pytest.raises(TokenFileError, match="made from other input or with another tokenizer"):
            pack(Pack((tmp_path / "in.jsonl",), packed), **wrong)
    assert (packed.stat().st_mtime_ns, packed.read_bytes()) == made
    (tmp_path / "letter.tokens").write_text("Dear reader")
    with pytest.raises(TokenFileError, match="is no token file"):
        pack(Pack((jsonl,), tmp_path / "letter.tokens"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "bad.jsonl: not readable as json"),
        ("bad.jsonl", b'{"body": "a", "id": 1}\n', r"bad.jsonl: no key 'text' \(there: 'body', 'id'\)"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "bad.jsonl: "),
        ("bad.jsonl", b'{"text": 7}\n', "bad.jsonl: document 1: 'text' holds int, not text"),
        ("bad.txt", b"fine\nnot \xe9\n", "bad.txt: not readable as text"),
        ("bad.parquet", b"PAR1 and then nothing", "bad.parquet: not readable as parquet"),
        ("bad.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12], "bad.jsonl.gz: "),
        ("empty.txt", b"", "no document with text in .*empty.txt"),
    ],
)
def test_bad_input_is_named(tmp_path, out, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        pack(Pack((tmp_path / name,), out))
    assert not out.exists()


def test_the_command_speaks_in_sentences(tmp_path, out, tokenizer, capsys):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "one"}\n{"text": null}\n{"text": "three"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for flags, status, sentence in [
        ({"inputs": (tmp_path / "nowhere",)}, 2, "no input file"),
        ({"inputs": (tmp_path / "empty",)}, 2, "no input: name text"),
        ({"inputs": (tmp_path / "pipe.jsonl",)}, 1, "no regular file"),
        ({"tokenizer": "gpt9"}, 2, "no tokenizer 'gpt9'"),
        ({"tokenizer": str(tmp_path / "broken")}, 2, "broken cannot be loaded"),
        ({"verify": True, "inputs": ()}, 2, "no token file"),
        ({}, 0, "is whole: 2 documents, 1 left out"),
        ({"verify": True, "inputs": ()}, 0, "is whole: 2 documents"),
    ]:
        assert command(Pack(**{"inputs": (lines,), "out": out, **flags}), ()) == status
        assert sentence in capsys.readouterr().err
    assert texts_in(out, tokenizer) == ["one", "three"]


def open_file(path, tokenizer, seq_len=16):
    place = {"dp_world_size": 1, "dp_rank": 0, "seq_len": seq_len, "local_batch_size": 1}
    return TokenFile.Config(path=str(path)).build(tokenizer=tokenizer, **place)


def test_a_file_that_does_not_fit_is_refused(packed, tmp_path, assets, tokenizer):
    (tmp_path / "text.txt").write_text("the slot of a step is a pure function of the step and the slot " * 10)
    pack(Pack((tmp_path / "text.txt",), tmp_path / "trained.tokens"), lambda: encoder_for(str(assets)))
    for path, seq_len, sentence in [
        (packed, 1_000_000, r"too few for one row of training.seq_len = 1000000: lower seq_len"),
        (tmp_path / "trained.tokens", 16, r"ids up to \d+, the tokenizer only 258 ids"),
        (tmp_path / "nowhere.tokens", 16, "no token file"),
        (tmp_path, 16, "Is a directory"),
        ("", 16, "data.path is empty"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            open_file(path, tokenizer, seq_len)
    with pytest.raises(ValueError, match=r"the model's vocabulary only 256 ids"):
        open_file(packed, tokenizer).require_vocab(256)


# Damaged.

TAIL = struct.Struct("<Q32s8s")


def parts(data):
    length, _, _ = TAIL.unpack(data[-TAIL.size :])
    return data[: -TAIL.size - length], json.loads(data[-TAIL.size - length : -TAIL.size])


def signed(body, footer):
    """A token file whose footer has the right checksum, whatever it says."""
    text = footer if isinstance(footer, bytes) else json.dumps(footer).encode()
    return body + text + TAIL.pack(len(text), hashlib.sha256(text).digest(), b"evrtokns")


def test_the_damaged_place_is_named(packed):
    data = packed.read_bytes()
    body, footer = parts(data)
    starts_at = len(body) - 8 * (footer["documents"] + 1)
    shifted = body[:starts_at] + body[starts_at + 8 :] + body[-8:]
    for hurt, sentence in [
        (data[:1080] + b"\x07" + data[1081:], "checksum of its tokens 504 to 971 differs"),
        (data[: starts_at + 8] + b"\xff" + data[starts_at + 9 :], "checksum of its document starts differs"),
        (data[:-60] + b"?" + data[-59:], "checksum of its footer differs"),
        (signed(body, footer | {"max_id": 256}), "ids up to 257"),
        (signed(shifted, footer | {"starts_sha256": hashlib.sha256(shifted[starts_at:]).hexdigest()}), "do not rise"),
        *((data[:size], "is (incomplete|no token file)") for size in (0, 63, 64, 100, len(data) // 2, len(data) - 1)),
        (data[:200] + data[208:], "incomplete"),
    ]:
        packed.write_bytes(hurt)
        with pytest.raises(TokenFileError, match=rf"out\.tokens.*{sentence}"):
            verify(packed)


def fuzz_tokens(path, rounds, seed):
    chance = random.Random(seed)
    data = path.read_bytes()
    body, footer = parts(data)
    expected = [np.array(part) for part in map_tokens(path, read_footer(path)[0])]
    target = path.with_name("damaged.tokens")
    for _ in range(rounds):
        text = planted(json.dumps(footer).encode(), chance)
        text = text if chance.random() < 0.9 else damaged(text, chance)
        target.write_bytes(damaged(data, chance, structure=900) if chance.random() < 0.5 else signed(body, text))
        with contextlib.suppress(TokenFileError):
            found = verify(target)
            assert all(map(np.array_equal, map_tokens(target, found), expected))
        # As a trainer opens it, which reads no checksums.
        with contextlib.suppress(ValueError):
            found, _ = read_footer(target)
            rows = Documents(*map_tokens(target, found), max_id=found.max_id)
            for index in range(min(3, rows.rows(16))):
                assert (rows.row(index, 16).inputs <= found.max_id).all()


@pytest.mark.parametrize("rounds", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_token_files_are_refused_or_right(packed, rounds):
    fuzz_tokens(packed, rounds, 1)
