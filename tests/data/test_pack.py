"""`everstep pack`: the same file whatever interrupts it, and one clear sentence for whatever is wrong."""

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from everstep.data import pack as packing
from everstep.data import token_format
from everstep.data.inputs import InputError
from everstep.data.pack import Pack, pack, run
from everstep.data.token_format import TokenFileError, map_tokens, read_footer, verify
from everstep.titan.data.encoders import encoder_for
from everstep.titan.data.tokens import TokenFile


def texts_in(path, tokenizer):
    footer, _ = read_footer(path)
    tokens, starts = map_tokens(path, footer)
    pairs = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return [tokenizer.decode(tokens[begin:end].tolist()) for begin, end in pairs]


def write_parquet(path, texts, key="text"):
    table = pyarrow.table({"id": list(range(len(texts))), key: pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=7)


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


def test_text_jsonl_and_parquet_give_the_same_documents(tmp_path, documents, tokenizer):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(documents):
        (texts / f"{number:03}.txt").write_text(text)
    lines = "\n\n".join(json.dumps({"text": text, "id": 1}) for text in documents)
    (tmp_path / "lines.jsonl").write_text(lines)
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as file:
        file.write(lines)
    write_parquet(tmp_path / "table.parquet", documents)
    for name in ("texts", "lines.jsonl", "lines.jsonl.gz", "table.parquet"):
        out = tmp_path / f"{name}.tokens"
        footer = pack([tmp_path / name], out)
        assert texts_in(out, tokenizer) == documents
        assert (footer.documents, footer.dtype, footer.max_id) == (60, "uint16", 257)
        verify(out)
        assert not list(tmp_path.glob("*.partial*"))


def test_a_hugging_face_tokenizer_gives_the_ids_that_torchtitan_trains_on(tmp_path, jsonl, assets, documents):
    for name in (assets, assets / "tokenizer.json"):
        out = tmp_path / f"{name.name}.tokens"
        footer = pack([jsonl], out, encoder_of=partial(encoder_for, str(name)))
        tokens, starts = map_tokens(out, footer)
        theirs = HuggingFaceTokenizer(tokenizer_path=str(assets))
        expected = [theirs.encode(text, add_bos=True, add_eos=True) for text in documents]
        assert tokens.tolist() == [token for document in expected for token in document]
        assert np.diff(starts).tolist() == [len(document) for document in expected]
        assert tokens[0] == theirs.bos_id


def test_large_vocabularies_take_four_bytes():
    assert token_format.dtype_for(65536) == "uint16"
    assert token_format.dtype_for(65537) == "uint32"


def test_documents_without_text_are_left_out(tmp_path, tokenizer):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", "one", "", "two", ""]))
    pack([lines], tmp_path / "out.tokens")
    assert texts_in(tmp_path / "out.tokens", tokenizer) == ["one", "two"]


# Interrupted.

PACK = """
import sys, time
from pathlib import Path
from everstep.data.pack import pack
inputs = [Path(name) for name in sys.argv[2:]]
pack(inputs, Path(sys.argv[1]), chunk_tokens=16000, on_progress=lambda *_: time.sleep(0.02))
"""
"""Slow enough to be killed between chunks on a machine that has other things to do."""


@pytest.fixture
def corpus(tmp_path):
    """Three kinds of input, long enough to be killed in each of them."""
    random = np.random.default_rng(0)
    words = np.array(["slot", "ledger", "quorum", "keeper", "group", "Zeichen ü"])
    texts = [" ".join(words[random.integers(0, len(words), count)]) for count in random.integers(1, 300, 1200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:400]))
    write_parquet(tmp_path / "b.parquet", texts[400:800])
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts[800:1199]))
    (tmp_path / "d.txt").write_text(texts[1199])
    return [tmp_path / name for name in ("a.jsonl", "b.parquet", "c.jsonl.gz", "d.txt")]


