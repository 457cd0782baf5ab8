"""Text to token ids and back, by the ``tokenizers`` library, and chat messages to prompts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from fp4jax.chat_template import DEFAULT_NAME, ChatTemplate
from fp4jax.checkpoints.hf_config import read_json
from fp4jax.detokenizer import StreamingDetokenizer, check_id
from fp4jax.errors import CheckpointError, TokenizerError

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that a configuration names and a chat template can use."""

ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""What ``added_tokens_decoder`` says of a token besides its text."""


class Tokenizer:
    """The tokenizer of a checkpoint. Immutable.

    Args:
      backend: of the ``tokenizers`` library.
      special_tokens: text of the tokens among :data:`SPECIAL_NAMES` that there are.
      chat: None where the checkpoint has no chat template.
      origin: the checkpoint folder, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat: ChatTemplate | None = None,
        origin: str = "tokenizer",
    ) -> None:
        self._backend = backend
        self._chat = chat
        self._origin = origin
        eos = backend.token_to_id((special_tokens or {}).get("eos_token", ""))
        self._eos = () if eos is None else (eos,)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a checkpoint folder.

        Reads ``tokenizer.json``, the special tokens and added tokens of ``tokenizer_config.json``
        and ``special_tokens_map.json``, and the chat template of ``chat_template.jinja`` or, where
        there is none, of ``tokenizer_config.json``.

        Raises:
          TokenizerError: there is no ``tokenizer.json``, or one of the files is damaged.
        """
        root = Path(path).expanduser()
        file = root / TOKENIZER_NAME
        if not file.is_file():
            raise TokenizerError(_missing(root))
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"{file}: not a usable tokenizer ({error}); download it again"
            ) from error
        # A file may say how to pad or cut batches for training; a prompt is neither.
        backend.no_padding()
        backend.no_truncation()
        try:
            config = read_json(root / TOKENIZER_CONFIG_NAME)
            named = {**read_json(root / SPECIAL_TOKENS_NAME), **config}
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error
        special = _special_tokens(named, root)
        _add_tokens(backend, config, special.values(), root)
        return cls(backend, special, _chat_template(root, config, special), str(root))

    def __repr__(self) -> str:
        return f"Tokenizer({self._origin!r}, vocab_size={self.vocab_size})"

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence id that the tokenizer's configuration names, if it names one."""
        return self._eos

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be given."""
        return self._chat is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens that stand in the text are recognized.

        Args:
          text: any Unicode text.
          add_special_tokens: whether to add what the tokenizer puts around a text, such as BOS.

        Raises:
          TokenizerError: not a string, or one with lone surrogates.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text to encode must be a string, found {text!r:.80}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text to encode is not valid Unicode: {error}") from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. Ids that name no token add nothing.

        Bytes that are not valid UTF-8 become U+FFFD.

        Raises:
          TokenizerError: an id that is not a non-negative integer.
        """
        checked = [check_id(token) for token in ids]
        return self._backend.decode(checked, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = False) -> StreamingDetokenizer:
        """Turns ids into text as they come; see :class:`StreamingDetokenizer`."""
        return StreamingDetokenizer(self._backend, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
          messages: dicts with "role" and "content".
          add_generation_prompt: end with what opens the assistant's turn.
          **kwargs: ``tools``, ``documents`` and whatever else the template reads.

        Raises:
          TokenizerError: no chat template, messages of another form, or a template that fails.
        """
        if self._chat is None:
            raise TokenizerError(
                f"{self._origin}: has no chat template ({CHAT_TEMPLATE_NAME}, or chat_template in "
                f"{TOKENIZER_CONFIG_NAME}); give plain text instead of messages"
            )
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation. Arguments and errors as :meth:`apply_chat_template`.

        The template alone says which special tokens there are, so BOS is not put there twice.
        """
        text = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode(text, add_special_tokens=False)


def _missing(root: Path) -> str:
    if not root.is_dir():
        return f"{root}: no such checkpoint folder"
    message = f"{root}: no tokenizer: {TOKENIZER_NAME} is missing"
    if (root / "tokenizer.model").exists():
        return (
            f"{message}, and tokenizer.model (SentencePiece) is not read; save it as "
            f"{TOKENIZER_NAME} with transformers' AutoTokenizer"
        )
    return f"{message}; copy it from the original model, or use load_model for token ids alone"


def _special_tokens(named: Mapping[str, Any], root: Path) -> dict[str, str]:
    """Text of each named special token, which a file gives as text or as an object."""
    found = {}
    for name in SPECIAL_NAMES:
        value = named.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise TokenizerError(
                f"{root / TOKENIZER_CONFIG_NAME}: {name!r} must be text, found {value!r:.80}"
            )
        found[name] = value
    return found


def _add_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    special: Iterable[str],
    root: Path,
) -> None:
    """Adds what only ``tokenizer_config.json`` says: more tokens, and that some are special."""
    file = root / TOKENIZER_CONFIG_NAME
    try:
        tokens = {
            int(i): tokenizers.AddedToken(
                token["content"], **{name: token[name] for name in ADDED_FLAGS if name in token}
            )
            for i, token in (config.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{file}: unusable added_tokens_decoder ({error!r})") from error
    for i, token in sorted(tokens.items(), key=operator.itemgetter(0)):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != i:
            raise TokenizerError(
                f"{file}: gives {token.content!r} the id {i}, but in {TOKENIZER_NAME} it gets "
                f"{found}; the two files belong to different tokenizers"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [t for t in special if t not in known and backend.token_to_id(t) is not None]
    )


def _chat_template(
    root: Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> ChatTemplate | None:
    variables = tuple(special.items())
    file = root / CHAT_TEMPLATE_NAME
    if file.is_file():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file}: not readable as text ({error})") from error
        return ChatTemplate(((DEFAULT_NAME, text),), str(file), variables)
    stated = config.get("chat_template")
    if stated is None:
        return None
    file = root / TOKENIZER_CONFIG_NAME
    if isinstance(stated, str):
        return ChatTemplate(((DEFAULT_NAME, stated),), str(file), variables)
    try:
        named = tuple((str(entry["name"]), str(entry["template"])) for entry in stated)
    except (KeyError, TypeError) as error:
        raise TokenizerError(
            f"{file}: chat_template must be text or a list of named templates, found {stated!r:.80}"
        ) from error
    return ChatTemplate(named, str(file), variables)
