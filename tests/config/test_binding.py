"""Which data component, and which tokenizer, `[data]` means."""

from everstep.data.pack import Pack, pack
from everstep.titan.data.binding import bind_data, check_files
from everstep.titan.data.byte_tokenizer import ByteTokenizer
from everstep.titan.data.stdlib_text import StdlibText
from everstep.titan.data.streams import SlotStreams
from everstep.titan.data.tokens import TokenFile


def test_the_bundled_text_brings_its_tokenizer(load):
    config = load('[data]\nsource = "stdlib"\n')
    check_files(config)
    bind_data(config)
    assert isinstance(config.dataloader, StdlibText.Config)
    assert isinstance(config.tokenizer, ByteTokenizer.Config)


def test_a_token_file_packed_in_bytes_needs_no_tokenizer_folder(load, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("enough to read " * 200)
    packed = tmp_path / "corpus.tokens"
    pack(Pack((text,), packed))
    config = load(f'[data]\nsource = "tokens"\npath = "{packed}"\n')
    config.hf_assets_path = str(tmp_path)
    check_files(config)
    bind_data(config)
    assert isinstance(config.dataloader, TokenFile.Config)
    assert isinstance(config.tokenizer, ByteTokenizer.Config)


def test_any_other_dataloader_is_read_by_slot_once(load):
    config = load("[fault_tolerance]\nenable = true\n[training]\nglobal_batch_size = 8\ndisable_cuda_graphs = true\n")
    base = config.dataloader
    bind_data(config)
    bind_data(config)
    assert isinstance(config.dataloader, SlotStreams.Config)
    assert config.dataloader.base is base