def test_killed_again_and_again_it_makes_the_same_file(tmp_path, corpus):
    whole, out = tmp_path / "whole.tokens", tmp_path / "out.tokens"
    footer = pack(corpus, whole, chunk_tokens=16000)
    assert len(footer.chunks) > 25
    journal = tmp_path / "out.tokens.partial.journal"
    kills, lines_before = 0, 0

    def lines():
        try:
            return journal.read_bytes().count(b"\n")
        except FileNotFoundError:  # not begun, or just finished
            return 0

    while not out.exists():
        process = subprocess.Popen([sys.executable, "-c", PACK, out, *corpus])
        # Let it write some chunks, then kill it in whatever it does.
        while process.poll() is None:
            if lines() >= lines_before + 5 and kills < 5:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.0005)
        assert process.wait() in (0, -signal.SIGKILL)
        lines_before = lines()
    assert kills >= 3
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("out.tokens.partial*"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None)
@given(data=st.data())
def test_a_crash_at_any_point_leaves_what_the_next_run_completes(tmp_path_factory, corpus, data):
    folder = tmp_path_factory.mktemp("crash")
    out = folder / "out.tokens"
    whole = corpus[0].with_name("uninterrupted.tokens")
    if not whole.exists():
        pack(corpus, whole, chunk_tokens=100000)

    class CrashError(Exception):
        pass

    chunks_left = data.draw(st.integers(0, 5), "chunks")

    def crash(what, done, total):
        nonlocal chunks_left
        if chunks_left == 0 and (what == "packing" or done == total):
            raise CrashError
        chunks_left -= what == "packing"

    with pytest.raises(CrashError):
        pack(corpus, out, chunk_tokens=100000, on_progress=crash)
    for suffix in (".partial", ".partial.starts"):
        with open(f"{out}{suffix}", "ab") as file:
            file.write(data.draw(st.binary(max_size=40), suffix))
    with open(f"{out}.partial.journal", "r+b") as file:
        # The last line, whole or not, may not have reached the disk.
        lines = file.read().splitlines(keepends=True)
        kept = data.draw(st.integers(0, len(lines[-1])), "bytes of the last line")
        file.truncate(sum(map(len, lines[:-1])) + kept)
    pack(corpus, out, chunk_tokens=100000)
    assert out.read_bytes() == whole.read_bytes()


# Refused.


def test_a_finished_file_is_kept_and_never_overwritten_by_other_input(tmp_path, jsonl, documents, assets):
    out = tmp_path / "out.tokens"
    pack([jsonl], out)
    made = (out.stat().st_mtime_ns, out.read_bytes())
    pack([jsonl], out)
    assert (out.stat().st_mtime_ns, out.read_bytes()) == made
    with pytest.raises(TokenFileError, match="already made, from other input or with another tokenizer"):
        pack([jsonl], out, encoder_of=lambda: encoder_for(str(assets)))
    jsonl.write_text(json.dumps({"text": "other"}))
    with pytest.raises(TokenFileError, match="already made"):
        pack([jsonl], out)
    assert out.read_bytes() == made[1]
    (tmp_path / "letter.tokens").write_text("Dear reader")
    with pytest.raises(TokenFileError, match="is no token file"):
        pack([jsonl], tmp_path / "letter.tokens")


def test_what_was_begun_from_other_input_is_not_continued(tmp_path, jsonl):
    out = tmp_path / "out.tokens"
    with packing._Partial(out, {"inputs": []}, "uint16") as partial:
        partial.append([np.array([1, 2])], packing.Place(), 0)
    with pytest.raises(TokenFileError, match="begun from other input"):
        pack([jsonl], out)


