"""Small stand-ins for the files that torchtitan's recipes read from its repository, which its wheel does not have."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

SCHEDULE = """\
0F0,0F1,2F0,2F1,0F2,0F3,2F2,2F3,2B0,2B1,2B2,2B3,0B0,0B1,0B2,0B3
,1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3,3B0,3B1,3B2,3B3,1B0,1B1,1B2,1B3
"""
"""Of two ranks with two stages each and four microbatches: a row a rank, an action a column."""


def write_assets(folder):
    """tests/assets below `folder`, as torchtitan's repository has it."""
    assets = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test", "sft_test"):
        (assets / name).mkdir(parents=True, exist_ok=True)
    texts = [f"Document {number} counts to {number * 7}, and that is all there is to it. " * 4 for number in range(200)]
    lines = [json.dumps({"text": text}) for text in texts]
    (assets / "c4_test" / "data.json").write_text("\n".join(lines) + "\n")
    questions = [{"question": f"{a} + {a + 3}?", "answer": f"It is {2 * a + 3}."} for a in range(400)]
    (assets / "sft_test" / "data.json").write_text(json.dumps(questions))
    (assets / "custom_schedule.csv").write_text(SCHEDULE)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": CHAT}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
