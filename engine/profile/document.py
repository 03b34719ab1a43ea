"""YAML files to typed, frozen values; every error names the file, the line, the key and what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import yaml

MAX_BYTES = 4 << 20

T = TypeVar("T")

# libyaml reads a cluster of a thousand nodes in a tenth of the time; both give the same nodes and marks.
if TYPE_CHECKING:
    from yaml import SafeLoader as _SafeLoader
else:
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ProfileError(Exception):
    """A profile that cannot be used. The text is a sentence for the person who wrote the file."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every profile value: immutable, and no key that it does not know."""


class _Loader(_SafeLoader):
    """SafeLoader that refuses a key given twice, which plain YAML would let the second one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", key.start_mark)
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def load(path: Path, kind: type[T]) -> T:
    """Read `path` as a `kind` (a Record type); raise ProfileError with file, line and key."""
    return decode(_read(path), kind, str(path))


def decode(text: str, kind: type[T], label: str) -> T:
    """Decode YAML `text` as a `kind`; `label` names the source in errors."""
    root, data = _parsed(text, label)
    if root is None:
        raise ProfileError(f"{label}: the file is empty; {_expected_keys(kind)}.")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ProfileError(_explain(str(error), root, kind, label)) from None
    except RecursionError:
        raise ProfileError(f"{label}: the file refers to itself (a YAML alias inside its own anchor).") from None


def load_plain(path: Path) -> Any:
    """The lists, mappings and scalars of a YAML file whose keys are its writer's own; None of an empty file."""
    return _parsed(_read(path), str(path))[1]


def _parsed(text: str, label: str) -> tuple[yaml.Node | None, Any]:
    """The nodes of `text`, which know their lines, and the data that they stand for."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return root, loader.construct_document(root) if root is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{label}:{mark.line + 1}" if mark else label
        raise ProfileError(f"{where}: this is not valid YAML: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ProfileError(f"{label}: this is not valid YAML: {_one_line(error)}.") from None
    except (AttributeError, LookupError, TypeError):  # what PyYAML does with `!!timestamp noon`, `!!bool maybe`
        raise ProfileError(f"{label}: this is not valid YAML: a tag (!!…) does not fit its value.") from None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ProfileError(f"{path}: the file is larger than {MAX_BYTES >> 20} MiB; this is not a profile.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: is not UTF-8 text (byte {error.start}).") from None


def _explain(message: str, root: yaml.Node, kind: type, label: str) -> str:
    """Turn msgspec's message, which ends in a path such as `$.nodes[0].u`, into a sentence with a line."""
    text, _, where = message.partition(" - at `$")
    steps = _steps(where.rstrip("`"))
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", text)
    if unknown:
        name = unknown.group(1)
        known = _fields(msgspec.inspect.type_info(kind), steps)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}."
        return f"{label}:{_line(root, [*steps, name])}: {_dotted([*steps, name])}: unknown key; {hint}"
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if missing:
        place = _dotted(steps) or "this file"
        return f"{label}:{_line(root, steps)}: {place}: the key '{missing.group(1)}' is missing."
    enum = re.fullmatch(r"Invalid enum value (.*)", text)
    if enum:
        known = _choices(msgspec.inspect.type_info(kind), steps)
        text = f"{enum.group(1)} is not one of {', '.join(known)}"
    return f"{label}:{_line(root, steps)}: {_dotted(steps) or 'this file'}: {plain(text)}."


def plain(text: str) -> str:
    """msgspec's type names in the words of somebody who writes YAML."""
    words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
    words |= {"object": "a mapping (key: value)", "array": "a list", "null": "nothing"}
    text = re.sub(r"`(\w+)`", lambda m: words.get(m.group(1), m.group(0)), text)
    text = re.sub(r"`([^`]*)`", lambda m: " or ".join(words.get(w, w) for w in m.group(1).split(" | ")), text)
    return text[:1].lower() + text[1:]


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        steps.append(name if name else (int(index) if index.isdigit() else index))
    return steps


def _dotted(steps: Sequence[str | int]) -> str:
    text = "".join(f"[{s}]" if isinstance(s, int) or s == "..." else f".{s}" for s in steps)
    return text.removeprefix(".")


def _line(node: yaml.Node, steps: Sequence[str | int]) -> int:
    """The line of the deepest part of `steps` that exists; a mapping's key counts, not its value."""
    line = node.start_mark.line
    for step in steps:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == step), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line
        else:
            break
    return int(line) + 1


def _descend(info: Any, steps: Sequence[str | int]) -> Any:
    for step in steps:
        info = _not_none(info)
        if isinstance(info, msgspec.inspect.StructType):
            info = next((f.type for f in info.fields if f.encode_name == step), None)
        elif isinstance(info, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)):
            info = info.item_type
        elif isinstance(info, msgspec.inspect.DictType):
            info = info.value_type
        else:
            return None
    return _not_none(info)


def _not_none(info: Any) -> Any:
    if isinstance(info, msgspec.inspect.UnionType):
        return next((t for t in info.types if not isinstance(t, msgspec.inspect.NoneType)), None)
    return info


def _fields(info: Any, steps: Sequence[str | int]) -> list[str]:
    found = _descend(info, steps)
    return [f.encode_name for f in found.fields] if isinstance(found, msgspec.inspect.StructType) else []


def _choices(info: Any, steps: Sequence[str | int]) -> list[str]:
    found = _descend(info, steps)
    return [str(v) for v in found.values] if isinstance(found, msgspec.inspect.LiteralType) else []


def _expected_keys(kind: type) -> str:
    return "it needs the keys " + ", ".join(_fields(msgspec.inspect.type_info(kind), []))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
