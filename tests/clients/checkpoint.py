"""An instruct variant of the demo model: the same weights, with a chat template that its special tokens spell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from serve_app.config import DEMO_CHECKPOINT

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] | trim }}<|endofchunk|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The demo was trained without roles, so what it answers is no conversation; it is text all the same."""
MODEL_ID = "steerling-demo-instruct"


def write_instruct_variant(folder: Path, *, source: Path = DEMO_CHECKPOINT) -> Path:
    """Make `folder` the variant of the checkpoint in `source`, its weights linked, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        elif file.suffix in {".json", ".parquet"}:
            shutil.copyfile(file, folder / file.name)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**content, "chat_template": CHAT_TEMPLATE}, indent=2), encoding="utf-8")
    return folder