def test_two_packs_of_one_file_do_not_mix(tmp_path, jsonl):
    with open(tmp_path / "out.tokens.partial.journal", "ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(TokenFileError, match="another `everstep pack` is writing"):
            pack([jsonl], tmp_path / "out.tokens")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "bad.jsonl",
            b'{"text": "a"}\n{"text": \n',
            r"bad.jsonl:2: not JSON \(Expecting value at column 9\)",
        ),
        ("bad.jsonl", b'\n{"body": "a", "id": 1}\n', r"bad.jsonl:2: no key 'text' \(there: 'body', 'id'\)"),
        ("bad.jsonl", b'{"text": 7}\n', "bad.jsonl:1: 'text' holds int, not text"),
        ("bad.jsonl", b'["text"]\n', "bad.jsonl:1: a JSON object with the key 'text' is needed"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "bad.jsonl:2: not UTF-8"),
        (
            "bad.jsonl",
            b'{"text": "a\\ud800"}\n',
            "bad.jsonl:1: 'text' has half a surrogate pair at character 1",
        ),
        ("bad.txt", b"fine\nnot \xe9\n", "bad.txt:2: byte 0xe9 is not UTF-8"),
        ("bad.parquet", b"PAR1 and then nothing", "bad.parquet: not readable as parquet"),
        (
            "bad.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:-12],
            "bad.jsonl.gz:[0-9]+: the gzip data is damaged",
        ),
        ("empty.txt", b"", "no document with text in .*empty.txt"),
        ("empty.jsonl", b"\n", "no document with text in .*empty.jsonl"),
    ],
)
def test_bad_input_is_named_by_file_and_line(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        pack([tmp_path / name], tmp_path / "out.tokens")
    assert not (tmp_path / "out.tokens").exists()


def test_bad_parquet_columns_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", "b"], key="body")
    with pytest.raises(InputError, match=r"no column 'text' \(there: id, body\)"):
        pack([tmp_path / "a.parquet"], tmp_path / "out.tokens")
    with pytest.raises(InputError, match=r"a.parquet: row 1: 'id' holds int, not text"):
        pack([tmp_path / "a.parquet"], tmp_path / "out.tokens", text_key="id")
    write_parquet(tmp_path / "b.parquet", ["a"] * 10 + [None])
    with pytest.raises(InputError, match=r"b.parquet: row 11: 'text' holds NoneType, not text"):
        pack([tmp_path / "b.parquet"], tmp_path / "out.tokens")


def test_a_run_that_stopped_at_a_bad_document_goes_on_without_it(tmp_path, tokenizer, capsys):
    lines, out = tmp_path / "lines.jsonl", tmp_path / "out.tokens"
    lines.write_text('{"text": "one"}\n{"text": 2}\n{"text": "three"}\n')
    assert run(Pack(inputs=(lines,), out=out), encoder_for) == 2
    assert "lines.jsonl:2: 'text' holds int, not text. Or add --skip-bad" in capsys.readouterr().err
    assert run(Pack(inputs=(lines,), out=out, skip_bad=True), encoder_for) == 0
    said = capsys.readouterr().err
    assert "lines.jsonl:2: 'text' holds int" in said
    assert "2 documents, 1 left out" in said
    assert texts_in(out, tokenizer) == ["one", "three"]
    write_parquet(tmp_path / "b.parquet", ["a"] * 10 + [None])
    (tmp_path / "c.txt").write_bytes(b"\xff")
    out = tmp_path / "other.tokens"
    footer = pack([tmp_path / "b.parquet", tmp_path / "c.txt"], out, on_bad=print)
    assert (footer.documents, footer.left_out) == (10, 2)


def test_input_repaired_before_anything_was_packed_is_packed(tmp_path, tokenizer):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": 2}\n')
    with pytest.raises(InputError, match=":1:"):
        pack([lines], tmp_path / "out.tokens")
    lines.write_text('{"text": "2"}\n')
    pack([lines], tmp_path / "out.tokens")
    assert texts_in(tmp_path / "out.tokens", tokenizer) == ["2"]


def test_missing_things_are_named(tmp_path, jsonl, capsys):
    (tmp_path / "empty").mkdir()
    for inputs, sentence in [
        ([tmp_path / "nowhere"], "no input file .*nowhere"),
        ([tmp_path / "empty"], "empty holds no .txt"),
        ([], "no input: name text"),
    ]:
        with pytest.raises(InputError, match=sentence):
            pack(inputs, tmp_path / "out.tokens")
    with pytest.raises(ValueError, match="no tokenizer 'gpt9'"):
        pack([jsonl], tmp_path / "out.tokens", encoder_of=lambda: encoder_for("gpt9"))
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="empty cannot be loaded"):
        pack([jsonl], tmp_path / "out.tokens", encoder_of=lambda: encoder_for(str(tmp_path / "empty")))


@pytest.fixture
def token_file(tmp_path, jsonl):
    pack([jsonl], tmp_path / "documents.tokens", chunk_tokens=300)
    return tmp_path / "documents.tokens"


def open_file(path, tokenizer, seq_len=16):
    place = {"dp_world_size": 1, "dp_rank": 0, "seq_len": seq_len, "local_batch_size": 1}
    return TokenFile.Config(path=str(path)).build(tokenizer=tokenizer, **place)


