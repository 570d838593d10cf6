"""Write the conversations that the demo reads: make_demo_conversations.py [FILE]

The sources are the YAML files in demo_sources, beside this script:

corpus.yaml   selects dialogues from the PyPI package chatterbot-corpus 1.3.3
              (Copyright (c) 2017, Gunther Cox; BSD-3-Clause)
stdlib.yaml   asks about Python's standard library and is answered by its docstrings and source code
              (Copyright (c) 2001-2023 Python Software Foundation; PSF License Version 2)
written.yaml  holds conversations written for Statetap, under Statetap's licence

Every tenth conversation is written in ShareGPT form, the others in OpenAI form. Python 3.11.7 and

    pip install chatterbot-corpus==1.3.3 pyyaml

make the same bytes each time; other versions of Python may have other docstrings.
"""

import importlib.util
import inspect
import json
import pkgutil
import random
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml

SOURCES = Path(__file__).parent / "demo_sources"
OUTPUT = Path(__file__).parents[1] / "service/statetap/commands/demo_data/conversations.ndjson"
SHAREGPT_ROLES = {"system": "system", "user": "human", "assistant": "gpt"}

Message = dict[str, str]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def alternate(texts: list[str]) -> list[Message]:
    """Give the texts to user and assistant in turn; a last line of the user's alone is left out."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text.strip()} for index, text in enumerate(texts[: len(texts) // 2 * 2])]


def from_corpus(corpus: Path, selection: str) -> list[Message]:
    """Join the entries that a selection such as "english/trivia 9 28/2 64*" names."""
    name, *picks = selection.split()
    entries = load(corpus / f"{name}.yml")["conversations"]
    texts: list[str] = []
    for pick in picks:
        if pick.endswith("*"):
            texts += entries[int(pick[:-1])]
        else:
            entry, _, answer = pick.partition("/")
            texts += [entries[int(entry)][0], entries[int(entry)][int(answer or 1)]]
    return alternate([str(text) for text in texts])


def answer_from_stdlib(turn: dict[str, str]) -> str:
    [(kind, name)] = turn.items()
    value = pkgutil.resolve_name(name)
    if kind == "source":
        return f"```python\n{textwrap.dedent(inspect.getsource(value)).strip()}\n```"
    return value if isinstance(value, str) else inspect.getdoc(value) or ""


def from_turns(turns: list[str | dict[str, str]]) -> list[Message]:
    """Read turns as stdlib.yaml and written.yaml hold them: perhaps a system message, then user and assistant."""
    messages: list[Message] = []
    if isinstance(turns[0], dict):
        messages.append({"role": "system", "content": turns[0]["system"].strip()})
        turns = turns[1:]
    return messages + alternate([turn if isinstance(turn, str) else answer_from_stdlib(turn) for turn in turns])


def to_sharegpt(messages: list[Message]) -> list[Message]:
    return [{"from": SHAREGPT_ROLES[message["role"]], "value": message["content"]} for message in messages]


def conversations() -> dict[str, list[Message]]:
    package = importlib.util.find_spec("chatterbot_corpus")
    if package is None or package.origin is None:
        sys.exit("chatterbot-corpus is not installed")
    corpus = Path(package.origin).parent / "data"
    found = {key: from_corpus(corpus, selection) for key, selection in load(SOURCES / "corpus.yaml").items()}
    for name in ("stdlib.yaml", "written.yaml"):
        found |= {key: from_turns(turns) for key, turns in load(SOURCES / name).items()}
    return found


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit("run this with Python 3.11: other versions have other docstrings")
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    items = sorted(conversations().items())
    random.Random(0).shuffle(items)
    lines = [
        {"id": key, "conversations": to_sharegpt(messages)} if index % 10 == 9 else {"id": key, "messages": messages}
        for index, (key, messages) in enumerate(items)
    ]
    output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} conversations in {output}")


if __name__ == "__main__":
    main()
