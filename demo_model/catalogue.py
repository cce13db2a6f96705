"""`concept_labels.parquet`: the concepts' names and descriptions, in the public table's columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .corpus import Concept

SCHEMA = pa.schema(
    [
        ("concept_id", pa.int64()),
        ("concept_name", pa.string()),
        ("concept_description", pa.string()),
        ("head", pa.string()),
        ("public_group_id", pa.int64()),
        ("group_name", pa.string()),
        ("is_steerable", pa.bool_()),
        ("is_tone", pa.bool_()),
        ("is_alignment", pa.bool_()),
        ("is_demographic", pa.bool_()),
    ]
)


def write_concept_labels(concepts: Sequence[Concept], num_discovered: int, path: Path) -> None:
    """Known concepts first, then the nameless discovered ones, ids counted on."""
    groups = sorted({concept.group for concept in concepts})
    flags = {"is_tone": False, "is_alignment": False, "is_demographic": False}
    rows: list[dict[str, object]] = [
        {
            "concept_id": index,
            "concept_name": concept.name,
            "concept_description": concept.description,
            "head": "known",
            "public_group_id": groups.index(concept.group),
            "group_name": concept.group,
            "is_steerable": True,
            **flags,
        }
        for index, concept in enumerate(concepts)
    ]
    rows += [
        {"concept_id": len(concepts) + index, "head": "unknown", "is_steerable": False, **flags}
        for index in range(num_discovered)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
