"""`everstep pack` makes the same file after any interruption, and reports each error in one clear sentence."""

import contextlib
import gzip
import hashlib
import json
import random
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from damage import damaged, planted
from everstep.data.byte_ids import BYTES
from everstep.data.documents import Documents
from everstep.data.pack import pack
from everstep.data.token_format import DataError, map_tokens, read_footer, verify
from everstep.titan.data.encoders import encoder_for


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
    """A model directory with a small trained tokenizer that does not add BOS and EOS itself."""
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the slot of a step is a pure function of the step and the slot"] * 50, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return directory


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.tokens"


@pytest.fixture
def packed(tmp_path, out):
    """A token file in two chunks, whose checksum one test compares with a constant."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "word " * (n % 7)}) + "\n" for n in range(60)))
    pack((tmp_path / "in.jsonl",), out, chunk_tokens=500)
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
    (tmp_path / "written" / "by-spark.parquet").mkdir(parents=True)
    write_parquet(tmp_path / "written" / "by-spark.parquet" / "part-0.parquet", documents)
    for name in ("texts", "lines.jsonl", "lines.jsonl.gz", "table.parquet", "written"):
        out = tmp_path / f"{name}.tokens"
        footer = pack((tmp_path / name,), out)
        assert texts_in(out, tokenizer) == documents
        assert (footer.documents, footer.dtype, footer.max_id) == (60, "uint16", 257)
        verify(out)
    assert not list(tmp_path.glob("*.partial*"))


def test_lines_of_any_further_keys_in_a_file_of_any_name_are_read(tmp_path, documents, tokenizer, out):
    """The input also has text that some readers convert to a date, a byte order mark, and empty lines."""
    lines = [
        json.dumps({"text": text} | ({"meta": number} if number % 3 else {})) for number, text in enumerate(documents)
    ]
    lines = [json.dumps({"text": "2020-01-01", "meta": "text"}), "", *lines, "", ""]
    path = tmp_path / "part[0]::a*.jsonl"
    path.write_text("\n".join(lines), "utf-8-sig")
    (tmp_path / "part[0]::ab.jsonl").write_text('{"text": "not named"}')
    pack((path,), out)
    assert texts_in(out, tokenizer) == ["2020-01-01", *documents]


@pytest.mark.parametrize("pads", [False, True])
def test_a_hugging_face_tokenizer_gives_the_ids_that_torchtitan_trains_on(jsonl, assets, documents, out, pads):
    model = shutil.copytree(assets, out.with_name("model"))
    if pads:  # as Hugging Face saves a tokenizer that was used so; no document may be padded or cut
        saved = Tokenizer.from_file(str(model / "tokenizer.json"))
        saved.enable_padding()
        saved.enable_truncation(4)
        saved.save(str(model / "tokenizer.json"))
    footer = pack((jsonl,), out, encoder_for(str(model / "tokenizer.json")))
    tokens, starts = map_tokens(out, footer)
    theirs = HuggingFaceTokenizer(tokenizer_path=str(assets))
    expected = [theirs.encode(text, add_bos=True, add_eos=True) for text in documents]
    assert tokens.tolist() == [token for document in expected for token in document]
    assert np.diff(starts).tolist() == [len(document) for document in expected]
    for size, dtype in ((65536, "uint16"), (65537, "uint32")):
        assert pack((jsonl,), out.with_name(str(size)), replace(BYTES, vocab_size=size)).dtype == dtype


PACK = """
import itertools, os, signal, sys
from pathlib import Path
from everstep.data.pack import pack
left = itertools.count(-2)
inputs = tuple(Path(name) for name in sys.argv[2:])
pack(inputs, Path(sys.argv[1]),
     tell=lambda _: next(left) or os.kill(os.getpid(), signal.SIGKILL), chunk_tokens=60000)
