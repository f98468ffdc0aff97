"""A tokenizer of a few hundred tokens in the shape of Qwen3's, made on the spot: nothing is fetched from a hub.

Byte-level BPE, so that every text and every byte survives; the special tokens and tool-call tags of Qwen3; a chat
template in its format (chat_template.jinja). The folder is a checkpoint as far as a rollout reads one: there are no
weights.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TURN = "<|im_end|>"

_SPECIAL = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]
_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_CORPUS = [
    "system user assistant You are a helpful assistant that can interact with a computer",
    'bash {"name": "bash", "arguments": {"command": "git diff -- src/module.py > patch.txt && cat patch.txt"}}',
    "<returncode>0</returncode> <output> self return import def class test passed failed in the repository",
]
_VOCABULARY = 400
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def make_checkpoint(folder: Path) -> Path:
    """Write tokenizer and configuration of a model that does not exist.

    Args:
        folder: made when missing.

    Returns:
        The folder, for ``--hf-checkpoint``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=alphabet, special_tokens=_SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))

    _write(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=END_OF_TURN,
        pad_token=_SPECIAL[0],
        clean_up_tokenization_spaces=False,
        chat_template=_TEMPLATE.read_text(),
    )
    _write(
        folder / "config.json", architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=_VOCABULARY + 100
    )
    return folder


def _write(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content, indent=1))