def test_a_file_cut_off_anywhere_is_refused(token_file, tokenizer):
    data = token_file.read_bytes()
    for size in (0, 63, 64, 100, len(data) // 2, len(data) - 1):
        token_file.write_bytes(data[:size])
        with pytest.raises(TokenFileError, match=r"documents.tokens is (incomplete|no token file)"):
            open_file(token_file, tokenizer)
    token_file.write_bytes(data[:200] + data[208:])
    with pytest.raises(TokenFileError, match="incomplete"):
        open_file(token_file, tokenizer)
    token_file.write_bytes(data[:-60] + b"?" + data[-59:])
    with pytest.raises(TokenFileError, match="checksum of its footer differs"):
        open_file(token_file, tokenizer)


def test_one_changed_byte_is_found_and_its_place_named(token_file):
    footer, _ = read_footer(token_file)
    (first, _), (second, _) = footer.chunks[:2]
    with open(token_file, "r+b") as file:
        file.seek(64 + 2 * first + 10)
        file.write(b"\x07")
    with pytest.raises(TokenFileError, match=f"checksum of its tokens {first} to {second - 1} differs"):
        verify(token_file)
    with open(token_file, "r+b") as file:
        file.seek(64 + 2 * first + 10)
        file.write(b"\x07")
        file.seek(footer.starts_at + 8)
        file.write(b"\x01")


def test_changed_document_starts_are_found(token_file):
    footer, _ = read_footer(token_file)
    with open(token_file, "r+b") as file:
        file.seek(footer.starts_at + 8)
        file.write(b"\xff")
    with pytest.raises(TokenFileError, match="checksum of its document starts differs"):
        verify(token_file)


def test_a_file_that_does_not_fit_is_refused(token_file, tmp_path, assets, tokenizer):
    with pytest.raises(ValueError, match=r"too few for one row of training.seq_len = 1000000: lower seq_len"):
        open_file(token_file, tokenizer, seq_len=1_000_000)
    text = tmp_path / "text.txt"
    text.write_text("the slot of a step is a pure function of the step and the slot " * 10)
    pack([text], tmp_path / "trained.tokens", encoder_of=lambda: encoder_for(str(assets)))
    with pytest.raises(TokenFileError, match=r"ids up to \d+, the tokenizer only 258 ids"):
        open_file(tmp_path / "trained.tokens", tokenizer)
    with pytest.raises(ValueError, match=r"the model's vocabulary only 256 ids"):
        open_file(token_file, tokenizer).require_vocab(256)
    for path, sentence in [("nowhere.tokens", "no token file"), (".", "is a directory")]:
        with pytest.raises(TokenFileError, match=sentence):
            open_file(tmp_path / path, tokenizer)
    with pytest.raises(TokenFileError, match=r"data.path is empty"):
        TokenFile.Config().build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=4, local_batch_size=1)


def test_the_command_reports_in_sentences_and_exit_codes(tmp_path, jsonl, capsys):
    out = tmp_path / "out.tokens"
    assert run(Pack(inputs=(jsonl,), out=out), encoder_for) == 0
    assert "is made and checked: 60 documents" in capsys.readouterr().err
    assert run(Pack(inputs=(jsonl,), out=out), encoder_for) == 0
    assert "was already made" in capsys.readouterr().err
    assert run(Pack(out=out, verify=True), encoder_for) == 0
    assert "is whole: 60 documents" in capsys.readouterr().err
    assert run(Pack(inputs=(tmp_path / "nowhere",), out=out), encoder_for) == 2
    assert capsys.readouterr().err.startswith("everstep pack: no input file")
    os.truncate(out, 500)
    assert run(Pack(out=out, verify=True), encoder_for) == 2
    assert "is incomplete" in capsys.readouterr().err


def test_the_command_needs_no_torch_to_pack_bytes(tmp_path, jsonl):
    code = (
        "import sys; from pathlib import Path; from everstep.data.pack import Pack, run;"
        "from everstep.titan.data.encoders import encoder_for;"
        f"status = run(Pack(inputs=(Path({str(jsonl)!r}),), out=Path({str(tmp_path / 'out.tokens')!r})), encoder_for);"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
