"""Chat templates: Jinja text of a checkpoint that turns messages into a prompt.

Templates come with downloaded weights, so they run in Jinja's immutable sandbox and see plain
JSON values only. What they may rely on (block trimming, ``tojson``, ``raise_exception``,
``strftime_now``, loop controls, the ``generation`` tag) is what Hugging Face's
``apply_chat_template`` gives them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from fp4jax.errors import TokenizerError

DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The templates of one checkpoint.

    Attributes:
      named: (name, Jinja text); a single template is called "default".
      origin: the file they come from, for messages.
      variables: (name, value) of the special tokens that every template can use (``bos_token``…).
    """

    named: tuple[tuple[str, str], ...]
    origin: str
    variables: tuple[tuple[str, str], ...] = ()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt.

        Args:
          messages: dicts with "role" and "content" (text or a list of content blocks), or with
            "role" and "tool_calls"; values are plain JSON.
          add_generation_prompt: end with what opens the assistant's turn.
          tools: JSON schemas of functions; a template named "tool_use" is taken where there is one.
          documents: for retrieval templates.
          **variables: more names for the template, such as ``enable_thinking``.

        Raises:
          TokenizerError: messages of another form, a template that is not valid, or one that
            refuses these messages.
        """
        variables = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        plain = {name: _plain(name, value) for name, value in variables.items()}
        chat = plain_messages(messages)
        text = self._text(tools is not None)
        try:
            template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"{self.origin}: the chat template is not valid Jinja "
                f"(line {error.lineno}: {error.message})"
            ) from error
        try:
            return template.render({**dict(self.variables), **plain, "messages": chat})
        except Exception as error:  # a template can raise anything, not only Jinja's own errors
            raise TokenizerError(
                f"{self.origin}: the chat template refuses these messages: {error}"
            ) from error

    def _text(self, tools: bool) -> str:
        named = dict(self.named)
        if tools and TOOL_NAME in named:
            return named[TOOL_NAME]
        if DEFAULT_NAME in named:
            return named[DEFAULT_NAME]
        raise TokenizerError(
            f"{self.origin}: none of its chat templates ({', '.join(sorted(named))}) is named "
            f"{DEFAULT_NAME!r}"
        )


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of ``messages`` as plain JSON values, fields that are None left out.

    Raises:
      TokenizerError: not a non-empty list of messages; the message at fault is named.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f"messages must be a list of dicts with 'role' and 'content', found {messages!r:.80}"
        )
    if not messages:
        raise TokenizerError("messages is empty; a chat needs at least one message")
    return [_plain_message(i, message) for i, message in enumerate(messages)]


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise TokenizerError(
            f"{where} must be a dict with 'role' and 'content', found {message!r:.80}"
        )
    plain = _plain(where, {k: v for k, v in message.items() if v is not None})
    if not isinstance(plain.get("role"), str):
        raise TokenizerError(f"{where} needs 'role', a string, found {message.get('role')!r:.80}")
    content = plain.get("content")
    if content is None and "tool_calls" not in plain:
        raise TokenizerError(f"{where} needs 'content', a string or a list of content blocks")
    if content is not None and not isinstance(content, (str, list)):
        raise TokenizerError(
            f"{where}: 'content' must be a string or a list of content blocks, found "
            f"{content!r:.80}"
        )
    return plain


def _plain(name: str, value: Any) -> Any:
    """A copy made of JSON values alone: a template must not get hold of live objects."""
    try:
        return json.loads(json.dumps(value, default=_mapping))
    except (TypeError, ValueError) as error:
        raise TokenizerError(f"{name} must hold plain JSON values ({error})") from None


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not one")


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}``, which marks text to train on: just its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
