"""Damaged files at the doors of the data: a sentence, never a traceback, a crash, a wait or wrong tokens."""

import contextlib
import gzip
import hashlib
import json
import os
import random
import struct

import numpy as np
import pytest

from everstep.data import inputs, token_format
from everstep.data.documents import Documents
from everstep.data.inputs import InputError
from everstep.data.pack import Pack, pack, run
from everstep.data.token_format import TokenFileError
from everstep.titan.data.encoders import encoder_for

TAIL = struct.Struct("<Q32s8s")


@pytest.fixture
def packed(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": "word " * (n % 7 + 1)}) + "\n" for n in range(60)))
    out = tmp_path / "out.tokens"
    pack([source], out, chunk_tokens=500)
    return out


def parts(data):
    length, _, _ = TAIL.unpack(data[-TAIL.size :])
    return data[: -TAIL.size - length], json.loads(data[-TAIL.size - length : -TAIL.size])


def signed(body, footer):
    """A token file whose footer has the right checksum, whatever it says."""
    text = footer if isinstance(footer, bytes) else json.dumps(footer).encode()
    return body + text + TAIL.pack(len(text), hashlib.sha256(text).digest(), b"evrtokns")


CHANGES = [
    {"dtype": "O"},
    {"dtype": "uint8"},
    {"dtype": None},
    {"tokens": -1},
    {"tokens": 1e400},
    {"tokens": 1 << 70},
    {"documents": -1},
    {"documents": "5"},
    {"chunks": []},
    {"chunks": [[1, "00"]]},
    {"chunks": [[-5, "0" * 64]]},
    {"chunks": {}},
    {"starts_sha256": None},
    {"source": []},
    {"source": {}},
    {"source": {"tokenizer": "bytes"}},
    {"max_id": -1},
    {"max_id": 1 << 40},
    {"max_id": True},
    {"more": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_footer_that_lies_is_refused(packed, change):
    body, footer = parts(packed.read_bytes())
    packed.write_bytes(signed(body, footer | change))
    for door in (token_format.read_footer, token_format.verify, token_format.in_bytes):
        with pytest.raises(TokenFileError, match=r"out\.tokens"):
            door(packed)


def test_starts_and_ids_that_contradict_the_footer_are_refused(packed):
    body, footer = parts(packed.read_bytes())
    packed.write_bytes(signed(body, footer | {"max_id": footer["max_id"] - 1}))
    with pytest.raises(TokenFileError, match="has ids up to"):
        token_format.verify(packed)
    starts_at = len(body) - 8 * (footer["documents"] + 1)
    wrong = body[:starts_at] + body[starts_at + 8 :] + body[-8:]
    packed.write_bytes(signed(wrong, footer | {"starts_sha256": hashlib.sha256(wrong[starts_at:]).hexdigest()}))
    with pytest.raises(TokenFileError, match="do not rise"):
        token_format.verify(packed)


def damaged(data, chance):
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        if not data:
            break
        # Half of it where there is structure.
        at = (
            chance.randrange(max(0, len(data) - 900), len(data))
            if chance.random() < 0.5
            else chance.randrange(len(data))
        )
        match chance.randrange(4):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
            case 2:
                del data[at:]
            case 3:
                data[at : at + 1] = chance.choice([b"[" * 3000, b"9" * 5000, b"NaN", b"-1", b"null", b'"', b"1e999"])
    return bytes(data)


def changed(footer, chance):
    """The footer with one value exchanged for another."""
    footer = json.loads(json.dumps(footer))
    values = [None, True, -1, 0, 1, 1 << 63, 1 << 200, 1.5, "", "O", "uint32", [], {}, [[1, 2]], [[10**9, "0" * 64]]]
    key = chance.choice([*footer, "chunk", "gone", "new"])
    if key == "chunk":
        footer["chunks"][chance.randrange(len(footer["chunks"]))][chance.randrange(2)] = chance.choice(values)
    elif key == "gone":
        del footer[chance.choice([*footer])]
    else:
        footer[key] = chance.choice(values)
    return footer


def fuzz_tokens(path, rounds, seed):
    chance = random.Random(seed)
    data = path.read_bytes()
    body, footer = parts(data)
    good = token_format.map_tokens(path, token_format.read_footer(path)[0])
    expected = [np.array(part) for part in good]
    wrong = 0
    target = path.with_name("damaged.tokens")
    for _ in range(rounds):
        if chance.random() < 0.5:
            hurt = damaged(data, chance)
        else:
            change = changed(footer, chance)
            hurt = signed(body, change if chance.random() < 0.9 else damaged(json.dumps(change).encode(), chance))
        target.write_bytes(hurt)
        try:
            found = token_format.verify(target)
            tokens, starts = token_format.map_tokens(target, found)
        except TokenFileError:
            pass
        else:
            wrong += not (np.array_equal(tokens, expected[0]) and np.array_equal(starts, expected[1]))
        # As a trainer opens it, which reads no checksums.
        with contextlib.suppress(ValueError):
            found, _ = token_format.read_footer(target)
            rows = Documents(*token_format.map_tokens(target, found), max_id=found.max_id)
            for index in range(min(3, rows.rows(16))):
                assert (rows.row(index, 16).inputs <= found.max_id).all()
    assert wrong == 0


def test_damaged_token_files_are_refused_or_right(packed):
    fuzz_tokens(packed, 2000, 1)


@pytest.mark.slow
def test_many_damaged_token_files_are_refused_or_right(packed):
    fuzz_tokens(packed, 50_000, 2)


def fuzz_pack(folder, rounds, seed):
    """Inputs and journals; what is packed in spite of it must verify."""
    chance = random.Random(seed)
    lines = "".join(json.dumps({"text": f"text {n} " * 3}) + "\n" for n in range(20)).encode()
    originals = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines, mtime=0),
        "a.txt.gz": gzip.compress(b"text " * 99),
    }
    clean = {}
    for name, data in originals.items():
        (folder / name).write_bytes(data)
        pack([folder / name], folder / "clean.tokens", chunk_tokens=100)
        clean[name] = (folder / "clean.tokens").read_bytes()
        (folder / "clean.tokens").unlink()
    refused = 0
    for number in range(rounds):
        name = chance.choice([*originals])
        source, out = folder / name, folder / f"{number}.tokens"
        journal = folder / f"{number}.tokens.partial.journal"
        if taken_up := chance.random() < 0.3:
            source.write_bytes(originals[name])
            with contextlib.suppress(KeyboardInterrupt):
                pack([source], out, chunk_tokens=100, on_progress=_interrupt)
            if journal.exists():
                journal.write_bytes(damaged(journal.read_bytes(), chance))
        else:
            source.write_bytes(damaged(originals[name], chance))
        try:
            pack([source], out, chunk_tokens=100, on_bad=lambda error: None)
            token_format.verify(out)
            assert not taken_up or out.read_bytes() == clean[name]
        except ValueError as error:
            refused += 1
            if len(str(error)) > 1200:
                raise
        for left in folder.iterdir():
            left.unlink()
    return refused


def _interrupt(what, done, total):
    raise KeyboardInterrupt


def test_damaged_input_and_journals_are_a_sentence(tmp_path):
    assert fuzz_pack(tmp_path, 2000, 1) > 400


@pytest.mark.slow
def test_much_damaged_input_is_a_sentence(tmp_path):
    assert fuzz_pack(tmp_path, 50_000, 2) > 10_000


def test_a_journal_that_was_changed_is_not_gone_on_with(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out.tokens"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(200)))
    with contextlib.suppress(KeyboardInterrupt):
        pack([source], out, chunk_tokens=100, on_progress=_interrupt)
    journal = tmp_path / "out.tokens.partial.journal"
    text = journal.read_text()
    journal.write_text(text.replace('"left_out":0', '"left_out":7'))
    assert journal.read_text() != text
    with pytest.raises(TokenFileError, match="is damaged"):
        pack([source], out, chunk_tokens=100)


def test_a_pipe_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file"):
        pack([pipe], tmp_path / "out.tokens")
    with pytest.raises(TokenFileError, match="is no file"):
        token_format.read_footer(pipe)
    assert run(Pack(inputs=(pipe,), out=tmp_path / "out.tokens"), encoder_for) == 1


def test_a_link_beside_out_is_not_written_through(tmp_path):
    """As somebody else could have put it into a shared folder."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    source = tmp_path / "a.txt"
    source.write_text("some text")
    (tmp_path / "out.tokens.partial").symlink_to(victim)
    with pytest.raises(TokenFileError, match="no regular file"):
        pack([source], tmp_path / "out.tokens")
    assert victim.read_text() == "precious"


def test_a_bomb_is_refused_before_it_fills_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "LONGEST_DOCUMENT_BYTES", 1 << 20)
    for name in ("bomb.txt.gz", "bomb.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(bytes(64 << 20)))
        with pytest.raises(InputError, match="Cut it into several"):
            pack([tmp_path / name], tmp_path / "out.tokens")


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"9" * 5000, b'{"text": ' + b"[" * 5000, b"\xff\xfe", b"NaN", b'{"text": 1e999}']
)
def test_json_that_no_parser_likes_is_a_bad_document(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(line + b'\n{"text": "good text"}\n')
    bad = []
    assert pack([tmp_path / "a.jsonl"], tmp_path / "out.tokens", on_bad=bad.append).documents == 1
    assert len(bad) == 1