"""


@pytest.fixture
def corpus(tmp_path):
    chance = np.random.default_rng(0)
    words = np.array(["slot", "ledger", "quorum", "keeper", "group", "Zeichen ü"])
    texts = [" ".join(words[chance.integers(0, len(words), count)]) for count in chance.integers(1, 300, 1200)]
    write_lines(tmp_path / "a.jsonl", texts[:400])
    write_parquet(tmp_path / "b.parquet", texts[400:800])
    write_lines(tmp_path / "c.jsonl.gz", texts[800:1199])
    (tmp_path / "d.txt").write_text(texts[1199])
    return tuple(tmp_path / name for name in ("a.jsonl", "b.parquet", "c.jsonl.gz", "d.txt"))


def begun(out):
    return next(out.parent.glob("out.tokens.*.partial"))


def test_killed_and_with_half_a_chunk_it_makes_the_same_file_and_nothing_anew_in_silence(tmp_path, corpus, out):
    whole = tmp_path / "whole.tokens"
    assert len(pack(corpus, whole, chunk_tokens=60000).chunks) > 10
    assert subprocess.run([sys.executable, "-c", PACK, out, *corpus]).returncode == -signal.SIGKILL
    for name in ("tokens", "starts", "footer.draft"):  # as after a power failure
        with (begun(out) / name).open("ab") as file:
            file.write(b"half of it")
    made = iter(range(3))
    with pytest.raises(StopIteration):
        pack(corpus, out, tell=lambda _: next(made), chunk_tokens=60000)
    kept = shutil.copytree(begun(out), tmp_path / "kept")
    for name, filler in (("tokens", b""), ("tokens", b"?"), ("footer", b"")):
        data = (kept / name).read_bytes()
        (begun(out) / name).write_bytes(data[:99] + filler * (len(data) - 99))
        with pytest.raises(DataError, match=f"{name} is .*: remove .*partial to start again"):
            pack(corpus, out, chunk_tokens=60000)
        shutil.copytree(kept, begun(out), dirs_exist_ok=True)
    told = []
    pack(corpus, out, tell=told.append, chunk_tokens=60000)
    assert len(told) == len(read_footer(whole)[0].chunks) - 7, "what was there is not made again"
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("out.tokens.*"))


@pytest.mark.parametrize(("name", "content", "sentence"), [
    ("bad.jsonl", b'{"text": "a"}\n7\n', r"bad.jsonl: not readable as json after 1 documents"),
    ("bad.jsonl", b'{"body": "a", "id": 1}\n', "document 1 has no key 'text'; its keys are 'body', 'id'"),
    ("bad.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "bad.jsonl: "),
    ("bad.jsonl", b'{"text": 7}\n', "bad.jsonl: document 1: 'text' holds int, not text"),
    ("bad.txt", b"fine\nnot \xe9\n", "bad.txt: not readable as text"),
    ("bad.parquet", b"PAR1 and then nothing", "bad.parquet: not readable as parquet"),
    ("bad.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12], "bad.jsonl.gz: "),
    ("empty.txt", b"", "no document with text in .*empty.txt"),
])  # fmt: skip
def test_bad_input_is_named(tmp_path, jsonl, out, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        pack((tmp_path / name,), out)
    assert not out.exists()
    pack((jsonl,), out, tell=(told := [str(caught.value)]).append)
    assert all(str(left) in told[0] and str(left) in told[-1] for left in tmp_path.glob("*.partial"))


def test_pack_overwrites_nothing_but_a_complete_token_file(corpus, packed):
    foreign, folder = packed.with_name("foreign"), packed.with_name("folder")
    foreign.write_bytes(b"other")
    folder.mkdir()
    packed.write_bytes(packed.read_bytes()[:-9])
    for out in (packed, foreign, folder):
        with pytest.raises(DataError, match="is not a complete token file: choose another --out, or delete it"):
            pack(corpus, out)


TAIL = struct.Struct("<Q32s8s")


def signed(body, footer):
    """Return a token file whose footer has any content and the right checksum."""
    return body + footer + TAIL.pack(len(footer), hashlib.sha256(footer).digest(), b"evrtokns")


@pytest.mark.parametrize("rounds", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_token_files_are_refused_or_right(packed, rounds):
    chance, data = random.Random(1), packed.read_bytes()
    end = len(data) - TAIL.size
    begin = end - TAIL.unpack(data[end:])[0]
    expected = [np.array(part) for part in map_tokens(packed, read_footer(packed)[0])]
    target, said = packed.with_name("damaged.tokens"), set()
    for _ in range(rounds):
        text = planted(data[begin:end], chance)
        text = text if chance.random() < 0.9 else damaged(text, chance)
        hurt = damaged(data, chance, structure=900) if chance.random() < 0.5 else signed(data[:begin], text)
        target.write_bytes(hurt)
        with contextlib.suppress(DataError):
            found = verify(target)
            assert all(map(np.array_equal, map_tokens(target, found), expected))
        try:  # as a trainer opens it, without comparing checksums
            found, _ = read_footer(target)
            rows = Documents(*map_tokens(target, found), found.max_id, str(target))
            for index in range(min(3, rows.rows(16))):
                assert (rows.row(index, 16)[0] <= found.max_id).all()
        except ValueError as error:
            said.add(str(target) in str(error))
    assert said == {True}, "each names the file"
